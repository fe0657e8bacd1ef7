"""WA: evict the leaf least likely to be asked for again while it would stay (the workload-aware policy of "KVCache
Cache in the Wild", ATC 2025, section 4).

Requests fall into categories, by whether they are agentic, whether templated, and which turn of their session they
are (1, 2, 3 to 4, later); the reuse times of each are distributed exponentially. A block idle for t comes back
within `life`, the time for which idle blocks stay cached, with probability share * (CDF(t + life) - CDF(t)), where
share is how much of its category comes back at all. In a category that only falls with time, so that the order there
is LRU, a prompt's end first, and only the first of each category need be compared.
"""

from __future__ import annotations

from math import expm1, log

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use

WINDOW = 16_384
"""A category's statistics are of about so many blocks, the older ones counting less."""
FIRST_MEAN = 60.0
"""Mean reuse time in seconds before any is known."""


class _Category:
    """Idle blocks of a category, least recently used first, and how such blocks come back."""

    def __init__(self) -> None:
        self.queue = Queue()
        self._idle = 2.0  # blocks that became idle
        self._back = 1.0  # those that came back
        self._time = FIRST_MEAN  # seconds that they were idle, in sum

    def idle(self) -> None:
        self._idle += 1
        if self._idle > WINDOW:
            self._idle, self._back, self._time = self._idle / 2, self._back / 2, self._time / 2

    def back(self, seconds: float) -> None:
        self._back += 1
        self._time += seconds

    def log_chance(self, seconds: float, life: float) -> float:
        """Logarithm of the probability that a block idle for so long comes back within `life`."""
        mean = max(self._time / self._back, 1e-3)
        share = min(self._back / self._idle, 1.0)
        return log(share) - seconds / mean + log(-expm1(-max(life, 1e-3) / mean))


class WA(Policy):
    """Workload-aware, for a cache of `blocks`."""

    def __init__(self, blocks: int) -> None:
        self._categories = [_Category() for _ in range(16)]
        self._ghosts: Ghosts[tuple[_Category, float]] = Ghosts(blocks)  # category and latest use of what went
        self._now = 0.0
        self._life = 0.0
        self._evictions = 0

    def arrive(self, use: Use) -> None:
        self._now = use.time

    def miss(self, key: bytes, use: Use) -> None:
        # Reuse of what went counts too: a category that is always evicted could never show that it comes back.
        ghost = self._ghosts.take(key)
        if ghost is not None:
            category, time = ghost
            category.back(use.time - time)

    def hit(self, block: Block, use: Use) -> None:
        category = self._category(block.use)
        if category.queue.remove(block):
            category.back(use.time - block.use.time)

    def release(self, block: Block) -> None:
        category = self._category(block.use)
        category.idle()
        category.queue.append(block)

    def leaf(self, block: Block) -> None:
        self._category(block.use).queue.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        category = self._category(block.use)
        if category.queue.remove(block) and evicted:
            assert block.key is not None
            self._ghosts.add(block.key, (category, block.use.time))
            self._evictions += 1
            self._life += (self._now - block.use.time - self._life) / min(self._evictions, WINDOW)

    def victim(self) -> Block | None:
        lowest: tuple[float, int] | None = None
        victim: Block | None = None
        for category in self._categories:
            block = category.queue.first()
            if block is None:
                continue
            priority = (category.log_chance(self._now - block.use.time, self._life), -block.offset)
            if lowest is None or priority < lowest:
                lowest, victim = priority, block
        return victim

    def _category(self, use: Use) -> _Category:
        turn = 0 if use.turn <= 1 else 1 if use.turn == 2 else 2 if use.turn <= 4 else 3
        return self._categories[8 * use.agentic + 4 * use.templated + turn]
