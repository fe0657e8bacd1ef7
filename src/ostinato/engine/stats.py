"""What an engine has done and holds, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ostinato.cache.use import TokenType


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started, and what it holds now. Slots are counted in tokens."""

    waiting: int
    running: int
    slots_total: int
    slots_used: int
    slots_cached: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    evicted_blocks: int
    requests_finished: int
    sessions: int
    prompt_kinds: Counter[TokenType]
    """`prompt_tokens` by what they are."""
    cached_kinds: Counter[TokenType]
    """`cached_tokens` by what they are."""
    miss_reasons: Counter[str]
    """Prompt tokens that had to be computed, by why."""
    records_lost: int
    """Requests that could not be written to the recording."""
