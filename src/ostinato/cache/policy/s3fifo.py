"""S3-FIFO: a small queue filters out what is used only once (Yang et al., "FIFO Queues are All You Need for Cache
Eviction", SOSP 2023, section 4).

New blocks enter the small queue. Those hit twice there move on to the main queue, the others go, and leave their key
as a ghost; a block asked for again while it is one enters the main queue at once. The main queue gives a block that
was hit another round for each hit, up to three. As in the authors' libCacheSim, what does not fit the small queue
goes to the main queue as long as nothing had to be evicted.
"""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use

SMALL = 0.1
"""Share of the cache that the small queue has as long as the main queue fills the rest."""
GHOSTS = 0.9
"""Ghosts for each block of the cache."""
PROMOTE = 2
"""Hits in the small queue that move a block to the main queue."""
MOST = 3
"""Hits are counted up to here."""


class S3FIFO(Policy):
    """Simple, scalable FIFO with three static queues, for a cache of `blocks` (algorithm 1 of the paper)."""

    def __init__(self, blocks: int) -> None:
        self._small_size = int(blocks * SMALL)
        self._main_size = blocks - self._small_size
        self._filling = True
        self._small, self._main = Queue(), Queue()
        self._home: dict[Block, Queue] = {}
        self._hits: dict[Block, int] = {}
        self._ghosts: Ghosts[bool] = Ghosts(int(blocks * GHOSTS))
        self._returning: Ghosts[bool] = Ghosts(blocks)  # ghosts asked for, until they are cached again

    def miss(self, key: bytes, use: Use) -> None:
        if self._ghosts.take(key):
            self._returning.add(key, True)

    def insert(self, block: Block) -> None:
        assert block.key is not None
        self._hits[block] = 0
        # A reply's block is cached without having been asked for.
        returns = self._returning.take(block.key) or self._ghosts.take(block.key)
        full = self._filling and len(self._home) >= self._small_size
        self._home[block] = self._main if returns or full else self._small

    def hit(self, block: Block, use: Use) -> None:
        self._hits[block] = min(self._hits[block] + 1, MOST)

    def release(self, block: Block) -> None:
        queue = self._home[block]
        if block in queue:
            queue.ready(block)
        else:
            queue.append(block)

    def leaf(self, block: Block) -> None:
        self._home[block].ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        del self._hits[block]
        queue = self._home.pop(block)
        queue.remove(block)
        if evicted:
            self._filling = False
            if queue is self._small:
                assert block.key is not None
                self._ghosts.add(block.key, True)

    def victim(self) -> Block | None:
        if len(self._main) > self._main_size:
            return self._from_main() or self._from_small()
        return self._from_small() or self._from_main()

    def _from_small(self) -> Block | None:
        while (block := self._small.first()) is not None and self._hits[block] >= PROMOTE:
            self._small.remove(block)
            self._main.append(block)
            self._home[block] = self._main
            self._hits[block] = 0
        return block

    def _from_main(self) -> Block | None:
        while (block := self._main.first()) is not None and self._hits[block]:
            self._main.remove(block)
            self._main.append(block)
            self._hits[block] -= 1
        return block
