"""The interface of an eviction policy.

The store tells the policy what happens to blocks; the policy says which to evict. It never sees KV tensors,
tokens or models, so that the engine, the tiers and a trace replay run the same classes. What it may learn from
stands in the block (token type, offset and depth in the prompt, size, cost to recompute) and in its last `Use`
(session, turn, time, scope).
"""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.use import Use


class Policy:
    """Ranks cached blocks. Each call must be O(1) or near it. A policy overrides what it learns from."""

    def arrive(self, use: Use) -> None:
        """A request comes in, before anything of it is looked up. Times never go backwards."""

    def miss(self, key: bytes, use: Use) -> None:
        """A request looked for a block of this key in vain, and will compute it."""

    def insert(self, block: Block) -> None:
        """`block` was written and can be found from now on; a request uses it."""

    def hit(self, block: Block, use: Use) -> None:
        """A request found `block` and uses it: it cannot go until released. `block.use` is still the use before."""

    def release(self, block: Block) -> None:
        """The last user of `block` is gone. A request's blocks are released leaf first."""
        raise NotImplementedError

    def leaf(self, block: Block) -> None:
        """The last cached child of `block` has gone; it may be in use."""
        raise NotImplementedError

    def remove(self, block: Block, *, evicted: bool) -> None:
        """`block` left the cache; forget it. `evicted`: for want of room, so the policy had named it."""
        raise NotImplementedError

    def victim(self) -> Block | None:
        """The block to evict next, or None. It has no user and no children."""
        raise NotImplementedError
