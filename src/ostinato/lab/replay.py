"""Replay of a trace through an eviction policy: the store and the policies are those of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ostinato.cache.block import Block, TokenType, recompute_cost
from ostinato.cache.policy.base import Policy
from ostinato.cache.store import Store
from ostinato.lab.trace import Trace, TraceRequest


@dataclass
class Replay:
    """What a policy made of a trace. A hit token is a prompt token whose prefill the cache saves."""

    policy: str
    capacity: int
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    evictions: int = 0
    seconds: float = 0.0
    hits_by_kind: dict[TokenType, int] = field(default_factory=dict[TokenType, int])
    series: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Prompt tokens and hit tokens of each request."""

    @property
    def token_hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def block_hit_rate(self) -> float:
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0


class Cache:
    """A cache of `capacity` blocks that holds no KV."""

    def __init__(self, policy: Policy, capacity: int, block_size: int) -> None:
        self.store = Store(policy)
        self.capacity = capacity
        self.block_size = block_size
        self.evictions = 0

    def ask(self, request: TraceRequest) -> list[Block]:
        """Serve one request. Returns the blocks of its prompt that were cached."""
        store, size = self.store, self.block_size
        full = len(request.keys) if request.tokens >= len(request.keys) * size else len(request.keys) - 1
        use = store.begin(
            request.time,
            request.keys[:full],
            session=request.session,
            agentic=request.agentic,
            templated=request.templated,
            scope=request.scope,
        )
        found = store.lookup(request.keys)
        blocks = list(found)
        for block in found:
            store.acquire(block, use)
        for key in request.keys[len(found) :]:
            store.policy.miss(key, use)
        for number, key in enumerate((*request.keys, *request.reply_keys)[len(found) :], len(found)):
            if key in store.blocks:  # a reply that was given before
                store.acquire(store.blocks[key], use)
                blocks.append(store.blocks[key])
                continue
            if len(store.blocks) >= self.capacity and not self._evict():
                break  # the rest of a prompt that is larger than the cache is not kept
            if number >= len(request.keys):
                kind = "decode"
            else:
                kind = request.kinds[number] if request.kinds else "text"
            offset = number * size
            block = Block(
                0,
                key=key,
                parent=blocks[-1].key or b"" if blocks else b"",
                kind=kind,
                size=min(size, request.tokens - offset) if offset < request.tokens else size,
                offset=offset,
                depth=number,
            )
            block.cost = recompute_cost(block.size, offset)
            store.insert(block, use)
            blocks.append(block)
        for block in reversed(blocks):
            store.release(block, use)
        return found

    def _evict(self) -> bool:
        victim = self.store.victim()
        if victim is None:
            return False
        self.store.remove(victim, evicted=True)
        self.evictions += 1
        return True


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    *,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Send every request of `trace` to a cache of `capacity` blocks. `progress` is called with requests done."""
    import time

    cache = Cache(policy, capacity, trace.block_size)
    result = Replay(name, capacity)
    start = time.perf_counter()
    for number, request in enumerate(trace.requests):
        hit = 0
        found = cache.ask(request)
        result.prompt_blocks += len(request.keys)
        result.hit_blocks += len(found)
        for block in found:
            hit += block.size
            result.hits_by_kind[block.kind] = result.hits_by_kind.get(block.kind, 0) + block.size
        result.prompt_tokens += request.tokens
        result.hit_tokens += hit
        result.series.append((request.tokens, hit))
        if progress is not None and number % 256 == 255:
            progress(number + 1)
    result.evictions = cache.evictions
    result.seconds = time.perf_counter() - start
    return result
