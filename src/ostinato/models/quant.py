"""Quantised weight matrices, and how GGUF's block formats become them."""

from __future__ import annotations

from dataclasses import dataclass

import gguf.quants
import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor

from ostinato.errors import ModelFormatError

GROUP = 32
"""Weights that share one scale and one minimum, along K."""

_Q = GGMLQuantizationType
_Bytes = NDArray[np.uint8]
_Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QuantTensor:
    """A matrix `[N, K]` in groups of 32 along K: value = code * scale + minimum."""

    codes: Tensor
    """uint8 `[N, K]`; below 16 where `bits` is 4."""
    scale: Tensor
    """float32 `[N, K // 32]`."""
    minimum: Tensor
    """float32 `[N, K // 32]`."""
    bits: int
    """4 or 8."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(N, K)`."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self) -> Tensor:
        """The values, float32 `[N, K]`."""
        grouped = self.codes.unflatten(1, (-1, GROUP)).float()
        return grouped.mul_(self.scale.unsqueeze(2)).add_(self.minimum.unsqueeze(2)).flatten(1)

    def rows(self, index: Tensor | slice) -> QuantTensor:
        """A selection or a permutation of the rows."""
        return QuantTensor(self.codes[index], self.scale[index], self.minimum[index], self.bits)


def from_ggml(data: _Bytes, kind: GGMLQuantizationType, name: str) -> Tensor | QuantTensor:
    """One tensor's bytes `[rows, bytes per row]` as float32, bfloat16 or `QuantTensor`, always a copy.

    Formats of 4 bits and 8 bits keep their values to the last bit. Q6_K, whose groups are of 16, is
    requantised to groups of 32 with 8 bits (its error is at most 1/510 of a group's range). Formats of
    fewer bits become float32.
    """
    if kind is _Q.F32:
        return torch.from_numpy(data.view(np.float32).copy())
    if kind is _Q.F16:
        return torch.from_numpy(data.view(np.float16)).float()
    if kind is _Q.BF16:
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
    reader = _READERS.get(kind)
    if reader is not None:
        bits, read = reader
        block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
        with np.errstate(invalid="ignore", over="ignore"):
            codes, scale, minimum = read(data.reshape(-1, block_bytes))
        if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
            raise ModelFormatError(
                f"Tensor {name!r} holds scales that are no numbers. Download the model again."
            )
        rows = data.shape[0]
        return QuantTensor(
            torch.from_numpy(codes.reshape(rows, -1)),
            torch.from_numpy(scale.reshape(rows, -1)),
            torch.from_numpy(minimum.reshape(rows, -1)),
            bits,
        )
    try:
        return torch.from_numpy(gguf.quants.dequantize(data, kind).astype(np.float32, copy=False))
    except NotImplementedError as error:
        raise ModelFormatError(
            f"Tensor {name!r} has type {kind.name}, which is not supported. "
            "Use a file quantised as Q4_0, Q4_1, Q8_0, Q4_K, Q5_K, Q6_K, F16 or BF16."
        ) from error


_Groups = tuple[_Bytes, _Floats, _Floats]


def _half(blocks: _Bytes, at: int) -> _Floats:
    """The float16 at byte `at` of each block."""
    return blocks[:, at : at + 2].copy().view(np.float16)[:, 0].astype(np.float32)


def _nibbles(packed: _Bytes) -> _Bytes:
    """`[..., n]` bytes as `[..., 2, n]`: all low nibbles, then all high ones."""
    out = np.empty((*packed.shape[:-1], 2, packed.shape[-1]), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0, :])
    np.right_shift(packed, 4, out=out[..., 1, :])
    return out


def _fifth_bit(packed: _Bytes) -> _Bytes:
    """Q5_0, Q5_1: four bytes of one bit per code, as 0 or 16."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: _Bytes) -> _Groups:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]), scale, scale * -8


def _q4_1(blocks: _Bytes) -> _Groups:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: _Bytes) -> _Groups:
    scale = _half(blocks, 0)
    codes = _nibbles(blocks[:, 6:]).reshape(-1, GROUP) | _fifth_bit(blocks[:, 2:6])
    return codes, scale, scale * -16


def _q5_1(blocks: _Bytes) -> _Groups:
    codes = _nibbles(blocks[:, 8:]).reshape(-1, GROUP) | _fifth_bit(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: _Bytes) -> _Groups:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ np.uint8(128), scale, scale * -128


def _k_scales(blocks: _Bytes) -> tuple[_Floats, _Floats]:
    """Q4_K, Q5_K: the scale and minimum of the eight groups of each 256, from 6-bit fields."""
    fields = blocks[:, 4:16].reshape(-1, 3, 4)
    low, mid, high = fields[:, 0], fields[:, 1], fields[:, 2]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=1)
    minimum = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=1)
    return _half(blocks, 0)[:, None] * scale, -(_half(blocks, 2)[:, None] * minimum)


def _q4_k(blocks: _Bytes) -> _Groups:
    return _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP)), *_k_scales(blocks)


def _q5_k(blocks: _Bytes) -> _Groups:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, GROUP)).reshape(-1, 8, GROUP)
    shift = np.arange(8, dtype=np.uint8)[:, None]
    codes |= ((blocks[:, None, 16:48] >> shift) & 1) << 4
    return codes, *_k_scales(blocks)


def _q6_k(blocks: _Bytes) -> _Groups:
    values = gguf.quants.dequantize(blocks, _Q.Q6_K).reshape(-1, GROUP)
    minimum = values.min(axis=1)
    scale = (values.max(axis=1) - minimum) / np.float32(255)
    inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint((values - minimum[:, None]) * inverse[:, None]).clip(0, 255).astype(np.uint8)
    return codes, scale, minimum


_READERS = {
    _Q.Q4_0: (4, _q4_0),
    _Q.Q4_1: (4, _q4_1),
    _Q.Q4_K: (4, _q4_k),
    _Q.Q5_0: (8, _q5_0),
    _Q.Q5_1: (8, _q5_1),
    _Q.Q5_K: (8, _q5_k),
    _Q.Q6_K: (8, _q6_k),
    _Q.Q8_0: (8, _q8_0),
}
