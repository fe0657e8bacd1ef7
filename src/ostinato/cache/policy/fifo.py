"""FIFO: evict the leaf that was cached first, however often it was used since."""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue


class FIFO(Policy):
    """First in, first out. A block is in once it is released for the first time, so that leaves come before roots."""

    def __init__(self) -> None:
        self._queue = Queue()

    def release(self, block: Block) -> None:
        if block in self._queue:
            self._queue.ready(block)
        else:
            self._queue.append(block)

    def leaf(self, block: Block) -> None:
        self._queue.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._queue.remove(block)

    def victim(self) -> Block | None:
        return self._queue.first()
