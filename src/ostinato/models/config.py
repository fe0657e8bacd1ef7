"""What a decoder is, as data: one `ModelConfig` drives the one decoder for every supported family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]
Norm = Literal["rms", "layer"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of one layer (non-interleaved halves, "NeoX" layout).

    `inv_freq` has `dim / 2` entries, with any scaling of the checkpoint already applied;
    `attention_factor` multiplies cos and sin (YaRN; 1.0 otherwise).
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True)
class LayerConfig:
    """What may differ between the layers of one model."""

    rope: Rope | None
    window: int | None = None
    """Sliding window: a query at position p sees keys at positions > p - window. None: all."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Sizes are in elements; `context_length` is in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    gated_mlp: bool = True
    """True: down(act(gate(x)) * up(x)). False: down(act(up(x)))."""
    parallel_block: bool = False
    """True (Falcon): attention and MLP both read the layer's input norm(s) and are added to it together."""
    attention_scale: float | None = None
    """Scale of q·k; None means head_dim ** -0.5."""
    alibi_slopes: tuple[float, ...] | None = None
    """MPT: per query head, added bias is slope * (key position - query position)."""
    qkv_clip: float | None = None
    """MPT `clip_qkv`: projections are clamped to [-clip, clip]."""
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
