"""A block: the KV of up to `block_size` tokens, and what the cache knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ostinato.access.scope import PUBLIC, Scope
from ostinato.cache.use import NOBODY, TokenType, Use

Lineage = frozenset[Scope | str]
"""What KV was computed from: the scopes of all the text in its sight, and the requests with text of their own in it."""

NEVER = float("inf")

REQUESTS = 64
"""Requests of one user that a claim tells apart."""
CLAIMS = 64
"""Users whose claims a block keeps. Of a text that so many send, the next one's claim changes nothing."""


@dataclass(slots=True)
class Claim:
    """A user's hold on a block of a shared scope, whose text it has sent itself."""

    requests: dict[str, float]
    """Those that it sent the text with and has not forgotten, and when it expires for each."""
    more: float = 0.0
    """When it expires for those beyond the ones told apart: forgetting them does not end the claim."""

    @property
    def expires(self) -> float:
        return max(self.more, *self.requests.values()) if self.requests else self.more

    def join(self, other: Claim) -> None:
        """Hold what the other holds too."""
        self.more = max(self.more, other.more)
        for request, expires in other.requests.items():
            if request in self.requests or len(self.requests) < REQUESTS:
                self.requests[request] = max(expires, self.requests.get(request, 0.0))
            else:
                self.more = max(self.more, expires)


@dataclass(slots=True, eq=False)
class Block:
    """Block `number` of the pool. It can be looked up only once it has a key, set after its KV is written."""

    number: int
    users: int = 1
    """How many requests read it now. With none it is cached only, and may be evicted."""
    key: bytes | None = None
    parent: bytes = b""
    """Key of the block or root before it in its chain."""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    children: int = 0
    """How many cached blocks continue it. A block with children is never evicted before them."""
    retired: bool = False
    """True if nothing is expected to ask for it again: it is evicted before all others."""
    kind: TokenType = "text"
    """What most of its tokens are, a template's markers aside."""
    size: int = 0
    """How many tokens it holds."""
    offset: int = 0
    """Tokens before it in its prompt."""
    depth: int = 0
    """Blocks before it in its chain."""
    cost: float = 1.0
    """Work to recompute it, in tokens at the beginning of a prompt: attention makes later ones dearer."""
    use: Use = NOBODY
    """The latest use."""
    uses: int = 1
    """How many requests have used it, from its computation on."""
    scope: Scope = PUBLIC
    """Who may reuse it."""
    lineage: Lineage = frozenset()
    """What must not be forgotten for it to stay."""
    claims: dict[Scope, Claim] = field(default_factory=dict[Scope, Claim], repr=False)
    """Of a shared scope: which users have sent its text."""
    claimed: bool = False
    """Whether it goes when nobody has a claim on it any more."""
    guarded: bool = False
    """Whether a user finds it only by a claim of its own, or by those of two others."""
    expires: float = NEVER
    """When it counts as forgotten, on the clock of its uses."""
    blank: bool = False
    """Whether nothing was written to its slots since they were allocated."""

    def claim(self, user: Scope, claim: Claim) -> None:
        """Have a user hold it."""
        held = self.claims.get(user)
        if held is not None:
            held.join(claim)
        else:
            if len(self.claims) >= CLAIMS:
                del self.claims[min(self.claims, key=lambda each: self.claims[each].expires)]
            self.claims[user] = replace(claim, requests=dict(claim.requests))
        self.expires = max(self.expires, claim.expires)

    def unclaim(self, user: Scope, request: str, now: float) -> bool:
        """Have a user's request hold it no more; whether that was all that the user held it by."""
        held = self.claims.get(user)
        if held is None or held.requests.pop(request, None) is None:
            return False
        held_on = held.expires > now
        if not held_on:
            del self.claims[user]
        if self.claims:
            self.expires = max(each.expires for each in self.claims.values())
        return not held_on

    def readable(self, reader: Scope | None, now: float) -> bool:
        """Whether a user who knows its key may reuse it now."""
        if self.expires <= now:
            return False
        if not self.guarded:
            return True
        alive = {user for user, claim in self.claims.items() if claim.expires > now}
        return reader in alive or len(alive) > 1  # others, where it is not among them

    def sent_by(self, user: Scope | None, now: float) -> bool:
        """Whether a user knows its text by having sent it, and may still know that it is here."""
        if user is None:
            return False
        if self.scope.private:
            return (self.scope.org, self.scope.user) == (user.org, user.user) and self.expires > now
        return user in self.claims and self.claims[user].expires > now


BREAK_EVEN = 4096
"""Position from which on attention costs a token more than the linear layers do (SmolLM2-135M: 3,900)."""


def recompute_cost(size: int, offset: int) -> float:
    """Work to compute `size` tokens behind `offset` others, in tokens at the beginning of a prompt."""
    return size * (1 + offset / BREAK_EVEN)
