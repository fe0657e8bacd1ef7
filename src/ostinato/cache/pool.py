"""The KV pool: one tensor for all keys and values, and the allocator of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Consecutive slots that hold the KV of consecutive positions; read without copying."""

    slot: int
    length: int
    position: int


class Pool:
    """Keys and values of `blocks * block_size` slots for every layer.

    `kv` has shape [layers, 2, kv_heads, slots, head_dim]; `keys[i]` and `values[i]` are the views of
    layer i, [kv_heads, slots, head_dim]. One tensor, so that copying a slot is one call for all layers.
    """

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.blocks = blocks
        # Untouched pages cost nothing: the operating system gives memory as slots are first written.
        self.kv = torch.empty(
            (layers, 2, kv_heads, blocks * block_size, head_dim), dtype=dtype, device=device
        )
        self.keys: list[Tensor] = [self.kv[i, 0] for i in range(layers)]
        self.values: list[Tensor] = [self.kv[i, 1] for i in range(layers)]
        self._free = bytearray(b"\1" * blocks)
        self.free_blocks = blocks

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    def allocate(self, count: int, *, after: int | None = None) -> list[int]:
        """Take `count` free blocks, as few runs as can be; `after` is the block they should follow.

        The blocks right after `after` come first; then the smallest gap that holds the rest, or else the
        largest gaps. Raises ValueError if fewer than `count` are free (callers ask `free_blocks` first).
        """
        if count > self.free_blocks:
            raise ValueError(f"{count} blocks asked for, {self.free_blocks} free")
        taken: list[int] = []
        if after is not None:
            block = after + 1
            while len(taken) < count and block < self.blocks and self._free[block]:
                taken.append(block)
                block += 1
            self._take(taken)
        rest = count - len(taken)
        while rest:
            start, length = self._gap(rest)
            part = list(range(start, start + min(rest, length)))
            self._take(part)
            taken += part
            rest -= len(part)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back."""
        for block in blocks:
            if self._free[block]:
                raise ValueError(f"block {block} is free already")
            self._free[block] = 1
        self.free_blocks += len(blocks)

    def copy_slots(self, source: int, target: int, count: int) -> None:
        """Copy the KV of `count` slots, all layers, from slot `source` on to slot `target` on."""
        self.kv[:, :, :, target : target + count] = self.kv[:, :, :, source : source + count]

    def erase(self, block: int) -> None:
        """Overwrite the KV of a block."""
        start = block * self.block_size
        self.kv[:, :, :, start : start + self.block_size] = 0

    def _take(self, blocks: list[int]) -> None:
        for block in blocks:
            self._free[block] = 0
        self.free_blocks -= len(blocks)

    def _gap(self, count: int) -> tuple[int, int]:
        """Start and length of the smallest gap of at least `count` blocks, else of the largest."""
        best: tuple[int, int] | None = None
        largest = (0, 0)
        start = self._free.find(1)
        while start >= 0:
            end = self._free.find(0, start)
            end = self.blocks if end < 0 else end
            length = end - start
            if length >= count and (best is None or length < best[1]):
                best = (start, length)
            if length > largest[1]:
                largest = (start, length)
            start = self._free.find(1, end)
        return best or largest
