"""ARC: balance recency against frequency by what was evicted too early (Megiddo and Modha, "ARC: A Self-Tuning, Low
Overhead Replacement Cache", FAST 2003, section 3).

Blocks used once and blocks used more often stand in LRU queues of their own. Whenever a request asks for a block
lately evicted from one of the two, that one's share of the cache grows.
"""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use


class ARC(Policy):
    """Adaptive replacement for a cache of `blocks` (figure 4 of the paper; T1, T2, B1, B2 and p are its names)."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._once, self._often = Queue(), Queue()  # T1, T2
        self._home: dict[Block, Queue] = {}
        self._new = 0  # blocks at home in `once`, those in use too
        self._left_once: Ghosts[bool] = Ghosts(blocks)  # B1
        self._left_often: Ghosts[bool] = Ghosts(blocks)  # B2
        self._returning: Ghosts[bool] = Ghosts(blocks)  # ghosts asked for, until they are cached again
        self._share = 0.0  # p: how many blocks `once` should have
        self._missed_often = False  # the block missed last left `often`

    def miss(self, key: bytes, use: Use) -> None:
        once, often = len(self._left_once), len(self._left_often)
        self._missed_often = False
        if self._left_once.take(key):
            self._share = min(self._share + max(often / once, 1.0), self.blocks)
        elif self._left_often.take(key):
            self._share = max(self._share - max(once / often, 1.0), 0.0)
            self._missed_often = True
        else:
            return
        self._returning.add(key, True)

    def insert(self, block: Block) -> None:
        key = block.key
        assert key is not None
        # A reply's block is cached without having been asked for.
        if self._returning.take(key) or self._left_once.take(key) or self._left_often.take(key):
            self._home[block] = self._often
        else:
            self._home[block] = self._once
            self._new += 1
        while self._left_once and self._new + len(self._left_once) > self.blocks:
            self._left_once.drop()
        while self._left_often and self._known() > 2 * self.blocks:
            self._left_often.drop()

    def hit(self, block: Block, use: Use) -> None:
        home = self._home[block]
        home.remove(block)
        if home is self._once:
            self._home[block] = self._often
            self._new -= 1

    def release(self, block: Block) -> None:
        self._home[block].append(block)

    def leaf(self, block: Block) -> None:
        self._home[block].ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        home = self._home.pop(block)
        home.remove(block)
        self._new -= home is self._once
        if evicted:
            assert block.key is not None
            (self._left_once if home is self._once else self._left_often).add(block.key, True)

    def victim(self) -> Block | None:
        if self._new > self._share or (self._new == self._share and self._missed_often):
            return self._once.first() or self._often.first()
        return self._often.first() or self._once.first()

    def _known(self) -> int:
        return len(self._home) + len(self._left_once) + len(self._left_often)
