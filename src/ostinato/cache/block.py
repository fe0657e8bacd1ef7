"""A block: the KV of up to `block_size` tokens, and what the cache knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.access.scope import PUBLIC, Scope
from ostinato.cache.use import NOBODY, TokenType, Use

Lineage = frozenset[Scope | str]
"""What KV was computed from and by: the scopes of all the text in its sight, and the ids of requests."""

NEVER = float("inf")


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
    owner: Scope | None = None
    """The only one who may reuse it until another has computed the same; None for everyone in the scope."""
    expires: float = NEVER
    """When it counts as forgotten, on the clock of its uses."""
    secret: bool = False
    """Whether its slots are to be erased when they are freed."""


BREAK_EVEN = 4096
"""Position from which on attention costs a token more than the linear layers do (SmolLM2-135M: 3,900)."""


def recompute_cost(size: int, offset: int) -> float:
    """Work to compute `size` tokens behind `offset` others, in tokens at the beginning of a prompt."""
    return size * (1 + offset / BREAK_EVEN)
