"""OPT: evict the leaf that is asked for furthest in the future (Belady 1966). For replay only.

With blocks that must go leaf first, the next use of a block is never later than that of its children, so that the
furthest leaf is the furthest block.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.use import Use

NEVER = 1 << 60


class OPT(Policy):
    """The optimum, from the keys that each request of the trace will look up."""

    def __init__(self, requests: Iterable[Sequence[bytes]]) -> None:
        self._asked: dict[bytes, list[int]] = {}
        for number, keys in enumerate(requests):
            for key in keys:
                self._asked.setdefault(key, []).append(number)
        self._now = -1
        self._next: dict[Block, int] = {}
        self._heap: list[tuple[int, int, int, Block]] = []
        self._count = 0

    def arrive(self, use: Use) -> None:
        self._now += 1

    def release(self, block: Block) -> None:
        assert block.key is not None
        asked = self._asked.get(block.key, [])
        at = bisect_right(asked, self._now)
        self._next[block] = asked[at] if at < len(asked) else NEVER
        self._push(block)

    def leaf(self, block: Block) -> None:
        if block in self._next:
            self._push(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._next.pop(block, None)

    def victim(self) -> Block | None:
        while self._heap:
            following, _, _, block = self._heap[0]
            if -following == self._next.get(block) and not block.users and not block.children:
                return block
            heapq.heappop(self._heap)  # used again, gone, or pushed anew once it is a leaf
        return None

    def _push(self, block: Block) -> None:
        self._count += 1
        heapq.heappush(self._heap, (-self._next[block], -block.depth, self._count, block))
