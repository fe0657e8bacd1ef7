"""Canonical tensor names, and the names that checkpoints use for them.

`embed`, `head` (absent where tied to `embed`), `final_norm.weight|bias`, and per layer `layers.{i}.` with
`q k v o gate up down attn_norm ffn_norm q_norm k_norm post_attn_norm post_ffn_norm` and `.weight|.bias`.
`qkv` stands for a fused projection until `weights` has split it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ostinato.models.config import ModelConfig

Translate = Callable[[str], str | None]
"""A checkpoint's tensor name to the canonical one; None for a tensor that is not needed.

Raises KeyError for a tensor that the architecture does not have.
"""

_PROJECTIONS = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attn_norm",
}
_LLAMA = {**_PROJECTIONS, "post_attention_layernorm": "ffn_norm"}
_GEMMA3 = {
    **_PROJECTIONS,
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffn_norm",
}
_FALCON = {
    "self_attention.query_key_value": "qkv",
    "self_attention.dense": "o",
    "mlp.dense_h_to_4h": "up",
    "mlp.dense_4h_to_h": "down",
    "input_layernorm": "attn_norm",
    "ln_attn": "attn_norm",
    "ln_mlp": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_MPT = {
    "attn.Wqkv": "qkv",
    "attn.out_proj": "o",
    "ffn.up_proj": "up",
    "ffn.down_proj": "down",
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
}
_HF_LAYER = {"gemma3": _GEMMA3, "falcon": _FALCON, "mpt": _MPT}
_HF_GLOBAL = {
    "embed_tokens.weight": "embed",
    "word_embeddings.weight": "embed",
    "wte.weight": "embed",
    "lm_head.weight": "head",
    "norm.weight": "final_norm.weight",
    "ln_f.weight": "final_norm.weight",
    "ln_f.bias": "final_norm.bias",
    "norm_f.weight": "final_norm.weight",
    "norm_f.bias": "final_norm.bias",
}
_HF_NAME = re.compile(r"(?:(?:model|language_model|transformer)\.)*(.+)")
_HF_LAYER_NAME = re.compile(r"(?:layers|h|blocks)\.(\d+)\.(.+)\.(weight|bias)")
_HF_NOT_NEEDED = re.compile(
    r"(^|\.)(vision_tower|vision_model|multi_modal_projector)\.|rotary_emb\.inv_freq$|\.attn\.masked_bias$"
)

_GGUF_LAYER = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
    "post_attention_norm": "post_attn_norm",
    "post_ffw_norm": "post_ffn_norm",
}
# Falcon with two norms: llama.cpp calls the MLP's norm attn_norm and the attention's attn_norm_2.
_GGUF_TWO_NORMS = {**_GGUF_LAYER, "attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}
_GGUF_GLOBAL = {
    "token_embd.weight": "embed",
    "output.weight": "head",
    "output_norm.weight": "final_norm.weight",
    "output_norm.bias": "final_norm.bias",
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_GGUF_NOT_NEEDED = re.compile(r"^rope_freqs\.weight$|\.(attn_rot_embd|rope_freqs)(\.weight)?$")


def hf_names(config: ModelConfig) -> Translate:
    """Translates the names of a Hugging Face checkpoint."""
    layer_names = _HF_LAYER.get(config.architecture, _LLAMA)

    def translate(name: str) -> str | None:
        if _HF_NOT_NEEDED.search(name):
            return None
        match = _HF_NAME.fullmatch(name)
        rest = match[1] if match else name
        layer = _HF_LAYER_NAME.fullmatch(rest)
        if layer is None:
            return _HF_GLOBAL[rest]
        return f"layers.{int(layer[1])}.{layer_names[layer[2]]}.{layer[3]}"

    return translate


def gguf_names(*, two_norms: bool) -> Translate:
    """Translates the names of a GGUF file; `two_norms`: it has `attn_norm_2` (Falcon 40B)."""
    layer_names = _GGUF_TWO_NORMS if two_norms else _GGUF_LAYER

    def translate(name: str) -> str | None:
        if _GGUF_NOT_NEEDED.search(name):
            return None
        layer = _GGUF_LAYER_NAME.fullmatch(name)
        if layer is None:
            return _GGUF_GLOBAL[name]
        return f"layers.{int(layer[1])}.{layer_names[layer[2]]}.{layer[3]}"

    return translate


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a model of this configuration may have, without its layer's prefix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (config.vocab_size, hidden),
        "head": (config.vocab_size, hidden),
        "q_norm.weight": (config.head_dim,),
        "k_norm.weight": (config.head_dim,),
    }
    matrices = {
        "q": (queries, hidden),
        "k": (keys, hidden),
        "v": (keys, hidden),
        "o": (hidden, queries),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.gated_mlp:
        matrices["gate"] = (inner, hidden)
    for name, shape in matrices.items():
        shapes[f"{name}.weight"] = shape
        shapes[f"{name}.bias"] = shape[:1]
    for name in ("final_norm", "attn_norm", "ffn_norm", "post_attn_norm", "post_ffn_norm"):
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (hidden,)
    return shapes


def required_in_layer(config: ModelConfig) -> frozenset[str]:
    """Tensors that no layer of this configuration can be without."""
    names = {"attn_norm", "q", "k", "v", "o", "up", "down"}
    if config.gated_mlp:
        names.add("gate")
    if not config.parallel_block:
        names.add("ffn_norm")
    if config.architecture in ("qwen3", "gemma3"):
        names |= {"q_norm", "k_norm"}
    if config.architecture == "gemma3":
        names |= {"post_attn_norm", "post_ffn_norm"}
    return frozenset(f"{name}.weight" for name in names)
