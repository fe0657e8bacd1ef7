"""Frequencies of rotary position embeddings, with the scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ostinato.errors import ModelFormatError
from ostinato.models.config import Rope
from ostinato.models.fields import Fields

MAX_HEAD_SIZE = 1 << 12
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


def plain_rope(
    dim: int, base: float, *, factor: float = 1.0, divisors: Sequence[float] | None = None
) -> Rope:
    """Unscaled or linearly scaled frequencies; `divisors` are Llama 3's factors as GGUF stores them."""
    frequencies = _frequencies(dim, base)
    if divisors is not None:
        frequencies = [value / divisor for value, divisor in zip(frequencies, divisors, strict=True)]
    return Rope(tuple(value / factor for value in frequencies))


def rope_from_hf(rope: Fields, dim: int, base: float, context_length: int) -> Rope:
    """Frequencies by a Hugging Face `rope_scaling` or `rope_parameters` object."""
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in ("default", "none", "dynamic"):
        # Dynamic scaling starts past the trained context; within it, it is the unscaled base.
        return plain_rope(dim, base)
    if kind == "linear":
        return plain_rope(dim, base, factor=rope.number("factor"))
    if kind == "llama3":
        return _llama3(rope, dim, base, context_length)
    if kind == "yarn":
        original = rope.number("original_max_position_embeddings", float(context_length))
        factor = rope.number("factor", context_length / original)
        attention_factor = rope.optional_number("attention_factor")
        if attention_factor is None:
            mscale, all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
            if mscale and all_dim:
                attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dim)
            else:
                attention_factor = _mscale(factor)
        return yarn_rope(
            dim,
            base,
            factor=factor,
            original_context=original,
            attention_factor=attention_factor,
            beta_fast=rope.number("beta_fast", 32.0),
            beta_slow=rope.number("beta_slow", 1.0),
            truncate=rope.flag("truncate", True),
        )
    raise rope.error(f"RoPE type {kind!r} is not supported; supported are {', '.join(_ROPE_TYPES)}.")


def yarn_rope(
    dim: int,
    base: float,
    *,
    factor: float,
    original_context: float,
    attention_factor: float | None = None,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> Rope:
    """YaRN: low frequencies are interpolated, high ones kept, those between blended."""

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(beta_fast), dimension_of(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    frequencies: list[float] = []
    for index, value in enumerate(_frequencies(dim, base)):
        interpolated = min(max((index - low) / width, 0.0), 1.0)
        frequencies.append(value / factor * interpolated + value * (1 - interpolated))
    return Rope(tuple(frequencies), _mscale(factor) if attention_factor is None else attention_factor)


def check_head_size(dim: int) -> None:
    """Raises unless heads of this size can be rotated, before each of its elements costs anything."""
    if dim % 2 or not 0 < dim <= MAX_HEAD_SIZE:
        raise ModelFormatError(
            f"A head size of {dim} is not supported; it must be even and at most {MAX_HEAD_SIZE}. "
            "Download or convert the model again."
        )


def _frequencies(dim: int, base: float) -> list[float]:
    check_head_size(dim)
    return [base ** (-2 * index / dim) for index in range(dim // 2)]


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: Fields, dim: int, base: float, context_length: int) -> Rope:
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    original = rope.number("original_max_position_embeddings", float(context_length))
    if high <= low:
        raise rope.error(f"high_freq_factor {high} must be above low_freq_factor {low}.")
    frequencies: list[float] = []
    for value in _frequencies(dim, base):
        turns = original * value / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - kept) * value / factor + kept * value)
    return Rope(tuple(frequencies))
