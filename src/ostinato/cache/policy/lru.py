"""LRU: evict the leaf that was used least recently."""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use


class LRU(Policy):
    """Least recently used."""

    def __init__(self) -> None:
        self._queue = Queue()

    def hit(self, block: Block, use: Use) -> None:
        self._queue.remove(block)

    def release(self, block: Block) -> None:
        self._queue.append(block)

    def leaf(self, block: Block) -> None:
        self._queue.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._queue.remove(block)

    def victim(self) -> Block | None:
        return self._queue.first()
