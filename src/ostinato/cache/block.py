"""A block: the KV of up to `block_size` tokens, and what the cache knows of it."""

from __future__ import annotations

from dataclasses import dataclass, field


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
