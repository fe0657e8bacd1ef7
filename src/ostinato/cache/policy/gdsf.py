"""GDSF: evict the leaf whose tokens are worth least: uses times cost per token, on top of what the cache's age is
worth (Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", 1998)."""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.heap import Heap
from ostinato.cache.use import Use


class GDSF(Policy):
    """Greedy dual with size and frequency: priority = age + uses * cost / size."""

    def __init__(self) -> None:
        self._heap = Heap()
        self._age = 0.0  # L: the priority of what was evicted last

    def hit(self, block: Block, use: Use) -> None:
        self._heap.remove(block)

    def release(self, block: Block) -> None:
        self._heap.push(block, self._age + block.uses * block.cost / max(block.size, 1))

    def leaf(self, block: Block) -> None:
        self._heap.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        priority = self._heap.remove(block)
        if evicted and priority is not None:
            self._age = max(self._age, priority)  # a parent may be worth less than the children it waited for

    def victim(self) -> Block | None:
        return self._heap.first()
