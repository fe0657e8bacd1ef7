"""UniCache: SAECache's four queues with fixed parameters, which learns nothing."""

from __future__ import annotations

from ostinato.cache.policy.saecache import SAECache, TypeStatistics
from ostinato.cache.use import TokenType

WEIGHTS: dict[TokenType, float] = {
    "system": 5.0,
    "tools": 5.0,
    "template": 4.0,
    "document": 2.0,
    "user": 1.0,
    "assistant": 1.0,
    "tool": 1.0,
    "text": 1.0,
    "reasoning": 0.2,
    "decode": 0.2,
}
"""How often tokens of a type come back, as one would guess without having seen the traffic."""


class UniCache(SAECache):
    """The policy for a cache of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, learn=frozenset())
        self.types = {kind: TypeStatistics(weight) for kind, weight in WEIGHTS.items()}
