"""Linear layers: dense weights, or quantised ones kept as they are for decode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ostinato.models.weights import QuantTensor
from ostinato.native import kernels

Weight = Tensor | QuantTensor


class Linear:
    """y = x · Wᵀ (+ bias) (+ residual), for W of shape [out, in].

    A quantised weight is kept twice when the CPU kernels are there: packed in 4 or 8 bits, because decode is
    limited by memory bandwidth, and dense in `dtype`, because prefill is limited by GEMM throughput.
    """

    def __init__(
        self, weight: Weight, bias: Tensor | None, dtype: torch.dtype, device: torch.device, *, dense: bool = True
    ) -> None:
        self.bias = None if bias is None else bias.to(device, dtype)
        self.packed: kernels.PackedLinear | None = None
        self.dense: Tensor | None = None
        if isinstance(weight, QuantTensor):
            self.out_features = weight.codes.shape[0]
            if dtype == torch.bfloat16 and device.type == "cpu" and kernels.loaded():
                self.packed = kernels.pack(weight.codes, weight.scale, weight.minimum, weight.bits)
            if self.packed is None or dense:
                self.dense = weight.dequantise().to(device, dtype)
        else:
            self.out_features = weight.shape[0]
            self.dense = weight.to(device, dtype).contiguous()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """`x` is [tokens, in]; returns [tokens, out] in the dtype of `x`."""
        if self.packed is not None and (self.dense is None or x.shape[0] <= kernels.MAX_PACKED_ROWS):
            out = x.new_empty((x.shape[0], self.out_features))
            kernels.linear(x, self.packed, out, bias=self.bias, residual=residual)
            return out
        assert self.dense is not None
        y = F.linear(x, self.dense, self.bias)
        return y if residual is None else y.add_(residual)


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
