"""The interface of an eviction policy.

The index tells the policy what happens to blocks; the policy says which to evict. It never sees KV
tensors, requests or models, so the engine and a trace replay run the same classes.
"""

from __future__ import annotations

from typing import Protocol

from ostinato.cache.block import Block


class Policy(Protocol):
    """Ranks the blocks that no request uses. Each of these calls must be O(1) or near it."""

    def insert(self, block: Block) -> None:
        """`block` was written and can be found from now on; a request uses it."""
        ...

    def hit(self, block: Block) -> None:
        """A request found `block` and uses it; it may not be evicted until released."""
        ...

    def release(self, block: Block) -> None:
        """The last user of `block` is gone. A request's blocks are released leaf first.

        A block that is `retired` goes before all that are not.
        """
        ...

    def retire(self, block: Block) -> None:
        """`block`, released before, is `retired` now."""
        ...

    def remove(self, block: Block) -> None:
        """`block` left the cache, evicted or superseded; forget it."""
        ...

    def victim(self) -> Block | None:
        """The released block to evict next: a leaf (`block.children == 0`), or None if there is none."""
        ...
