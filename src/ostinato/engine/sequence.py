"""A sequence: one request's tokens, its blocks in the pool, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from ostinato.cache.block import Block
from ostinato.cache.keys import block_key
from ostinato.cache.pool import Run
from ostinato.engine.request import SamplingParams


@dataclass(eq=False)
class Sequence:
    """State of one request inside the engine; only the engine's thread touches it once submitted.

    `token_ids` is the prompt followed by what was generated; the KV of the first `computed` is written.
    """

    id: int
    token_ids: list[int]
    prompt_tokens: int
    params: SamplingParams
    root: bytes
    max_tokens: int
    computed: int = 0
    blocks: list[Block] = field(default_factory=list[Block])
    cached_tokens: int | None = None
    """Prompt tokens whose prefill was skipped: set at first admission, never raised by preemption."""
    keys: list[bytes] = field(default_factory=list[bytes])
    """Chain keys of the full blocks of `token_ids`, as far as they were asked for."""
    published: int = 0
    """How many of `blocks` can be looked up by others."""
    _runs: list[Run] = field(default_factory=list[Run])
    _runs_blocks: int = 0

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.token_ids) - self.computed

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def chain(self, block_size: int) -> list[bytes]:
        """Chain keys of every full block of `token_ids`."""
        parent = self.keys[-1] if self.keys else self.root
        for start in range(len(self.keys) * block_size, len(self.token_ids) - block_size + 1, block_size):
            parent = block_key(parent, self.token_ids[start : start + block_size])
            self.keys.append(parent)
        return self.keys

    def parent_key(self, block: int) -> bytes:
        """Key of what block number `block` of this sequence continues."""
        return self.keys[block - 1] if block else self.root

    def runs(self, block_size: int) -> list[Run]:
        """The blocks of this sequence as runs. Lengths count whole blocks, written or not."""
        for i in range(self._runs_blocks, len(self.blocks)):
            slot = self.blocks[i].number * block_size
            last = self._runs[-1] if self._runs else None
            if last is not None and last.slot + last.length == slot:
                self._runs[-1] = Run(last.slot, last.length + block_size, last.position)
            else:
                self._runs.append(Run(slot, block_size, i * block_size))
        self._runs_blocks = len(self.blocks)
        return self._runs

    def forget_runs(self) -> None:
        """Call after replacing or dropping blocks."""
        self._runs, self._runs_blocks = [], 0

    def slots(self, start: int, end: int, block_size: int) -> list[int]:
        """Pool slots of token numbers `start` to `end` (excluded)."""
        blocks = self.blocks
        return [blocks[i // block_size].number * block_size + i % block_size for i in range(start, end)]
