"""Small models with random weights, one per supported family, made by `transformers`: the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def _config(family: str) -> Any:
    t = transformers
    if family == "llama":
        return t.LlamaConfig(**_COMMON, head_dim=16, rope_theta=10000.0, tie_word_embeddings=True)
    if family == "llama3-rope":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
        return t.LlamaConfig(**_COMMON, head_dim=16, rope_theta=5000.0, rope_scaling=scaling)
    if family == "mistral":
        return t.MistralConfig(**_COMMON, head_dim=16, sliding_window=24)
    if family == "qwen2":
        return t.Qwen2Config(**_COMMON, rope_theta=10000.0)
    if family == "qwen3":
        return t.Qwen3Config(**_COMMON, head_dim=32, rope_theta=10000.0)
    if family == "gemma3":
        return t.Gemma3TextConfig(
            **{**_COMMON, "num_hidden_layers": 4},
            head_dim=32,
            query_pre_attn_scalar=24,
            sliding_window=24,
            layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        )
    falcon = {k: v for k, v in _COMMON.items() if k not in {"num_key_value_heads", "intermediate_size"}}
    if family == "falcon":
        return t.FalconConfig(**falcon, multi_query=True, parallel_attn=True, bias=False, alibi=False)
    if family == "falcon-new":
        return t.FalconConfig(
            **falcon,
            new_decoder_architecture=True,
            num_kv_heads=2,
            parallel_attn=True,
            bias=False,
            alibi=False,
        )
    if family == "mpt":
        return t.MptConfig(
            d_model=64, n_heads=4, n_layers=3, expansion_ratio=4, max_seq_len=512, vocab_size=VOCAB,
            attn_config={"alibi": True, "alibi_bias_max": 8, "attn_type": "multihead_attention"},
            bos_token_id=0, eos_token_id=1,
        )  # fmt: skip
    raise ValueError(family)


FAMILIES = ("llama", "llama3-rope", "mistral", "qwen2", "qwen3", "gemma3", "falcon", "falcon-new", "mpt")


def build(family: str, folder: Path) -> Any:
    """Write a random model of `family` to `folder`; return it as `transformers` runs it, in float32."""
    torch.manual_seed(FAMILIES.index(family))
    config = _config(family)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the usual initialisation, and norms and biases off their neutral values: with
            # those a wrong norm, bias or position would hardly show in the logits.
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.12)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model.float().eval()
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return model


def byte_tokenizer(size: int = VOCAB) -> Tokenizer:
    """Bytes as tokens 2 to 257: enough to read and write any text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    vocab |= {f"<extra{i}>": i for i in range(len(vocab), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
