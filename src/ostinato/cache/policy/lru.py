"""LRU: evict the leaf that was used least recently."""

from __future__ import annotations

from collections import OrderedDict

from ostinato.cache.block import Block


class LRU:
    """Least recently used, leaf first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()

    def insert(self, block: Block) -> None:
        pass  # in use: it enters the order when it is released

    def hit(self, block: Block) -> None:
        self._order.pop(block, None)

    def release(self, block: Block) -> None:
        self._order[block] = None
        if block.retired:
            self.retire(block)

    def retire(self, block: Block) -> None:
        self._order.move_to_end(block, last=False)

    def remove(self, block: Block) -> None:
        self._order.pop(block, None)

    def victim(self) -> Block | None:
        # A child is released before its parent, so the oldest block is nearly always a leaf.
        return next((block for block in self._order if block.children == 0), None)
