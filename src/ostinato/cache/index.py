"""The index of cached blocks: which KV exists, who uses it, what goes when the pool is full, and what is forgotten."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ostinato.access.scope import Scope
from ostinato.cache.block import NEVER, Block, Lineage, recompute_cost
from ostinato.cache.keys import block_key
from ostinato.cache.policy.base import Policy
from ostinato.cache.pool import Pool
from ostinato.cache.store import Store
from ostinato.cache.use import Use

REMEMBERED = 65_536
"""Of so many blocks that are gone it is known why."""

Loss = Literal["evicted", "expired"]


@dataclass(frozen=True)
class Match:
    """The longest cached beginning of a token sequence that its reader may reuse.

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
        self.expired_blocks = 0
        self.lost: OrderedDict[bytes, tuple[Loss, float]] = OrderedDict()
        """Why blocks are gone, and when, by their keys."""
        # Blocks by what they continue and their first token, for matches that end inside a block.
        self._children: dict[bytes, dict[int, list[Block]]] = {}
        self._expiring: list[tuple[float, int, Block]] = []
        self._pushes = itertools.count()

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

    def match(
        self,
        root: bytes,
        keys: Sequence[bytes],
        token_ids: Sequence[int],
        limit: int,
        *,
        now: float = 0.0,
        reader: Scope | None = None,
    ) -> Match:
        """Find the longest cached beginning of `token_ids`, at most `limit` tokens, to the exact token.

        Args:
            root: key of what the tokens follow.
            keys: the chain keys of the blocks of `token_ids` from `root` on; the last may be partly full.
            token_ids: the tokens.
            limit: most tokens to match.
            now: blocks that expired before are not found.
            reader: who asks; blocks that others have to themselves are not found.
        """
        size = self.pool.block_size
        blocks: list[Block] = []
        parent, done = root, 0
        for key in keys:
            block = self.store.blocks.get(key)
            if block is None or done + block.size > limit or not readable(block, now, reader):
                break
            blocks.append(block)
            parent = key
            done += block.size
        rest = tuple(token_ids[done : min(done + size, limit)])
        partial, best = None, 0
        for child in self._children.get(parent, {}).get(rest[0], ()) if rest else ():
            common = _common_prefix(child.token_ids, rest)
            if common > best and readable(child, now, reader):
                partial, best = child, common
        return Match(tuple(blocks), partial, best, done + best)

    def children(self, key: bytes) -> Iterator[Block]:
        """The cached blocks that continue the block or root of this key."""
        for blocks in self._children.get(key, {}).values():
            yield from blocks

    def acquire(self, block: Block, use: Use, expires: float = NEVER) -> None:
        """Use a cached block: it stays until it is released as often as acquired, and lives until `expires` at least."""
        self._prolong(block, expires)
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
            self._lose(victim, "evicted", victim.use.time)
            self._drop(victim, evicted=True)
        return [Block(number) for number in self.pool.allocate(count, after=after)]

    def publish(self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use) -> Block:
        """Make a written block findable. Returns the block to use from now on.

        If the same KV is cached already, that block is returned, acquired, and `block` is freed.
        """
        key = block_key(parent, token_ids)
        known = self.store.blocks.get(key)
        if known is not None:
            if known.owner != block.owner:
                known.owner = None  # two have computed it: it is no secret of either
            self.acquire(known, use, block.expires)
            self._discard(block)
            return known
        block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
        block.size = len(block.token_ids)
        block.cost = recompute_cost(block.size, block.offset)
        # A tail that this block continues says nothing the block does not say, if it is as long for as many to read.
        for sibling in list(self._children.get(parent, {}).get(block.token_ids[0], ())):
            idle = sibling.users == 0 and sibling.children == 0
            lasting = block.expires >= sibling.expires and block.owner in (None, sibling.owner)
            if idle and lasting and block.token_ids[: sibling.size] == sibling.token_ids:
                self._drop(sibling, evicted=False)
        self._children.setdefault(parent, {}).setdefault(block.token_ids[0], []).append(block)
        self.store.insert(block, use)
        self.lost.pop(key, None)
        if block.expires < NEVER:
            self._watch(block)
        return block

    def publish_tail(self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use) -> Block | None:
        """Publish a partly filled last block, unless another block holds those tokens too.

        Returns the block to release, or None if `block` was freed.
        """
        wanted = tuple(token_ids)
        for sibling in self._children.get(parent, {}).get(wanted[0], ()):
            if sibling.token_ids[: len(wanted)] == wanted and readable(sibling, use.time, block.owner):
                self._prolong(sibling, block.expires)
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

    def forget(self, forgotten: Callable[[Lineage], bool]) -> list[Block]:
        """Take away every block whose lineage is `forgotten`, with all that continues it, and erase their KV.

        What requests use now can no longer be found, and is erased when the last of them lets go of it.
        """
        gone: dict[Block, None] = {}
        for block in list(self.store.blocks.values()):
            if block.key is not None and block not in gone and forgotten(block.lineage):
                gone |= dict.fromkeys(self._with_descendants(block))
        for block in sorted(gone, key=lambda each: -each.depth):
            self._forget(block)
        return list(gone)

    def sweep(self, now: float) -> int:
        """Take away and erase the blocks that expired before `now`; returns how many."""
        count = 0
        while self._expiring and self._expiring[0][0] <= now:
            expected, _, block = heapq.heappop(self._expiring)
            if block.key is None or block.expires == NEVER:
                continue
            if block.expires > now:
                self._watch(block)
            elif block.users:
                # Requests still read it. None finds it any more, and it goes when it is looked at next.
                heapq.heappush(self._expiring, (max(now, expected) + 1, next(self._pushes), block))
            else:
                for each in self._with_descendants(block):
                    self._lose(each, "expired", block.expires)
                    self._forget(each)
                    count += 1
        self.expired_blocks += count
        return count

    @property
    def next_expiry(self) -> float:
        """When `sweep` has something to look at."""
        return self._expiring[0][0] if self._expiring else NEVER

    def _prolong(self, block: Block, expires: float) -> None:
        if expires > block.expires:
            block.expires = expires

    def _watch(self, block: Block) -> None:
        heapq.heappush(self._expiring, (block.expires, next(self._pushes), block))

    def _with_descendants(self, block: Block) -> list[Block]:
        """A block and all that continues it in its chain, leaf first."""
        found = [block]
        for each in found:
            assert each.key is not None
            found += self.children(each.key)
        return found[::-1]

    def _forget(self, block: Block) -> None:
        block.secret = True
        if block.users:
            self._unregister(block, evicted=False)
        else:
            self._drop(block, evicted=False)

    def _discard(self, block: Block) -> None:
        """Let go of a block that cannot be found; its last user frees it."""
        block.users -= 1
        if not block.users:
            self._free(block)

    def _drop(self, block: Block, *, evicted: bool) -> None:
        """Unregister a cached block that nobody uses, then free it: no key may outlive its KV."""
        self._unregister(block, evicted=evicted)
        self._free(block)

    def _free(self, block: Block) -> None:
        if block.secret:
            self.pool.erase(block.number)
        self.pool.free([block.number])

    def _unregister(self, block: Block, *, evicted: bool) -> None:
        self.store.remove(block, evicted=evicted)
        siblings = self._children[block.parent]
        same = siblings[block.token_ids[0]]
        same.remove(block)
        if not same:
            del siblings[block.token_ids[0]]
        if not siblings:
            del self._children[block.parent]
        block.key = None

    def _lose(self, block: Block, how: Loss, when: float) -> None:
        assert block.key is not None
        self.lost[block.key] = (how, when)
        self.lost.move_to_end(block.key)
        if len(self.lost) > REMEMBERED:
            self.lost.popitem(last=False)


def readable(block: Block, now: float, reader: Scope | None) -> bool:
    """Whether who knows a block's key may reuse it now."""
    return block.expires > now and (block.owner is None or block.owner == reader)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
