"""The index of cached blocks: which KV exists, who uses it, what goes when the pool is full, and what is forgotten."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ostinato.access.scope import Scope
from ostinato.cache.block import NEVER, Block, Claim, Lineage, recompute_cost
from ostinato.cache.keys import block_key
from ostinato.cache.owned import Owned
from ostinato.cache.policy.base import Policy
from ostinato.cache.pool import Pool
from ostinato.cache.store import Store
from ostinato.cache.use import Use

REMEMBERED = 65_536
"""Of so many blocks that are gone it is known why."""


@dataclass(frozen=True)
class Loss:
    """That a block is gone, for a user who has sent its text."""

    how: Literal["evicted", "expired"]
    when: float
    lineage: Lineage
    """It is forgotten with what the block was computed from."""


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
        self.lost: Owned[Scope, bytes, Loss] = Owned(REMEMBERED)
        """Why blocks are gone, and when, by their keys: for each user what it has sent itself."""
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
            if block is None or done + block.size > limit or not block.readable(reader, now):
                break
            blocks.append(block)
            parent = key
            done += block.size
        rest = tuple(token_ids[done : min(done + size, limit)])
        partial, best = None, 0
        for child in self._children.get(parent, {}).get(rest[0], ()) if rest else ():
            common = _common_prefix(child.token_ids, rest)
            if common > best and child.readable(reader, now):
                partial, best = child, common
        return Match(tuple(blocks), partial, best, done + best)

    def children(self, key: bytes) -> Iterator[Block]:
        """The cached blocks that continue the block or root of this key."""
        for blocks in self._children.get(key, {}).values():
            yield from blocks

    def acquire(self, block: Block, use: Use, expires: float = NEVER) -> None:
        """Use a cached block: it stays until it is released as often as acquired, and lives until `expires` at least."""
        block.expires = max(block.expires, expires)
        self.store.acquire(block, use)

    def allocate(self, count: int, *, after: int | None = None, now: float = 0.0) -> list[Block]:
        """Take `count` blocks for writing, evicting cached ones as needed; one user each.

        Raises ValueError if `available_blocks` is smaller than `count`.
        """
        while self.pool.free_blocks < count:
            victim = self.store.victim()
            if victim is None:
                raise ValueError(f"{count} blocks asked for, {self.available_blocks} available")
            self.evicted_blocks += 1
            self._lose(victim, "evicted", now)
            self._drop(victim, evicted=True)
        return [Block(number, blank=True) for number in self.pool.allocate(count, after=after)]

    def publish(self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use) -> Block:
        """Make a written block findable. Returns the block to use from now on.

        If the same KV is cached already, that block is returned, acquired, and `block` is freed.
        """
        key = block_key(parent, token_ids)
        known = self.store.blocks.get(key)
        if known is not None:
            for user, claim in block.claims.items():
                known.claim(user, claim)
                self.lost.drop(user, key)
            known.claimed, known.guarded = known.claimed and block.claimed, known.guarded and block.guarded
            self.acquire(known, use, block.expires)
            self._discard(block)
            return known
        block.key, block.parent, block.token_ids = key, parent, tuple(token_ids)
        block.size = len(block.token_ids)
        block.cost = recompute_cost(block.size, block.offset)
        # A tail that this block continues says nothing the block does not say, if it is as long for as many to read.
        for sibling in list(self._children.get(parent, {}).get(block.token_ids[0], ())):
            idle = sibling.users == 0 and sibling.children == 0
            if idle and _outlasts(block, sibling) and block.token_ids[: sibling.size] == sibling.token_ids:
                self._drop(sibling, evicted=False)
        self._children.setdefault(parent, {}).setdefault(block.token_ids[0], []).append(block)
        self.store.insert(block, use)
        for user in _senders(block):
            self.lost.drop(user, key)
        if block.expires < NEVER:
            self._watch(block)
        return block

    def publish_tail(
        self, block: Block, parent: bytes, token_ids: Sequence[int], use: Use, reader: Scope | None = None
    ) -> Block | None:
        """Publish a partly filled last block, unless its reader finds those tokens in another block too.

        Returns the block to release, or None if `block` was freed.
        """
        wanted = tuple(token_ids)
        same = self.store.blocks.get(block_key(parent, wanted))
        found = same is not None and same.readable(reader, use.time)
        for sibling in () if found else self._children.get(parent, {}).get(wanted[0], ()):
            longer = sibling.size > len(wanted) and sibling.token_ids[: len(wanted)] == wanted
            if longer and sibling.readable(reader, use.time):
                if not sibling.claims:  # what follows in it is not what a claim would be on
                    sibling.expires = max(sibling.expires, block.expires)
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

    def forget(self, forgotten: Callable[[Lineage], bool], now: float = 0.0) -> list[Block]:
        """Take away every block whose lineage is `forgotten`, with all that continues it, and erase their KV.

        What requests use now can no longer be found, and is erased when the last of them lets go of it. Nor is it
        remembered of what stays, for others, that a forgotten user has sent it before it expired for that one.
        """
        known = cache(forgotten)  # many blocks have one lineage
        gone: dict[Block, None] = {}
        for block in list(self.store.blocks.values()):
            if block.key is not None and block not in gone and known(block.lineage):
                gone |= dict.fromkeys(self._with_descendants(block))
        for block in sorted(gone, key=lambda each: -each.depth):
            self._forget(block)
        for block in self.store.blocks.values():
            expired = [user for user, claim in block.claims.items() if claim.expires <= now]
            for user in expired:
                if known(frozenset((user,))):
                    del block.claims[user]
        self.lost.forget(lambda _, loss: known(loss.lineage))
        return list(gone)

    def unclaim(self, user: Scope, request: str, now: float) -> list[Block]:
        """Have a user's request hold no block of a shared scope any more; returns those the user held by it alone.

        What nobody else holds is taken away.
        """
        held = [block for block in self.store.blocks.values() if user in block.claims]
        found = {block for block in held if block.claims[user].expires > now}
        lasted = {block: block.expires for block in held}
        let_go = [block for block in held if block.unclaim(user, request, now)]
        # Leaf first: what others go on from stays for them.
        for block in sorted(let_go, key=lambda each: -each.depth):
            alive = any(claim.expires > now for claim in block.claims.values())
            if block.claimed and not alive and not block.children:
                self._forget(block)
        for block in held:
            if block.key is not None and block.expires < lasted[block]:
                self._watch(block)  # it goes sooner, without that request
        self.lost.forget(lambda owner, loss: owner == user and request in loss.lineage)
        return [block for block in let_go if block in found]

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
                    self._lose(each, "expired", now)
                    self._forget(each)
                    count += 1
        self.expired_blocks += count
        return count

    @property
    def next_expiry(self) -> float:
        """When `sweep` has something to look at."""
        return self._expiring[0][0] if self._expiring else NEVER

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
        # Whatever becomes of the slots, nothing is left in them of what they held.
        if not block.blank:
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

    def _lose(self, block: Block, how: Literal["evicted", "expired"], now: float) -> None:
        """Note for those who have sent its text why it is gone; what has expired for one of them did so for it."""
        assert block.key is not None
        lasts = dict.fromkeys(_senders(block), Claim({}, block.expires)) | block.claims
        for user, claim in lasts.items():
            expired = claim.expires <= now
            loss = Loss(
                "expired" if expired else how,
                claim.expires if expired else now,
                block.lineage.union(claim.requests, (user,)),
            )
            self.lost.put(user, block.key, loss)


def _senders(block: Block) -> Iterable[Scope]:
    """The users who are known to have sent a block's text."""
    if block.scope.private:
        return (Scope("user", block.scope.org, block.scope.user),)
    return block.claims


def _outlasts(block: Block, other: Block) -> bool:
    """Whether all who find one block find the other for as long, whatever is forgotten of what others have sent."""
    if other.scope.private or not (block.claimed or block.guarded):
        return block.expires >= other.expires
    held = {user: claim.requests for user, claim in block.claims.items()}
    return other.claimed and all(
        held.get(user, {}).get(request, 0.0) >= expires
        for user, claim in other.claims.items()
        for request, expires in (*claim.requests.items(), *((("", claim.more),) if claim.more else ()))
    )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
