"""T-LRU: LRU that lets go first of what a session can lose without a long wait (Tail-Optimized LRU, 2025).

A turn that finds all but `budget` tokens of its prompt cached answers within the target. So of each session's prompt
the last `budget - q` tokens can go before all else, where q is what a turn adds to the prompt; behind them, LRU.
"""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use

BUDGET = 4096
"""Tokens whose prefill is within the target for the time to first token."""


class TLRU(Policy):
    """Tail-optimised LRU (arXiv 2510.15152, section 3)."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.budget = budget
        self._tails, self._others = Queue(), Queue()
        self._end = 0
        self._use: Use | None = None
        self._added = 0.0  # mean of the tokens that a turn adds
        self._new = 0

    def arrive(self, use: Use) -> None:
        if self._use is not None and self._use.turn > 1:
            self._added += (self._new - self._added) / 64
        self._use, self._new = use, 0

    def insert(self, block: Block) -> None:
        self._new += block.size

    def hit(self, block: Block, use: Use) -> None:
        self.remove(block, evicted=False)

    def release(self, block: Block) -> None:
        # A chain is released from its end, where the block with the largest offset is.
        end = block.offset + block.size
        if block.use is not self._use or end > self._end:
            self._use, self._end = block.use, end
        spare = self._end - block.offset <= self.budget - self._added
        (self._tails if spare else self._others).append(block)

    def leaf(self, block: Block) -> None:
        self._others.ready(block)
        self._tails.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        if not self._others.remove(block):
            self._tails.remove(block)

    def victim(self) -> Block | None:
        return self._tails.first() or self._others.first()
