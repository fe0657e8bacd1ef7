"""The index of cached blocks: which KV exists, who uses it, what goes when the pool is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.block import Block, recompute_cost
from ostinato.cache.keys import block_key
from ostinato.cache.policy.base import Policy
from ostinato.cache.pool import Pool
from ostinato.cache.store import Store
from ostinato.cache.use import Use


@dataclass(frozen=True)
class Match:
    """The longest cached beginning of a token sequence.

    `blocks` match whole. `partial` is a block that matches only in its first `partial_tokens` tokens.
    """

    blocks: tuple[Block, ...]
    partial: Block | None
    partial_tokens: int
    tokens: int


class Index:
    """Owns every block of `pool`: free, in use by requests, or cached in `store`."""

    def __init__(self, pool: Pool, policy: Policy) -> None:
        self.pool = pool
        self.store = Store(policy)
        self.evicted_blocks = 0
        # Blocks by what they continue and their first token, for matches that end inside a block.
        self._siblings: dict[tuple[bytes, int], list[Block]] = {}

    @property
    def cached_blocks(self) -> int:
        """Blocks that hold KV which no request uses now."""
        return self.store.idle

    @property
    def available_blocks(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones that no request uses."""
        return self.pool.free_blocks + self.store.idle

    def __contains__(self, key: bytes) -> bool:
        return key in self.store.blocks

    def __len__(self) -> int:
        return len(self.store.blocks)

    def match(self, root: bytes, keys: Sequence[bytes], token_ids: Sequence[int], limit: int) -> Match:
        """Find the longest cached beginning of `token_ids`, at most `limit` tokens, to the exact token.

        `keys` are the chain keys of the blocks of `token_ids` from `root` on; the last may be partly full.
        """
        size = self.pool.block_size
        blocks: list[Block] = []
        parent, done = root, 0
        for key in keys:
            block = self.store.blocks.get(key)
            if block is None or done + block.size > limit:
                break
            blocks.append(block)
            parent = key
            done += block.size
        rest = tuple(token_ids[done : min(done + size, limit)])
        partial, best = None, 0
        for child in self._siblings.get((parent, rest[0]), ()) if rest else ():
            common = _common_prefix(child.token_ids, rest)
            if common > best:
                partial, best = child, common
        return Match(tuple(blocks), partial, best, done + best)

    def acquire(self, block: Block, use: Use) -> None:
        """Use a cached block: it stays until it is released as often as acquired."""
        self.store.acquire(block, use)

    def allocate(self, count: int, *, after: int | None = None) -> list[Block]:
        """Take `count` blocks for writing, evicting cached ones as needed; one user each.

        Raises ValueError if `available_blocks` is smaller than `count`.
        """
        while self.pool.free_blocks < count:
            victim = self.store.victim()
            if victim is None:
                raise ValueError(f"{count} blocks asked for, {self.available_blocks} available")
            self.evicted_blocks += 1
            self._drop(victim, evicted=True)
        return [Block(number) for number in self.pool.allocate(count, after=after)]

    def publish(self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use) -> Block:
        """Make a written block findable. Returns the block to use from now on.

        If the same KV is cached already, that block is returned, acquired, and `block` is freed.
        """
        key = block_key(parent, token_ids)
        known = self.store.blocks.get(key)
        if known is not None:
            self.acquire(known, use)
            self._discard(block)
            return known
        block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
        block.size = len(block.token_ids)
        block.cost = recompute_cost(block.size, block.offset)
        # A tail that this block continues says nothing the block does not say.
        for sibling in list(self._siblings.get((parent, block.token_ids[0]), ())):
            idle = sibling.users == 0 and sibling.children == 0
            if idle and block.token_ids[: sibling.size] == sibling.token_ids:
                self._drop(sibling, evicted=False)
        self._siblings.setdefault((parent, block.token_ids[0]), []).append(block)
        self.store.insert(block, use)
        return block

    def publish_tail(self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use) -> Block | None:
        """Publish a partly filled last block, unless another block holds those tokens too.

        Returns the block to release, or None if `block` was freed.
        """
        wanted = tuple(token_ids)
        for sibling in self._siblings.get((parent, wanted[0]), ()):
            if sibling.token_ids[: len(wanted)] == wanted:
                self._discard(block)
                return None
        return self.publish(block, parent, wanted, use)

    def release(self, blocks: Sequence[Block], use: Use) -> None:
        """Stop using the blocks of one chain, given in order from its root."""
        for block in reversed(blocks):
            if block.key is None:
                self._discard(block)
            else:
                self.store.release(block, use)

    def clear(self) -> int:
        """Forget every cached block that no request uses. Returns how many."""
        count = 0
        while (victim := self.store.victim()) is not None:
            self._drop(victim, evicted=False)
            count += 1
        return count

    def _discard(self, block: Block) -> None:
        """Free a block that was never published and has this one user."""
        block.users = 0
        self.pool.free([block.number])

    def _drop(self, block: Block, *, evicted: bool) -> None:
        """Unregister a cached block, then free it: no key may outlive its KV."""
        self.store.remove(block, evicted=evicted)
        siblings = self._siblings[block.parent, block.token_ids[0]]
        siblings.remove(block)
        if not siblings:
            del self._siblings[block.parent, block.token_ids[0]]
        block.key = None
        self.pool.free([block.number])


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
