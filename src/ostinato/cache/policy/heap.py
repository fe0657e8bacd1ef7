"""A heap of blocks, the next victim first, for policies that rank by value."""

from __future__ import annotations

import heapq

from ostinato.cache.block import Block


class Heap:
    """Blocks by rank; of the same rank, the one pushed first goes first. Calls are O(log n), amortised.

    Like in a `Queue`, a block that cannot go steps aside when its turn comes, until it can.
    """

    def __init__(self) -> None:
        self._entries: dict[Block, tuple[float, int, Block]] = {}
        self._heap: list[tuple[float, int, Block]] = []
        self._aside: set[Block] = set()
        self._count = 0

    def push(self, block: Block, rank: float) -> None:
        """Put `block`, new to the heap, in."""
        self._count += 1
        self._entries[block] = (rank, self._count, block)
        if block.children:  # its turn cannot come before theirs
            self._aside.add(block)
        else:
            self._rank(block)

    def remove(self, block: Block) -> float | None:
        """Take `block` out; its rank, None if it was not in."""
        entry = self._entries.pop(block, None)
        self._aside.discard(block)
        return None if entry is None else entry[0]

    def first(self) -> Block | None:
        """The block of the lowest rank that can go."""
        while self._heap:
            entry = self._heap[0]
            block = entry[2]
            current = self._entries.get(block) is entry
            if current and not block.users and not block.children:
                return block
            heapq.heappop(self._heap)
            if current:
                self._aside.add(block)
        return None

    def ready(self, block: Block) -> None:
        """`block` may have become able to go: if it stepped aside, it is ranked again."""
        if block in self._aside:
            self._aside.remove(block)
            self._rank(block)

    def _rank(self, block: Block) -> None:
        heapq.heappush(self._heap, self._entries[block])
        if len(self._heap) > 2 * len(self._entries) + 64:  # most entries are of blocks taken out since
            self._heap = [entry for block, entry in self._entries.items() if block not in self._aside]
            heapq.heapify(self._heap)
