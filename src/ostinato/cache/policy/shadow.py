"""A shadow: a small cache without KV that tells how a policy would do (Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations", ATC 2017).

It sees the keys whose hash falls in a sample, and has as small a share of the cache's blocks. The sampled blocks of a
chain are a chain: the parent of each is the nearest block before it that is sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.store import Store
from ostinato.cache.use import Use


class Shadow:
    """A cache of `blocks` blocks under `policy`."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self.policy = policy
        self.blocks = blocks
        self.score = 0.0
        """Tokens found, the older ones counting less."""
        self._store = Store(policy)

    def ask(self, use: Use, chain: Sequence[Block], asked: int) -> int:
        """Serve a request for blocks like these, the first `asked` of them its prompt's. Returns the tokens of those that
        were found."""
        store, policy = self._store, self.policy
        policy.arrive(use)
        keys = [block.key or b"" for block in chain]
        found = store.lookup(keys)
        for block in found:
            store.acquire(block, use)
        blocks = list(found)
        for key in keys[len(found) : asked]:
            policy.miss(key, use)
        for like, key in zip(chain[len(found) :], keys[len(found) :], strict=True):
            block = store.blocks.get(key)
            if block is not None:
                store.acquire(block, use)
            else:
                if len(store.blocks) >= self.blocks and not self._evict():
                    break
                block = Block(
                    0,
                    key=key,
                    parent=blocks[-1].key or b"" if blocks else b"",
                    kind=like.kind,
                    size=like.size,
                    offset=like.offset,
                    depth=like.depth,
                    cost=like.cost,
                )
                store.insert(block, use)
            blocks.append(block)
        for block in reversed(blocks):
            store.release(block, use)
        return sum(block.size for block in found[:asked])

    def _evict(self) -> bool:
        victim = self._store.victim()
        if victim is not None:
            self._store.remove(victim, evicted=True)
        return victim is not None
