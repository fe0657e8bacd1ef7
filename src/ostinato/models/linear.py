"""Linear layers and norms: dense weights, or quantised ones kept as they are for decode."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.config import Activation
from ostinato.models.weights import QuantTensor
from ostinato.native.kernels import Kernels, PackedLinear

Weight = Tensor | QuantTensor

_KEPT_ROWS = 16
"""Up to this many rows, as in decode, making a tensor takes as long as the product it is for."""


@dataclass(frozen=True)
class Backend:
    """Where and how a model computes. `kernels` are the compiled ones, or None for plain PyTorch.

    `max_rows` is the most tokens of one step.
    """

    dtype: torch.dtype
    device: torch.device
    kernels: Kernels | None
    max_rows: int


class Norm:
    """RMSNorm or LayerNorm over the last axis; float32 inside."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, kind: str, eps: float, kernels: Kernels | None
    ) -> None:
        self.weight, self.bias, self.kind, self.eps, self.kernels = weight, bias, kind, eps, kernels

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.kind == "rms" and self.kernels is not None:
            return self.kernels.rms_norm(x, self.weight, self.eps, torch.empty_like(x), residual)
        if self.kind == "rms":
            y = x.float()
            y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)
        else:
            y = F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)
        return y if residual is None else y + residual


def activate(x: Tensor, kind: Activation) -> Tensor:
    if kind == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated(gate_up: Tensor, kind: Activation, kernels: Kernels | None) -> Tensor:
    """act(gate) * up, for [tokens, 2 * intermediate] with the gates first."""
    if kernels is not None:
        return kernels.gated(gate_up, gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)), kind)
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, kind) * up


class Linear:
    """y = f(x) · Wᵀ (+ bias) (+ residual), for W of shape [out, in].

    f is a norm, a gated activation, or nothing: on the way in, so that the packed kernel can do it while it
    quantises x. Quantised weights stay packed in 4 or 8 bits where the CPU kernels are there, because decode is
    limited by memory bandwidth. Where those kernels lose to a dense GEMM before `max_rows`, as they do
    without AMX, a dense copy in `dtype` is kept beside them for prefill.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None, backend: Backend, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_dtype = out_dtype or backend.dtype
        self._outs: dict[int, Tensor] = {}
        # An output of another dtype (the logits) leaves the decoder and is the caller's.
        self._kept_rows = _KEPT_ROWS if out_dtype is None else 0
        kernels, dtype, device = backend.kernels, backend.dtype, backend.device
        self.kernels = kernels
        self.out_features = (weight.codes if isinstance(weight, QuantTensor) else weight).shape[0]
        self.bias = None if bias is None else bias.to(device, dtype)
        self.bias_float = None if bias is None else bias.to(device, torch.float32)
        self.packed: PackedLinear | None = None
        self.dense: Tensor | None = None
        if isinstance(weight, Tensor):
            self.dense = weight.to(device, dtype).contiguous()
        elif kernels is None or dtype == torch.float32:
            self.dense = weight.dequantise().to(device, dtype)
        else:
            self.packed = kernels.pack(weight.codes, weight.scale, weight.minimum, weight.bits)
            self.dense = kernels.dequantise(self.packed) if backend.max_rows > kernels.crossover else None

    def _out(self, rows: int) -> Tensor:
        """Where the result goes. Small ones go to the same place each time, until this layer is called again."""
        out = self._outs.get(rows)
        if out is None:
            out = torch.empty((rows, self.out_features), dtype=self.out_dtype)
            if rows <= self._kept_rows:
                self._outs[rows] = out
        return out

    def prefers_packed(self, rows: int) -> bool:
        """Whether the packed weights are faster than dense ones for that many tokens."""
        if self.packed is None or self.kernels is None:
            return False
        return self.dense is None or rows <= self.kernels.crossover

    def __call__(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """`x` is [tokens, in], or [tokens, 2 * in] with `gate`; returns [tokens, out]. May overwrite `residual`."""
        if norm is not None and norm.kind != "rms":
            x, norm = norm(x), None
        if self.packed is not None and self.kernels is not None and self.prefers_packed(x.shape[0]):
            out = self._out(x.shape[0]) if residual is None else residual
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return self.kernels.linear(
                x, self.packed, out, self.bias_float, residual, norm_weight=weight, eps=eps, activation=gate
            )
        assert self.dense is not None
        if norm is not None:
            x = norm(x)
        if gate is not None:
            x = gated(x, gate, self.kernels)
        y = F.linear(x, self.dense, self.bias).to(self.out_dtype)
        return y if residual is None else residual.add_(y)


def stack(weights: list[Weight]) -> Weight | None:
    """One weight with the rows of all, or None if they are not of one format."""
    if all(isinstance(w, Tensor) for w in weights):
        return torch.cat([w for w in weights if isinstance(w, Tensor)])
    quantised = [w for w in weights if isinstance(w, QuantTensor)]
    if len(quantised) < len(weights) or len({w.bits for w in quantised}) > 1:
        return None
    return QuantTensor(
        codes=torch.cat([w.codes for w in quantised]),
        scale=torch.cat([w.scale for w in quantised]),
        minimum=torch.cat([w.minimum for w in quantised]),
        bits=quantised[0].bits,
    )
