"""The policy of our own: what is learned of reuse decides, unless recency or GDSF does better at the time.

Which does best is seen from a shadow of each, a miniature simulation (see `shadow`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from zlib import crc32

from ostinato.cache.block import Block
from ostinato.cache.policy.gdsf import GDSF
from ostinato.cache.policy.gittins import Gittins, Rule
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.shadow import Shadow
from ostinato.cache.use import Use

SHADOW = 1024
"""Blocks of a shadow, about."""
HORIZON = 8
"""Results of shadows fade with as many lookups as this many times their blocks."""
OPEN = 1024
"""Requests that are noted at a time, until they end."""


@dataclass(slots=True)
class Request:
    """What is noted of a request: the sampled blocks of its prompt, and behind them those of its reply."""

    use: Use
    chain: list[Block] = field(default_factory=list[Block])
    asked: int = 0
    """How many are the prompt's."""


class Ostinato(Gittins):
    """The policy for a cache of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self._stride = max(1, blocks // SHADOW)
        small = max(1, blocks // self._stride)
        self._horizon = HORIZON * small
        self.shadows: dict[Rule, Shadow] = {
            "learned": Shadow(Gittins(small, self.reuse), small),
            "recency": Shadow(LRU(), small),
            "gdsf": Shadow(GDSF(), small),
        }
        self._requests: dict[int, Request] = {}
        """Sampled blocks of each request that has not ended, by the identity of its use."""

    def insert(self, block: Block) -> None:
        super().insert(block)
        self._note(block, block.use, asked=block.kind != "decode")

    def hit(self, block: Block, use: Use) -> None:
        super().hit(block, use)
        self._note(block, use, asked=True)

    def release(self, block: Block) -> None:
        super().release(block)
        if self._requests:
            request = self._requests.pop(id(block.use), None)
            if request is not None:
                self._compare(request)

    def _note(self, block: Block, use: Use, *, asked: bool) -> None:
        assert block.key is not None
        if self._stride > 1 and crc32(block.key) % self._stride:
            return
        request = self._requests.get(id(use))
        if request is None:
            if len(self._requests) >= OPEN:  # of some, every block was released by another request
                del self._requests[next(iter(self._requests))]
            request = self._requests[id(use)] = Request(use)
        request.chain.append(block)
        request.asked += asked

    def _compare(self, request: Request) -> None:
        """A request has ended: see what each rule would have found."""
        fade = math.exp(-request.asked / self._horizon)
        for each in self.shadows.values():
            each.score = fade * each.score + each.ask(request.use, request.chain, request.asked)
        best = max(self.shadows, key=lambda rule: self.shadows[rule].score)
        if self.shadows[best].score > self.shadows[self.rule].score:
            self.go_by(best)
