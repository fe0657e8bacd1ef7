"""Attention over runs: queries against keys and values that lie anywhere in the pool, without a copy.

A query at position p sees the keys of its sequence's runs at positions up to p (and above p - window).
A run holds consecutive positions, so what a query sees of it is one contiguous range: there are no masks
to build, and runs may come in any order. Each run is attended to by itself, and the parts are merged by
their log-sum-exp (as in flash-decoding and cascade attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ostinato.cache.pool import Pool, Run
from ostinato.native.kernels import AttentionBatch as NativeBatch
from ostinato.native.kernels import Kernels

CASCADE_TOKENS = 128
"""From this many shared tokens on, reading them once for all is worth two calls and a merge."""


@dataclass(frozen=True)
class AttentionLayer:
    """What one layer's attention needs besides q, k and v.

    `cos` and `sin` have shape [positions, rotary_dim / 2], float32; None without RoPE. `q_norm` and
    `k_norm` are RMSNorm weights [head_dim], float32. `slopes` are ALiBi's, [heads], float32.
    """

    index: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    slopes: Tensor | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """Where the tokens of one step stand. Rows `starts[i]:starts[i + 1]` belong to sequence i.

    `positions` and `slots` are int32 [tokens]; `runs[i]` holds all KV that sequence i may look at,
    the step's own tokens included.
    """

    starts: tuple[int, ...]
    positions: Tensor
    slots: Tensor
    runs: tuple[tuple[Run, ...], ...]
    _buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list[tuple[Tensor, Tensor]], compare=False)

    @cached_property
    def native(self) -> NativeBatch:
        return self._native(self.starts, self.runs)

    @cached_property
    def cascade(self) -> tuple[NativeBatch, NativeBatch] | None:
        """The batch in two: runs that several sequences share, read once for all of them, and the rest.

        None where nothing long enough is shared. Sequences that share stand side by side, in order of
        position: the scheduler sees to it.
        """
        starts, shared = [0], list[Sequence[Run]]()
        rest = list(self.runs)
        at = 0
        while at < len(self.runs):
            end, common = at + 1, self.runs[at]
            while end < len(self.runs) and self._decodes(at) and self._decodes(end):
                longer = _common_runs(common, self.runs[end])
                if sum(run.length for run in longer) < CASCADE_TOKENS:
                    break
                end, common = end + 1, longer
            alone = end == at + 1
            starts.append(self.starts[end])
            shared.append(() if alone else common)
            for i in () if alone else range(at, end):
                rest[i] = tuple(_without(self.runs[i], common))
            at = end
        if not any(shared):
            return None
        return self._native(starts, shared), self._native(self.starts, rest)

    def _decodes(self, sequence: int) -> bool:
        return self.starts[sequence + 1] - self.starts[sequence] == 1

    def _native(self, starts: Sequence[int], runs: Sequence[Sequence[Run]]) -> NativeBatch:
        run_starts = [0, *accumulate(len(each) for each in runs)]
        flat = np.array([(r.slot, r.length, r.position) for each in runs for r in each], dtype=np.int32)
        slot, length, position = flat.reshape(-1, 3).T
        return NativeBatch(starts, self.positions, run_starts, slot, length, position)

    def buffers(self, like: Tensor, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Queries and output of one layer, [tokens, heads, head_dim]; every layer of a step uses the same two."""
        if not self._buffers:
            shape = (len(self.positions), heads, head_dim)
            self._buffers.append((like.new_empty(shape), like.new_empty(shape)))
        return self._buffers[0]

    @cached_property
    def slots_long(self) -> Tensor:
        return self.slots.long()


def _common_runs(a: Sequence[Run], b: Sequence[Run]) -> tuple[Run, ...]:
    """The KV that two lists of runs begin with."""
    common: list[Run] = []
    for x, y in zip(a, b, strict=False):
        if (x.slot, x.position) != (y.slot, y.position):
            break
        common.append(x if x.length < y.length else y)
        if x.length != y.length:
            break
    return tuple(common)


def _without(runs: Sequence[Run], common: Sequence[Run]) -> Iterator[Run]:
    """What `runs` have beyond the KV they begin with."""
    for i, run in enumerate(runs):
        read = common[i].length if i < len(common) else 0
        if run.length > read:
            yield Run(run.slot + read, run.length - read, run.position + read)


def attend(
    pool: Pool, batch: AttentionBatch, kernels: Kernels | None, layer: AttentionLayer, qkv: Tensor
) -> Tensor:
    """Rotate q and k, write k and v to the pool, and attend.

    Args:
        kernels: the compiled ones, or None for plain PyTorch.
        qkv: [tokens, (heads + 2 * kv_heads) * head_dim].

    Returns:
        [tokens, heads * head_dim].
    """
    keys, values = pool.keys[layer.index], pool.values[layer.index]
    if kernels is not None:
        q, out = batch.buffers(qkv, layer.heads, layer.head_dim)
        kernels.rope_store(
            qkv, batch.positions, batch.slots, layer.cos, layer.sin, q, keys, values,
            layer.q_norm, layer.k_norm, layer.norm_eps,
        )  # fmt: skip
        window = layer.window or 0
        if batch.cascade is None:
            kernels.attend(q, keys, values, out, batch.native, layer.scale, window, layer.slopes)
        else:
            shared, rest = batch.cascade
            other = torch.empty_like(out)
            lse, other_lse = out.new_empty((2, *out.shape[:2]), dtype=torch.float32)
            kernels.attend(q, keys, values, out, rest, layer.scale, window, layer.slopes, lse)
            kernels.attend(q, keys, values, other, shared, layer.scale, window, layer.slopes, other_lse)
            kernels.merge(out, other, lse, other_lse)
    else:
        q, k, v = _split_and_rotate(qkv, batch.positions, layer)
        keys[:, batch.slots_long] = k.transpose(0, 1)
        values[:, batch.slots_long] = v.transpose(0, 1)
        out = _attend_torch(q, keys, values, batch, layer)
    return out.flatten(1)


def move(
    pool: Pool,
    layers: Sequence[AttentionLayer],
    kernels: Kernels | None,
    sources: list[int],
    targets: list[int],
    by: int,
) -> None:
    """Copy KV to other slots, as if its tokens stood `by` positions further on.

    Exact for RoPE, which is a rotation by an angle proportional to the position; ALiBi looks at positions only
    when it attends, so there a copy is enough.
    """
    turns = [_turn(layers, cos, by) for cos in {id(c.cos): c.cos for c in layers}.values() if cos is not None]
    for source, target, count in _stretches(sources, targets):
        pool.copy_slots(source, target, count)
        for numbers, cos, sin in turns:
            if kernels is not None:
                kernels.turn_keys(pool.kv[:, 0], numbers, target, count, cos, sin)
            else:
                for number in numbers:
                    keys = pool.keys[number][:, target : target + count]
                    keys.copy_(_rotate(keys, cos, sin))


def _turn(layers: Sequence[AttentionLayer], cos: Tensor, by: int) -> tuple[list[int], Tensor, Tensor]:
    """The layers with the rotary table `cos`, and cos and sin of the angles of `by` positions."""
    same = [layer for layer in layers if layer.cos is cos]
    sin = same[0].sin
    assert sin is not None
    c, s = cos[abs(by)], sin[abs(by)] if by >= 0 else -sin[-by]
    # Tables scaled by the checkpoint (YaRN) have scaled the keys once already.
    length = torch.sqrt(c.square() + s.square())
    return [layer.index for layer in same], c / length, s / length


def _stretches(sources: list[int], targets: list[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, count) of consecutive slots that go to consecutive slots."""
    start = 0
    for i in range(1, len(sources) + 1):
        whole = i == len(sources)
        if whole or sources[i] != sources[i - 1] + 1 or targets[i] != targets[i - 1] + 1:
            yield sources[start], targets[start], i - start
            start = i


def _split_and_rotate(qkv: Tensor, positions: Tensor, layer: AttentionLayer) -> tuple[Tensor, Tensor, Tensor]:
    """q [tokens, heads, head_dim], and k and v [tokens, kv_heads, head_dim], ready for attention."""
    heads = qkv.view(qkv.shape[0], layer.heads + 2 * layer.kv_heads, layer.head_dim)
    q, k, v = heads.split((layer.heads, layer.kv_heads, layer.kv_heads), dim=1)
    if layer.q_norm is not None:
        q = _rms_norm(q, layer.q_norm, layer.norm_eps)
    if layer.k_norm is not None:
        k = _rms_norm(k, layer.k_norm, layer.norm_eps)
    if layer.cos is not None and layer.sin is not None:
        at = positions.long()
        cos, sin = layer.cos[at].unsqueeze(1), layer.sin[at].unsqueeze(1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    return q, k, v


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


def _attend_torch(
    q: Tensor, keys: Tensor, values: Tensor, batch: AttentionBatch, layer: AttentionLayer
) -> Tensor:
    """The plain PyTorch path: any device, any dtype."""
    out = torch.zeros_like(q)
    positions: list[int] = batch.positions.tolist()
    for i, runs in enumerate(batch.runs):
        rows = slice(batch.starts[i], batch.starts[i + 1])
        # A group's queries stack on the sequence axis: grouped-query attention needs no repeated keys.
        group = layer.heads // layer.kv_heads
        stacked = q[rows].unflatten(1, (layer.kv_heads, group)).permute(1, 2, 0, 3).flatten(1, 2)
        parts = [
            part
            for run in runs
            for part in _attend_run(
                stacked,
                keys,
                values,
                run,
                batch.positions[rows],
                positions[rows.start],
                positions[rows.stop - 1],
                layer,
            )
        ]
        if parts:
            merged = _merge(parts).to(q.dtype)
            out[rows] = merged.unflatten(1, (group, -1)).permute(2, 0, 1, 3).flatten(1, 2)
    return out


def _attend_run(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    run: Run,
    positions: Tensor,
    first: int,
    last: int,
    layer: AttentionLayer,
) -> list[tuple[Tensor, Tensor]]:
    """Parts (out, log-sum-exp) of stacked queries [kv_heads, group * n, head_dim] over one run.

    `first` and `last` are the lowest and highest query position.
    """
    low = 0 if layer.window is None else max(0, first - layer.window + 1 - run.position)
    high = min(run.length, last + 1 - run.position)
    if high <= low:
        return []
    # Up to here every query sees every key: no mask. A window's lower edge needs one throughout.
    plain = min(high, first + 1 - run.position)
    if layer.slopes is not None or (
        layer.window is not None and last - layer.window + 1 > run.position + low
    ):
        plain = low
    parts: list[tuple[Tensor, Tensor]] = []
    if plain > low:
        at = slice(run.slot + low, run.slot + plain)
        parts.append(_attend_all(q, keys[:, at], values[:, at], layer.scale))
    if high > max(plain, low):
        start = max(plain, low)
        at = slice(run.slot + start, run.slot + high)
        key_positions = torch.arange(run.position + start, run.position + high, device=q.device)
        parts.append(_attend_masked(q, keys[:, at], values[:, at], positions, key_positions, layer))
    return parts


def _attend_all(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Every query sees every key: flash attention. Shapes [kv_heads, rows, head_dim]."""
    ops = torch.ops.aten
    if q.device.type == "cuda" and q.dtype != torch.float32:
        out, lse, *_ = ops._scaled_dot_product_flash_attention(q[None], k[None], v[None], scale=scale)
        return out[0], lse[0, :, : q.shape[1]]
    if q.device.type == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(q[None], k[None], v[None], scale=scale)
        return out[0], lse[0]
    return _softmax_parts((q.float() @ k.float().transpose(1, 2)) * scale, v)


def _attend_masked(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, key_positions: Tensor, layer: AttentionLayer
) -> tuple[Tensor, Tensor]:
    scores = (q.float() @ k.float().transpose(1, 2)) * layer.scale
    group = layer.heads // layer.kv_heads
    distance = key_positions[None, :] - positions[:, None]
    by_group = scores.unflatten(1, (group, -1))
    if layer.slopes is not None:
        by_group += layer.slopes.view(layer.kv_heads, group, 1, 1) * distance
    hidden = distance > 0
    if layer.window is not None:
        hidden |= distance <= -layer.window
    by_group.masked_fill_(hidden, float("-inf"))
    return _softmax_parts(scores, v)


def _softmax_parts(scores: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = scores.logsumexp(-1)
    # A query that sees none of these keys has -inf everywhere: its part weighs nothing.
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
    return weights @ v.float(), lse


def _merge(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    if len(parts) == 1:
        return parts[0][0].nan_to_num()
    lse = torch.stack([part[1].float() for part in parts])
    total = lse.logsumexp(0)
    weights = torch.exp(lse - torch.where(total.isinf(), 0.0, total))
    return sum(
        (w.unsqueeze(-1) * out.float() for w, (out, _) in zip(weights, parts, strict=True)),
        start=torch.zeros(()),
    )
