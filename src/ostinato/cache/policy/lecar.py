"""LeCaR: draw between LRU and LFU, and trust less whichever evicted what is asked for again (Vietri et al., "Driving
Cache Replacement with ML-based LeCaR", HotStorage 2018, section 3)."""

from __future__ import annotations

from math import exp
from random import Random

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.heap import Heap
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use

LEARNING_RATE = 0.45
DISCOUNT = 0.005
"""How much of a regret remains after as many lookups as the cache has blocks."""
LEAST = 1e-10
"""A weight never vanishes."""


class LeCaR(Policy):
    """Learning cache replacement for a cache of `blocks` (algorithms 1 and 2 of the paper)."""

    def __init__(self, blocks: int, seed: int = 0) -> None:
        self.lru_weight = 0.5
        """How likely LRU chooses the next victim; LFU does otherwise."""
        self._discount = DISCOUNT ** (1 / max(blocks, 1))
        self._random = Random(seed)
        self._recent, self._frequent = Queue(), Heap()
        self._left_recent: Ghosts[int] = Ghosts(blocks // 2)  # evicted by LRU, and at which lookup
        self._left_frequent: Ghosts[int] = Ghosts(blocks // 2)  # by LFU
        self._lookups = 0
        self._choice: tuple[Block, Ghosts[int] | None] | None = None

    def miss(self, key: bytes, use: Use) -> None:
        self._lookups += 1
        lru, lfu = self.lru_weight, 1 - self.lru_weight
        if (then := self._left_recent.take(key)) is not None:
            lru *= self._regret(then)
        elif (then := self._left_frequent.take(key)) is not None:
            lfu *= self._regret(then)
        else:
            return
        self.lru_weight = (lru + LEAST) / (lru + lfu + 2 * LEAST)

    def hit(self, block: Block, use: Use) -> None:
        self._lookups += 1
        self._recent.remove(block)
        self._frequent.remove(block)

    def release(self, block: Block) -> None:
        self._recent.append(block)
        self._frequent.push(block, block.uses)

    def leaf(self, block: Block) -> None:
        self._recent.ready(block)
        self._frequent.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._recent.remove(block)
        self._frequent.remove(block)
        if self._choice is not None and self._choice[0] is block:
            ghosts, self._choice = self._choice[1], None
            if evicted and ghosts is not None:
                assert block.key is not None
                ghosts.add(block.key, self._lookups)

    def victim(self) -> Block | None:
        lru, lfu = self._recent.first(), self._frequent.first()
        if lru is None or lfu is None:
            return None
        if lru is lfu:  # nobody's fault
            self._choice = lru, None
        elif self._random.random() < self.lru_weight:
            self._choice = lru, self._left_recent
        else:
            self._choice = lfu, self._left_frequent
        return self._choice[0]

    def _regret(self, then: int) -> float:
        """By what a weight is multiplied for a block evicted at lookup `then`."""
        return exp(-LEARNING_RATE * self._discount ** (self._lookups - then))
