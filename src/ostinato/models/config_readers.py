"""Builds a `ModelConfig` from a Hugging Face config.json or from GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ostinato.errors import ModelFormatError
from ostinato.models.config import Activation, LayerConfig, ModelConfig, Rope
from ostinato.models.fields import Fields
from ostinato.models.rope import check_head_size, plain_rope, rope_from_hf, yarn_rope

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_MAX_LAYERS = 1024
_GEMMA_27B_LAYERS = 62

END_OF_TURN_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
)
"""Control tokens that end an answer, whether or not the file's metadata says so."""


def config_from_hf(
    config_json: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The decoder that a config.json describes, with the end-of-turn ids of generation_config.json."""
    fields = Fields(config_json, "config.json")
    architectures = fields.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    family = named or {model_type: name for name, (model_type, _) in _HF_FAMILIES.items()}.get(
        fields.text("model_type", "unknown")
    )
    if family not in _HF_FAMILIES:
        shown = named or fields.get("model_type")
        raise ModelFormatError(
            f"Architecture {shown!r} is not supported; supported are {', '.join(_HF_FAMILIES)}."
        )
    if fields.get("quantization_config") is not None:
        raise fields.error(
            "checkpoints with a quantization_config are not supported. "
            "Use the unquantised checkpoint, or a GGUF."
        )
    text = fields.section("text_config") if family == "Gemma3ForConditionalGeneration" else fields
    config = _HF_FAMILIES[family][1](text or fields)
    eos = fields.token_ids("eos_token_id") or (text.token_ids("eos_token_id") if text else ())
    if generation_config is not None:
        eos = (*Fields(generation_config, "generation_config.json").token_ids("eos_token_id"), *eos)
    bos = fields.token_ids("bos_token_id") or (text.token_ids("bos_token_id") if text else ())
    return _checked(config, fields, eos or config.eos_token_ids, bos[0] if bos else config.bos_token_id)


def config_from_gguf(
    metadata: Mapping[str, Any], *, rope_divisors: Sequence[float] | None = None
) -> ModelConfig:
    """The decoder that GGUF metadata describes; `rope_divisors` is its `rope_freqs.weight`, if any."""
    general = Fields(metadata, "GGUF metadata")
    architecture = general.text("general.architecture")
    read = _GGUF_FAMILIES.get(architecture)
    if read is None:
        raise ModelFormatError(
            f"GGUF architecture {architecture!r} is not supported; supported are {', '.join(_GGUF_FAMILIES)}."
        )
    fields = Fields(metadata, "GGUF metadata", f"{architecture}.")
    if fields.get("expert_count"):
        raise fields.error(f"{architecture} with experts (mixture of experts) is not supported.")
    vocabulary = general.get("tokenizer.ggml.tokens")
    default_size = len(vocabulary) if isinstance(vocabulary, list) else None
    config = read(fields, fields.integer("vocab_size", default_size), rope_divisors)
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    return _checked(config, fields, gguf_eos_token_ids(metadata), bos[0] if bos else None)


def gguf_eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: those the metadata names and the known end-of-turn markers."""
    fields = Fields(metadata, "GGUF metadata", "tokenizer.ggml.")
    ids = [
        *fields.token_ids("eos_token_id"),
        *fields.token_ids("eot_token_id"),
        *fields.token_ids("eom_token_id"),
    ]
    tokens, kinds = fields.get("tokens"), fields.get("token_type")
    if isinstance(tokens, list) and isinstance(kinds, list):
        markers = set(END_OF_TURN_TOKENS)
        ids += [
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == 3 and token in markers
        ]
    return tuple(dict.fromkeys(ids))


def _checked(config: ModelConfig, fields: Fields, eos: Sequence[int], bos: int | None) -> ModelConfig:
    if config.heads % config.kv_heads:
        raise fields.error(f"{config.heads} heads cannot share {config.kv_heads} key-value heads evenly.")
    check_head_size(config.head_dim)
    kept = tuple(dict.fromkeys(token for token in eos if token < config.vocab_size))
    return replace(config, eos_token_ids=kept, bos_token_id=bos)


def _layer_count(fields: Fields, key: str) -> int:
    count = fields.integer(key)
    if count > _MAX_LAYERS:
        raise fields.error(f"{count} layers are more than the {_MAX_LAYERS} supported.")
    return count


def _activation(fields: Fields, key: str, default: str) -> Activation:
    name = fields.text(key, default)
    if name not in _ACTIVATIONS:
        raise fields.error(f"{key} {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _refuse(fields: Fields, key: str, why: str) -> None:
    if fields.get(key):
        raise fields.error(f"{key}={fields.get(key)!r} is not supported: {why}")


def _hf_rope(
    fields: Fields, dim: int, context: int, *, kind: str = "full_attention", base: float = 1e4
) -> Rope:
    """RoPE of the layers of one kind, by `rope_parameters` or the older `rope_theta` and `rope_scaling`."""
    rope = fields.section("rope_parameters") or fields.section("rope_scaling")
    if rope is not None and (nested := rope.section(kind)) is not None:
        rope = nested
    partial = rope.number("partial_rotary_factor", 1.0) if rope else 1.0
    if fields.number("partial_rotary_factor", partial) != 1.0:
        raise fields.error("a partial_rotary_factor other than 1 is not supported.")
    if rope is None:
        return plain_rope(dim, fields.number("rope_theta", base))
    base = rope.number("rope_theta", fields.number("rope_theta", base))
    # A checkpoint may keep the length it was pretrained for outside of the RoPE entry.
    return rope_from_hf(rope, dim, base, fields.integer("original_max_position_embeddings", context))


def _hf_windows(
    fields: Fields, count: int, *, default: Sequence[bool], window: int | None
) -> list[int | None]:
    kinds = fields.get("layer_types")
    if kinds is None:
        return [window if sliding else None for sliding in default]
    if not isinstance(kinds, list) or len(kinds) != count:
        raise fields.error(f"layer_types must list the kind of each of the {count} layers.")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(
                f"layer type {kind!r} is not supported; supported are full_attention, sliding_attention."
            )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _hf_llama_like(
    fields: Fields, architecture: str, *, window: int | None = None, head_dim: int | None = None
) -> ModelConfig:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    count = _layer_count(fields, "num_hidden_layers")
    dim = fields.integer("head_dim", head_dim or hidden // heads)
    context = fields.integer("max_position_embeddings", 2048)
    rope = _hf_rope(fields, dim, context)
    if architecture in ("llama", "mistral"):
        windows = _hf_windows(fields, count, default=[True] * count, window=window)
    else:
        first = fields.integer("max_window_layers", 28, least=0)
        windows = _hf_windows(fields, count, default=[i >= first for i in range(count)], window=window)
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=dim,
        context_length=context,
        layers=tuple(LayerConfig(rope, size) for size in windows),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, "hidden_act", "silu"),
    )


def _hf_llama(fields: Fields) -> ModelConfig:
    return _hf_llama_like(fields, "llama")


def _hf_mistral(fields: Fields) -> ModelConfig:
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    return _hf_llama_like(fields, "mistral", window=window)


def _hf_qwen(architecture: str, head_dim: int | None) -> Callable[[Fields], ModelConfig]:
    def read(fields: Fields) -> ModelConfig:
        window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
        return _hf_llama_like(fields, architecture, window=window, head_dim=head_dim)

    return read


def _hf_gemma3(fields: Fields) -> ModelConfig:
    _refuse(fields, "final_logit_softcapping", "Gemma 3 was trained without it.")
    _refuse(fields, "attn_logit_softcapping", "Gemma 3 was trained without it.")
    _refuse(fields, "use_bidirectional_attention", "only causal decoders can be served.")
    hidden, dim = fields.integer("hidden_size", 2304), fields.integer("head_dim", 256)
    count = _layer_count(fields, "num_hidden_layers") if fields.get("num_hidden_layers") is not None else 26
    context = fields.integer("max_position_embeddings", 131_072)
    pattern = fields.integer("sliding_window_pattern", fields.integer("_sliding_window_pattern", 6))
    windows = _hf_windows(
        fields,
        count,
        default=[(i + 1) % pattern != 0 for i in range(count)],
        window=fields.integer("sliding_window", 4096),
    )
    distant = _hf_rope(fields, dim, context, base=1e6)
    parameters = fields.section("rope_parameters")
    if parameters is not None and parameters.get("sliding_attention") is not None:
        local = _hf_rope(fields, dim, context, kind="sliding_attention")
    else:
        local = plain_rope(dim, fields.number("rope_local_base_freq", 1e4))
    return ModelConfig(
        architecture="gemma3",
        vocab_size=fields.integer("vocab_size", 262_208),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", 9216),
        heads=fields.integer("num_attention_heads", 8),
        kv_heads=fields.integer("num_key_value_heads", 4),
        head_dim=dim,
        context_length=context,
        layers=tuple(LayerConfig(distant if size is None else local, size) for size in windows),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=math.sqrt(hidden),
        eos_token_ids=(1,),
        bos_token_id=2,
    )


def _hf_falcon(fields: Fields) -> ModelConfig:
    _refuse(fields, "alibi", "only Falcon models with rotary embeddings can be served.")
    hidden = fields.integer("hidden_size", fields.integer("n_embed", 4544))
    heads = fields.integer("num_attention_heads", fields.integer("n_head", 71))
    count = _layer_count(fields, "num_hidden_layers" if fields.get("num_hidden_layers") else "n_layer")
    new = fields.flag("new_decoder_architecture")
    if new:
        kv_heads = fields.integer("num_kv_heads", fields.integer("n_head_kv", heads))
    else:
        kv_heads = 1 if fields.flag("multi_query", True) else heads
    context = fields.integer("max_position_embeddings", 2048)
    rope = _hf_rope(fields, hidden // heads, context)
    return ModelConfig(
        architecture="falcon",
        vocab_size=fields.integer("vocab_size", 65_024),
        hidden_size=hidden,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        context_length=context,
        layers=(LayerConfig(rope),) * count,
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation=_activation(fields, "activation", "gelu"),
        gated_mlp=False,
        parallel_block=new or fields.flag("parallel_attn", True),
        eos_token_ids=(11,),
        bos_token_id=11,
    )


def _hf_mpt(fields: Fields) -> ModelConfig:
    attention = fields.section("attn_config") or Fields({}, "config.json, attn_config")
    if attention.text("attn_type", "multihead_attention") != "multihead_attention":
        raise attention.error(f"attn_type {attention.get('attn_type')!r} is not supported.")
    if not attention.flag("alibi", True):
        raise attention.error("alibi=false (learned positions) is not supported.")
    _refuse(attention, "qk_ln", "MPT models with normalised queries and keys are not supported.")
    _refuse(attention, "prefix_lm", "only causal decoders can be served.")
    hidden, heads = fields.integer("d_model", 2048), fields.integer("n_heads", 16)
    logit_scale = fields.get("logit_scale")
    if logit_scale == "inv_sqrt_d_model":
        logit_scale = hidden**-0.5
    elif logit_scale is not None:
        logit_scale = fields.number("logit_scale")
    return ModelConfig(
        architecture="mpt",
        vocab_size=fields.integer("vocab_size", 50_368),
        hidden_size=hidden,
        intermediate_size=hidden * fields.integer("expansion_ratio", 4),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        context_length=fields.integer("max_seq_len", 2048),
        layers=(LayerConfig(None),) * _layer_count(fields, "n_layers"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        activation="gelu",
        gated_mlp=False,
        attention_scale=attention.optional_number("softmax_scale"),
        alibi_slopes=_alibi_slopes(heads, attention.number("alibi_bias_max", 8)),
        qkv_clip=attention.optional_number("clip_qkv"),
        logit_scale=logit_scale or 1.0,
    )


def _alibi_slopes(heads: int, bias_max: float) -> tuple[float, ...]:
    if heads > 1 << 16:
        raise ModelFormatError(f"{heads} attention heads are more than can be served.")
    power = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * (index + 1) / power) for index in range(power)]
    if power != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    return tuple(slopes)


def _gguf_sizes(fields: Fields) -> tuple[int, int, int, int]:
    """hidden size, heads, key-value heads, head size."""
    hidden = fields.integer("embedding_length")
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        if isinstance(fields.get(key), list):
            raise fields.error(f"{key} differs by layer, which is not supported.")
    heads = fields.integer("attention.head_count")
    dim = fields.integer("attention.key_length", max(hidden // heads, 1))
    if fields.integer("attention.value_length", dim) != dim:
        raise fields.error("keys and values of different sizes are not supported.")
    if fields.integer("rope.dimension_count", dim) != dim:
        raise fields.error(f"rope.dimension_count must equal the head size {dim}.")
    return hidden, heads, fields.integer("attention.head_count_kv", heads), dim


def _gguf_rope(fields: Fields, dim: int, base: float, divisors: Sequence[float] | None) -> Rope:
    base = fields.number("rope.freq_base", base)
    kind = fields.text("rope.scaling.type", "linear" if fields.get("rope.scale_linear") else "none")
    if divisors is not None:
        if len(divisors) != dim // 2 or not all(math.isfinite(value) and value > 0 for value in divisors):
            raise fields.error(f"rope_freqs.weight must hold {dim // 2} positive numbers.")
        return plain_rope(dim, base, divisors=divisors)
    if kind == "none":
        return plain_rope(dim, base)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "linear":
        return plain_rope(dim, base, factor=factor)
    if kind == "yarn":
        original = fields.number(
            "rope.scaling.original_context_length", float(fields.integer("context_length"))
        )
        return yarn_rope(
            dim,
            base,
            factor=factor,
            original_context=original,
            attention_factor=fields.optional_number("rope.scaling.attn_factor"),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise fields.error(f"RoPE scaling {kind!r} is not supported; supported are none, linear, yarn.")


def _gguf_llama_like(
    architecture: str, base: float
) -> Callable[[Fields, int, Sequence[float] | None], ModelConfig]:
    def read(fields: Fields, vocab_size: int, divisors: Sequence[float] | None) -> ModelConfig:
        hidden, heads, kv_heads, dim = _gguf_sizes(fields)
        rope = _gguf_rope(fields, dim, base, divisors)
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            context_length=fields.integer("context_length"),
            layers=(LayerConfig(rope),) * _layer_count(fields, "block_count"),
            norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        )

    return read


def _gguf_gemma3(fields: Fields, vocab_size: int, divisors: Sequence[float] | None) -> ModelConfig:
    _refuse(fields, "final_logit_softcapping", "Gemma 3 was trained without it.")
    hidden, heads, kv_heads, dim = _gguf_sizes(fields)
    count = _layer_count(fields, "block_count")
    window = fields.integer("attention.sliding_window")
    pattern = fields.integer("attention.sliding_window_pattern", 6)
    distant = LayerConfig(_gguf_rope(fields, dim, 1e6, divisors))
    local = LayerConfig(plain_rope(dim, fields.number("rope.freq_base_swa", 1e4)), window)
    # The file does not hold query_pre_attn_scalar; only the 27B model has one that is not the head size.
    scalar = hidden / heads if count == _GEMMA_27B_LAYERS else dim
    return ModelConfig(
        architecture="gemma3",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        context_length=fields.integer("context_length"),
        layers=tuple(distant if (i + 1) % pattern == 0 else local for i in range(count)),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation="gelu_tanh",
        attention_scale=scalar**-0.5,
        embedding_scale=math.sqrt(hidden),
    )


def _gguf_layer_norm(fields: Fields, vocab_size: int, *, architecture: str, rope: Rope | None) -> ModelConfig:
    hidden, heads, kv_heads, dim = _gguf_sizes(fields)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("feed_forward_length", 4 * hidden),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        context_length=fields.integer("context_length"),
        layers=(LayerConfig(rope),) * _layer_count(fields, "block_count"),
        norm="layer",
        norm_eps=fields.number("attention.layer_norm_epsilon"),
        activation="gelu",
        gated_mlp=False,
        parallel_block=architecture == "falcon",
        alibi_slopes=(
            _alibi_slopes(heads, fields.number("attention.max_alibi_bias", 8))
            if architecture == "mpt"
            else None
        ),
        qkv_clip=fields.optional_number("attention.clamp_kqv") if fields.get("attention.clamp_kqv") else None,
    )


def _gguf_falcon(fields: Fields, vocab_size: int, divisors: Sequence[float] | None) -> ModelConfig:
    dim = _gguf_sizes(fields)[3]
    rope = _gguf_rope(fields, dim, 1e4, divisors)
    return _gguf_layer_norm(fields, vocab_size, architecture="falcon", rope=rope)


def _gguf_mpt(fields: Fields, vocab_size: int, divisors: Sequence[float] | None) -> ModelConfig:  # noqa: ARG001
    return _gguf_layer_norm(fields, vocab_size, architecture="mpt", rope=None)


_HF_FAMILIES: dict[str, tuple[str, Callable[[Fields], ModelConfig]]] = {
    "LlamaForCausalLM": ("llama", _hf_llama),
    "MistralForCausalLM": ("mistral", _hf_mistral),
    "Qwen2ForCausalLM": ("qwen2", _hf_qwen("qwen2", None)),
    "Qwen3ForCausalLM": ("qwen3", _hf_qwen("qwen3", 128)),
    "Gemma3ForCausalLM": ("gemma3_text", _hf_gemma3),
    "Gemma3ForConditionalGeneration": ("gemma3", _hf_gemma3),
    "FalconForCausalLM": ("falcon", _hf_falcon),
    "MPTForCausalLM": ("mpt", _hf_mpt),
    "MptForCausalLM": ("mpt", _hf_mpt),
}
_GGUF_FAMILIES: dict[str, Callable[[Fields, int, Sequence[float] | None], ModelConfig]] = {
    "llama": _gguf_llama_like("llama", 1e4),
    "qwen2": _gguf_llama_like("qwen2", 1e6),
    "qwen3": _gguf_llama_like("qwen3", 1e6),
    "gemma3": _gguf_gemma3,
    "falcon": _gguf_falcon,
    "mpt": _gguf_mpt,
}
