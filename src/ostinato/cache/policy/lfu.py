"""LFU: evict the leaf that was used least often since it was cached; of equals, the one used least recently."""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.heap import Heap
from ostinato.cache.use import Use


class LFU(Policy):
    """Least frequently used, without memory of evicted blocks (in-cache LFU)."""

    def __init__(self) -> None:
        self._heap = Heap()

    def hit(self, block: Block, use: Use) -> None:
        self._heap.remove(block)

    def release(self, block: Block) -> None:
        self._heap.push(block, block.uses)

    def leaf(self, block: Block) -> None:
        self._heap.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._heap.remove(block)

    def victim(self) -> Block | None:
        return self._heap.first()
