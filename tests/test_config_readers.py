"""Configurations and weights against transformers: a plain forward pass must give the same logits."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from ostinato.errors import ModelFormatError
from ostinato.models.config import ModelConfig
from ostinato.models.config_readers import config_from_gguf, config_from_hf
from ostinato.models.weights import QuantTensor, Weights, content_hash, load_model_files

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def forward(config: ModelConfig, weights: Weights, ids: list[int]) -> Tensor:
    """Logits of all positions, as plainly as can be, in float32."""

    def get(name: str) -> Tensor | None:
        value = weights.get(name)
        return (
            value.dequantise() if isinstance(value, QuantTensor) else None if value is None else value.float()
        )

    def norm(x: Tensor, name: str) -> Tensor:
        weight = get(f"{name}.weight")
        if weight is None:
            return x
        if config.norm == "layer" and "q_norm" not in name:
            return F.layer_norm(x, x.shape[-1:], weight, get(f"{name}.bias"), config.norm_eps)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weight

    def linear(x: Tensor, name: str) -> Tensor:
        weight = get(f"{name}.weight")
        assert weight is not None
        return F.linear(x, weight, get(f"{name}.bias"))

    act = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}[
        config.activation
    ]
    embed = get("embed")
    assert embed is not None
    x = embed[ids] * config.embedding_scale
    count = len(ids)
    behind = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    for i, layer in enumerate(config.layers):
        at = f"layers.{i}."

        def heads(x: Tensor, name: str, n: int, at: str = at, rope: Any = layer.rope) -> Tensor:
            y = linear(x, at + name)
            if config.qkv_clip is not None:
                y = y.clamp(-config.qkv_clip, config.qkv_clip)
            y = y.view(count, n, config.head_dim).transpose(0, 1)
            if name == "v":
                return y
            y = norm(y, f"{at}{name}_norm")
            if rope is None:
                return y
            angles = torch.outer(torch.arange(count).float(), torch.tensor(rope.inv_freq)).repeat(1, 2)
            a, b = y.chunk(2, -1)
            turned = y * angles.cos() + torch.cat([-b, a], -1) * angles.sin()
            return turned * rope.attention_factor

        h = norm(x, at + "attn_norm")
        q, k, v = (heads(h, n, config.heads if n == "q" else config.kv_heads) for n in "qkv")
        k, v = (t.repeat_interleave(config.heads // config.kv_heads, 0) for t in (k, v))
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        scores = q @ k.transpose(1, 2) * scale
        if config.alibi_slopes is not None:
            scores = scores - torch.tensor(config.alibi_slopes)[:, None, None] * behind
        hidden = (behind < 0) | (behind >= (layer.window or math.inf))
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        attended = norm(linear(mixed.transpose(0, 1).flatten(1), at + "o"), at + "post_attn_norm")
        if config.parallel_block:
            mlp_in = norm(x, at + "ffn_norm") if f"{at}ffn_norm.weight" in weights else h
        else:
            x = x + attended
            mlp_in = norm(x, at + "ffn_norm")
        up = linear(mlp_in, at + "up")
        inner = act(linear(mlp_in, at + "gate")) * up if config.gated_mlp else act(up)
        x = x + norm(linear(inner, at + "down"), at + "post_ffn_norm")
        if config.parallel_block:
            x = x + attended
    x = norm(x, "final_norm")
    head = get("head")
    return F.linear(x, embed if head is None else head) * config.logit_scale


def build(name: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    classes = {"Gemma3Text": "Gemma3ForCausalLM", "Gemma3": "Gemma3ForConditionalGeneration"}
    model = getattr(transformers, classes.get(name, f"{name}ForCausalLM"))(config)
    with torch.no_grad():
        for tensor in model.parameters():
            # Large enough that a wrong order of rows or a wrong norm shows.
            tensor.normal_(0, 0.2)
    return model.float().eval()


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e5,
}
GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 24}
FALCON = {
    key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama tied with biases": (
        "Llama",
        {**SMALL, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    ),
    "llama linear": (
        "Llama",
        {**SMALL, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    ),
    "llama 3": ("Llama", {**SMALL, "rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {**SMALL, "sliding_window": 6}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2 with windows": (
        "Qwen2",
        {**SMALL, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 16}),
    "qwen3 yarn": ("Qwen3", {**SMALL, "head_dim": 16, "rope_parameters": YARN}),
    "gemma3": ("Gemma3Text", GEMMA),
    "falcon 7b": ("Falcon", FALCON),
    "falcon 40b": ("Falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon 11b": (
        "Falcon",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon without multi-query": (
        "Falcon",
        {**FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": (
        "Mpt",
        {
            "vocab_size": 96,
            "d_model": 36,
            "n_heads": 6,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"clip_qkv": 1.5},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_computes_the_logits_that_transformers_computes(case: str, tmp_path: Path) -> None:
    model = build(CASES[case][0], **CASES[case][1])
    model.save_pretrained(tmp_path, max_shard_size="40KB" if case == "llama" else "5GB")
    config, weights = load_model_files(tmp_path)
    ids = [(7 * i + i * i) % 96 for i in range(20)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
        torch.testing.assert_close(forward(config, weights, ids), expected, rtol=2e-4, atol=2e-4)


def test_the_text_part_of_a_multimodal_gemma3(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    model = build("Gemma3", text_config=GEMMA, vision_config=vision, mm_tokens_per_image=1)
    model.save_pretrained(tmp_path)
    config, weights = load_model_files(tmp_path)
    ids = list(range(2, 20))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(forward(config, weights, ids), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("case", ["llama 3", "qwen3 yarn", "llama linear"])
def test_the_older_layout_of_rope_settings(case: str, tmp_path: Path) -> None:
    build(CASES[case][0], **CASES[case][1]).save_pretrained(tmp_path)
    new = json.loads((tmp_path / "config.json").read_text())
    old = dict(new)
    rope = dict(old.pop("rope_parameters"))
    old["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = rope
    assert config_from_hf(old) == config_from_hf(new)


def test_gemma3_in_the_older_layout() -> None:
    old = {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    config = config_from_hf(old)
    assert [layer.window for layer in config.layers] == [5, 5, None, 5, 5, None, 5]
    distant, local = config.layers[2].rope, config.layers[0].rope
    assert distant is not None
    assert local is not None
    assert distant.inv_freq[1] == pytest.approx(1e6 ** (-1 / 8) / 8)
    assert local.inv_freq[1] == pytest.approx(1e4 ** (-1 / 8))
    assert config.attention_scale == pytest.approx(24**-0.5)
    assert config.embedding_scale == pytest.approx(math.sqrt(32))


def test_end_of_turn_tokens_come_from_generation_config_too() -> None:
    json_ = {**SMALL, "architectures": ["LlamaForCausalLM"], "eos_token_id": 2, "bos_token_id": 1}
    config = config_from_hf(json_, {"eos_token_id": [2, 7]})
    assert config.eos_token_ids == (2, 7)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM.*LlamaForCausalLM"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_key_value_heads": 3}, "evenly"),
        ({"hidden_act": "relu"}, "relu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": 5}, "an object is needed"),
        ({"layer_types": ["chunked"]}, "layer_types"),
    ],
)
def test_what_is_not_supported_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        config_from_hf({**SMALL, "architectures": ["LlamaForCausalLM"], **changes})


def test_an_unsupported_gguf_architecture_is_named() -> None:
    with pytest.raises(ModelFormatError, match=r"'mamba'.*llama, qwen2"):
        config_from_gguf({"general.architecture": "mamba"})
    with pytest.raises(ModelFormatError, match="experts"):
        config_from_gguf({"general.architecture": "llama", "llama.expert_count": 8})


def test_damaged_folders_are_format_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        load_model_files(tmp_path)
    model = build("Llama", **SMALL)
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    before = content_hash(tmp_path)
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelFormatError, match="safetensors"):
        load_model_files(tmp_path)
    assert content_hash(tmp_path) != before
    weights.unlink()
    with pytest.raises(ModelFormatError, match="safetensors"):
        load_model_files(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelFormatError, match=r"layers\.3"):
        load_model_files(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        load_model_files(tmp_path)


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    build("Llama", **SMALL).save_pretrained(tmp_path)
    seen: list[tuple[int, int]] = []
    load_model_files(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
