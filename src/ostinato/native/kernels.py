"""Typed access to the compiled kernels.

`load()` gives the `Kernels` of this machine, or None where there is no compiler: then the same steps
run in plain PyTorch. Activations are bfloat16 or float32. The last dimension of every tensor has to be
contiguous; rows may have any stride. Arguments are not checked beyond their types: these calls are made
hundreds of times a token.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.native import build

GROUP = 32
"""Columns that share a scale and a minimum."""

_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_BF16_OUT = {torch.float32: 0, torch.bfloat16: 2}
_ACTIVATION = {None: 0, "silu": 1 << 4, "gelu_tanh": 2 << 4, "gelu": 3 << 4}
_ARENA = 32 << 20
_LONG_ROWS = 16  # calls over more rows than this release the GIL

_pointer, _i32, _i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

# The arguments of a frequent call travel as one block of bytes, laid out as the C struct of the same
# name: ctypes needs longer to convert twelve arguments than some of the kernels run.
_LINEAR = struct.Struct("PPPPPPqqqiif")
_NORM = struct.Struct("PPPPqqqiiif")
_GATED = struct.Struct("PPqqiii")
_ROPE_STORE = struct.Struct("PPPPPPPPPPqqqiiiiiif")
_ATTEND = struct.Struct("PPPPPPPqqiiiiifii")
_MERGE = struct.Struct("PPPPiii")

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "use_openmp": (None, [_i32] * 2),
    "packed_bytes": (_i64, [_i32] * 3),
    "pack": (None, [_pointer] * 3 + [_i32] * 3 + [_pointer, _i32]),
    "populate": (None, [_pointer, _i64]),
    "huge_pages": (None, [_pointer, _i64]),
    "dequantise": (None, [_pointer, _pointer, _i64, _i32]),
    "linear": (None, [ctypes.c_char_p]),
    "rms_norm": (None, [ctypes.c_char_p]),
    "gated": (None, [ctypes.c_char_p]),
    "rope_store": (None, [ctypes.c_char_p]),
    "attend": (None, [ctypes.c_char_p]),
    "merge": (None, [ctypes.c_char_p]),
    "turn_keys": (None, [_pointer]),
}


class _PackedStruct(ctypes.Structure):
    _fields_ = [
        ("rows", _i32),
        ("columns", _i32),
        ("bits", _i32),
        ("tiles", _i32),
        ("data", _pointer),
    ]


class PackedLinear:
    """A weight matrix [rows, columns] of 4 or 8 bits per element, in the layout of the kernels."""

    __slots__ = ("_struct", "address", "bits", "columns", "data", "rows")

    def __init__(self, rows: int, columns: int, bits: int, data: Tensor) -> None:
        self.rows, self.columns, self.bits, self.data = rows, columns, bits, data
        self._struct = _PackedStruct(rows, columns, bits, (rows + 15) // 16, data.data_ptr())
        self.address = ctypes.addressof(self._struct)

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class _BatchStruct(ctypes.Structure):
    _fields_ = [
        ("sequences", _i32),
        ("most_queries", _i32),
        *(
            (name, _pointer)
            for name in ("query_start", "positions", "run_start", "slot", "length", "position")
        ),
    ]


class _TurnKeysStruct(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("keys", "layers", "cos", "sin")),
        *((name, _i64) for name in ("layer_stride", "head_stride", "slot")),
        *((name, _i32) for name in ("layer_count", "heads", "count", "dim", "half", "flags")),
    ]


Ints = Sequence[int] | np.ndarray[Any, Any] | Tensor


class AttentionBatch:
    """Which queries see which keys, in one step; built once and used by every layer.

    Sequence s has the query rows query_start[s] .. query_start[s + 1], at increasing `positions`, and the
    runs run_start[s] .. run_start[s + 1]. Run r is `length[r]` consecutive slots from `slot[r]` with keys
    at consecutive positions from `position[r]`. A query sees the keys at its own position and before.
    """

    __slots__ = ("_arrays", "_struct", "address", "sequences", "tokens")

    def __init__(
        self, query_start: Ints, positions: Ints, run_start: Ints, slot: Ints, length: Ints, position: Ints
    ) -> None:
        self._arrays = [
            np.ascontiguousarray(values, dtype=np.int32)
            for values in (query_start, positions, run_start, slot, length, position)
        ]
        self.sequences = len(self._arrays[0]) - 1
        self.tokens = len(self._arrays[1])
        most = int(np.diff(self._arrays[0]).max()) if self.sequences else 0
        self._struct = _BatchStruct(self.sequences, most, *(array.ctypes.data for array in self._arrays))
        self.address = ctypes.addressof(self._struct)


class Kernels:
    """The kernels of one compiled library. See `load`."""

    def __init__(self, library: build.Library) -> None:
        self.features = library.features
        self.threads = torch.get_num_threads()
        short: dict[str, Callable[..., Any]] = {}
        long: dict[str, Callable[..., Any]] = {}
        for name, (result, arguments) in _SIGNATURES.items():
            for functions, handle in ((short, library.short), (long, library.long)):
                function = getattr(handle, f"ostinato_{name}")
                function.restype, function.argtypes = result, arguments
                functions[name] = function
        self.crossover = 512 if "amx" in self.features else 64 if "vnni" in self.features else 16
        """From about this many rows on, a GEMM over `dequantise`d weights is faster than `linear`."""
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._use_openmp = short["use_openmp"]
        self._packed_bytes = short["packed_bytes"]
        self._populate = long["populate"]
        self._huge_pages = short["huge_pages"]
        self._pack, self._dequantise = long["pack"], long["dequantise"]
        self._linear, self._linear_long = short["linear"], long["linear"]
        self._rms_norm, self._rms_norm_long = short["rms_norm"], long["rms_norm"]
        self._gated, self._gated_long = short["gated"], long["gated"]
        self._rope_store, self._rope_store_long = short["rope_store"], long["rope_store"]
        self._merge = short["merge"]
        self._turn_keys = long["turn_keys"]
        self._attend, self._attend_long = short["attend"], long["attend"]

    def use_openmp(self, on: bool) -> None:
        """Whether calls from this thread run in PyTorch's OpenMP threads, or in a pool of their own.

        With a pool of their own, PyTorch's operators in between get one thread: its workers would spin for
        milliseconds after each and take the cores from the pool's.
        """
        torch.get_num_threads()  # in a new thread this sets the number first
        self._use_openmp(on, self.threads if on else 1)

    def pack(self, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> PackedLinear:
        """Packs weights given as code * scale + minimum.

        codes: uint8 [N, K], below 2**bits; scale, minimum: [N, K / 32], kept in half precision.
        """
        rows, columns = codes.shape
        if bits not in (4, 8) or columns % GROUP or codes.dtype != torch.uint8:
            raise ValueError(f"cannot pack {codes.dtype} {tuple(codes.shape)} in {bits} bits")
        if scale.shape != (rows, columns // GROUP) or minimum.shape != scale.shape:
            raise ValueError(f"scale and minimum have to be {(rows, columns // GROUP)}")
        codes, scale, minimum = codes.contiguous(), scale.float().contiguous(), minimum.float().contiguous()
        data = self._reserve(self._packed_bytes(rows, columns, bits))
        self._pack(
            codes.data_ptr(), scale.data_ptr(), minimum.data_ptr(), rows, columns, bits, data.data_ptr(),
            self.threads,
        )  # fmt: skip
        return PackedLinear(rows, columns, bits, data)

    def _reserve(self, size: int) -> Tensor:
        """Memory for packed weights, out of large pieces on huge pages.

        A layer's matrices are smaller than a huge page. By themselves they lie on small ones, and half the time
        of a decode step goes into address translation.
        """
        aligned = -(-size // 64) * 64
        if self._arena.numel() < aligned:
            self._arena = torch.empty(max(_ARENA, aligned), dtype=torch.uint8)
            self.huge_pages(self._arena)
        data, self._arena = self._arena[:size], self._arena[aligned:]
        return data

    def huge_pages(self, fresh: Tensor) -> None:
        """Asks for huge pages under a contiguous tensor that was just allocated and not written yet."""
        self._huge_pages(fresh.data_ptr(), fresh.nbytes)

    def populate(self, tensor: Tensor) -> None:
        """Gives a contiguous tensor its memory now, unchanged, rather than page by page as it is first written."""
        self._populate(tensor.data_ptr(), tensor.nbytes)

    def dequantise(self, packed: PackedLinear) -> Tensor:
        """The weights as bfloat16 [N, K], for GEMMs over many rows."""
        out = torch.empty(packed.rows, packed.columns, dtype=torch.bfloat16)
        self._dequantise(packed.address, out.data_ptr(), packed.columns, self.threads)
        return out

    def linear(
        self,
        x: Tensor,
        packed: PackedLinear,
        out: Tensor,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        norm_weight: Tensor | None = None,
        eps: float = 1e-6,
        activation: str | None = None,
    ) -> Tensor:
        """out = f(x) W' + bias + residual, f(x) quantised to 8 bits per group of 32 columns.

        x: [M, K]. f is the identity, or the RMS norm with `norm_weight` (float32 [K]); with `activation`
        ("silu", "gelu_tanh", "gelu") x is [M, 2K] and f(x) = activation(x[:, :K]) * x[:, K:]. bias:
        float32 [N]; residual: [M, N] of out's type, may be out itself. x and out may differ in type.
        """
        rows = x.shape[0]
        call = _LINEAR.pack(
            packed.address,
            x.data_ptr(),
            out.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if norm_weight is None else norm_weight.data_ptr(),
            x.stride()[0],
            out.stride()[0],
            0 if residual is None else residual.stride()[0],
            rows,
            _BF16[x.dtype] | _BF16_OUT[out.dtype] | _ACTIVATION[activation] | self.threads << 8,
            eps,
        )
        (self._linear if rows <= _LONG_ROWS else self._linear_long)(call)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        """out = x / rms(x) * weight (+ residual). x: [M, H]; weight: float32 [H]; out may be x or residual."""
        rows, columns = x.shape
        call = _NORM.pack(
            x.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            x.stride()[0],
            out.stride()[0],
            0 if residual is None else residual.stride()[0],
            rows,
            columns,
            _BF16[x.dtype] | self.threads << 8,
            eps,
        )
        (self._rms_norm if rows <= _LONG_ROWS else self._rms_norm_long)(call)
        return out

    def gated(self, gate_up: Tensor, out: Tensor, activation: str = "silu") -> Tensor:
        """out = activation(gate) * up. gate_up: [M, 2I], gate first; out: [M, I]."""
        rows, columns = out.shape
        call = _GATED.pack(
            gate_up.data_ptr(),
            out.data_ptr(),
            gate_up.stride()[0],
            out.stride()[0],
            rows,
            columns,
            _BF16[out.dtype] | _ACTIVATION[activation] | self.threads << 8,
        )
        (self._gated if rows <= _LONG_ROWS else self._gated_long)(call)
        return out

    def rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_out: Tensor,
        k_layer: Tensor,
        v_layer: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        """Splits qkv [T, (H + 2 KV) D]; rotated queries go to q_out, rotated keys and values into the pool.

        positions, slots: int32 [T], contiguous; cos, sin: float32 [P, R / 2], contiguous, or None for no
        rotation; q_out: [T, H, D], contiguous; k_layer, v_layer: [KV, slots, D] with contiguous slots;
        q_norm, k_norm: float32 [D], weights of an RMS norm over each head before the rotation.
        """
        tokens, heads, dim = q_out.shape
        call = _ROPE_STORE.pack(
            qkv.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            0 if cos is None else cos.data_ptr(),
            0 if sin is None else sin.data_ptr(),
            q_out.data_ptr(),
            k_layer.data_ptr(),
            v_layer.data_ptr(),
            0 if q_norm is None else q_norm.data_ptr(),
            0 if k_norm is None else k_norm.data_ptr(),
            qkv.stride()[0],
            k_layer.stride()[0],
            v_layer.stride()[0],
            tokens,
            heads,
            k_layer.shape[0],
            dim,
            0 if cos is None else cos.shape[1],
            _BF16[q_out.dtype] | self.threads << 8,
            eps,
        )
        (self._rope_store if tokens <= _LONG_ROWS else self._rope_store_long)(call)

    def turn_keys(
        self, keys: Tensor, layers: Sequence[int], slot: int, count: int, cos: Tensor, sin: Tensor
    ) -> None:
        """Rotates the keys of slots `slot` to `slot + count` in place, all by one angle per dimension.

        keys: [layers, KV, slots, D] with contiguous slots; layers: which; cos, sin: float32 [R / 2].
        """
        numbers = np.asarray(layers, dtype=np.int32)
        cos, sin = cos.contiguous(), sin.contiguous()
        call = _TurnKeysStruct(
            keys.data_ptr(), numbers.ctypes.data, cos.data_ptr(), sin.data_ptr(), keys.stride(0), keys.stride(1),
            slot, len(layers), keys.size(1), count, keys.size(3), cos.size(0),
            _BF16[keys.dtype] | self.threads << 8,
        )  # fmt: skip
        self._turn_keys(ctypes.addressof(call))

    def attend(
        self,
        q: Tensor,
        k_layer: Tensor,
        v_layer: Tensor,
        out: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int = 0,
        slopes: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> Tensor:
        """Attention of every query over the keys of its sequence's runs at its position and before.

        q, out: [T, H, D], contiguous; k_layer, v_layer: [KV, slots, D] with contiguous slots; window: a
        query at position p sees only keys after p - window (0: all); slopes: float32 [H] (ALiBi). A query
        that sees no key gets zeros. lse: float32 [T, H], filled with the log2 of each query's sum of exponentials.
        """
        _, heads, dim = q.shape
        call = _ATTEND.pack(
            batch.address,
            q.data_ptr(),
            k_layer.data_ptr(),
            v_layer.data_ptr(),
            out.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            k_layer.stride()[0],
            v_layer.stride()[0],
            heads,
            k_layer.shape[0],
            dim,
            window,
            _BF16[q.dtype] | self.threads << 8,
            scale,
            0,
            0,
        )
        (self._attend if batch.tokens <= _LONG_ROWS else self._attend_long)(call)
        return out

    def merge(self, out: Tensor, other: Tensor, lse: Tensor, other_lse: Tensor) -> None:
        """Joins to `out`, attention over some keys, `other`, attention over other keys.

        out, other: [T, H, D], contiguous; lse, other_lse: float32 [T, H], as `attend` gives them.
        """
        self._merge(
            _MERGE.pack(
                out.data_ptr(), other.data_ptr(), lse.data_ptr(), other_lse.data_ptr(), lse.numel(), out.size(2),
                _BF16[out.dtype] | self.threads << 8,
            )
        )  # fmt: skip


def load(arch: str = "native") -> Kernels | None:
    """The kernels for this machine, compiled on first use; None where they cannot be had."""
    library = build.load(arch)
    return None if library is None else Kernels(library)
