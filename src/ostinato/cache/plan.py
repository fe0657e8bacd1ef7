"""The plan of a chain: which KV it reuses and how much is left to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.access.scope import Scope
from ostinato.cache.block import Block
from ostinato.cache.index import Index


@dataclass(frozen=True)
class Plan:
    """What admission of a chain takes.

    `reused` blocks are pointed at. `copied` is a block whose first `copied_tokens` slots go into the
    chain's next block, so that nothing is lost to rounding. `new_blocks` are to be allocated.
    """

    reused: tuple[Block, ...]
    copied: Block | None
    copied_tokens: int
    cached_tokens: int
    new_blocks: int

    @property
    def touched(self) -> tuple[Block, ...]:
        """The cached blocks that the plan points at or copies from."""
        return self.reused if self.copied is None else (*self.reused, self.copied)


def make_plan(
    index: Index,
    root: bytes,
    keys: Sequence[bytes],
    token_ids: Sequence[int],
    *,
    limit: int,
    now: float = 0.0,
    reader: Scope | None = None,
) -> Plan:
    """Plan the prefill of one chain, reusing at most its first `limit` tokens; `now` and `reader` as in `match`."""
    match = index.match(root, keys, token_ids, limit, now=now, reader=reader)
    size = index.pool.block_size
    total_blocks = -(-len(token_ids) // size)
    return Plan(
        reused=match.blocks,
        copied=match.partial,
        copied_tokens=match.partial_tokens,
        cached_tokens=match.tokens,
        new_blocks=total_blocks - len(match.blocks),
    )
