"""The plan of a request: which KV it reuses and how much is left to compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ostinato.cache.block import Block
from ostinato.cache.index import Index


@dataclass(frozen=True)
class Plan:
    """What admission of a request takes.

    `reused` blocks are pointed at. `copied` is a block whose first `copied_tokens` slots go into the
    request's next block, so that nothing is lost to rounding. `new_blocks` are to be allocated.
    """

    reused: tuple[Block, ...]
    copied: Block | None
    copied_tokens: int
    cached_tokens: int
    new_blocks: int

    @property
    def idle_blocks(self) -> int:
        """Blocks the plan takes from the evictable ones by pointing at them or copying from them."""
        blocks = self.reused if self.copied is None else (*self.reused, self.copied)
        return sum(block.users == 0 for block in blocks)


def make_plan(index: Index, root: bytes, keys: Sequence[bytes], token_ids: Sequence[int]) -> Plan:
    """Plan the prefill of `token_ids`. At least the last token is computed: its logits are needed."""
    match = index.match(root, keys, token_ids, limit=len(token_ids) - 1)
    size = index.pool.block_size
    total_blocks = -(-len(token_ids) // size)
    return Plan(
        reused=match.blocks,
        copied=match.partial,
        copied_tokens=match.partial_tokens,
        cached_tokens=match.tokens,
        new_blocks=total_blocks - len(match.blocks),
    )
