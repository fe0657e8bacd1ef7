"""Replay of a trace through an eviction policy: the store and the policies are those of the engine."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import takewhile
from time import perf_counter
from typing import Any

from ostinato.cache.block import Block, recompute_cost
from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.opt import OPT
from ostinato.cache.store import Store
from ostinato.cache.use import INSTRUCTIONS, TokenType
from ostinato.errors import InvalidRequestError
from ostinato.lab.trace import Trace, TraceRequest


@dataclass
class Replay:
    """What a policy made of a trace. A hit token is a prompt token whose prefill the cache saves."""

    policy: str
    capacity: int
    trace: str = ""
    unique_blocks: int = 0
    """Different blocks of the trace."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    evictions: int = 0
    evicting: float = 0.0
    """Seconds spent on choosing and removing victims."""
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
        self.evicting = 0.0
        """Seconds spent on choosing and removing victims."""

    def ask(self, request: TraceRequest) -> list[Block]:
        """Serve one request. Returns the blocks of its prompt that were cached."""
        store, size = self.store, self.block_size
        full = len(request.keys) if request.tokens >= len(request.keys) * size else len(request.keys) - 1
        use = store.begin(
            request.time,
            request.keys[:full],
            session=request.session,
            tokens=request.tokens,
            agentic=request.agentic,
            begins=request.kinds[0] if request.kinds else "text",
            starts=_starts(request),
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
                size=min(size, request.tokens - offset) if number < len(request.keys) else size,
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
        start = perf_counter()
        victim = self.store.victim()
        if victim is None:
            return False
        self.store.remove(victim, evicted=True)
        self.evicting += perf_counter() - start
        self.evictions += 1
        return True


def _starts(request: TraceRequest) -> bytes:
    """Key of the last block that holds nothing but the instructions the prompt begins with."""
    leading = sum(1 for _ in takewhile(INSTRUCTIONS.__contains__, request.kinds))
    return request.keys[leading - 2] if leading > 1 else b""  # the last may hold the user's words too


def replay(
    trace: Trace,
    policy: Policy,
    capacity: int,
    *,
    name: str = "",
    progress: Callable[[int], None] | None = None,
) -> Replay:
    """Send every request of `trace` to a cache of `capacity` blocks. `progress` is called with requests done."""
    cache = Cache(policy, capacity, trace.block_size)
    result = Replay(name, capacity, trace.name)
    start = perf_counter()
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
    result.evictions, result.evicting = cache.evictions, cache.evicting
    result.seconds = perf_counter() - start
    return result


OPTIMUM = "opt"


def make_policy(name: str, trace: Trace, capacity: int) -> Policy:
    """A policy by name; the optimum is told what the prompts of the trace will look up."""
    if name == OPTIMUM:
        return OPT([request.keys for request in trace.requests])
    check_policies([name])
    return POLICIES[name](capacity)


def check_policies(names: Sequence[str]) -> None:
    for name in names:
        if name != OPTIMUM and name not in POLICIES:
            raise InvalidRequestError(
                f"There is no policy '{name}'. There are: {', '.join(POLICIES)}, {OPTIMUM}."
            )


def parse_capacity(text: str) -> float | int:
    """A share of a trace's blocks ("5%", as 0.05), or a number of blocks ("2000")."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else int(text)
        if share > 0 and (isinstance(share, int) or share <= 1):
            return share
    except ValueError:
        pass
    raise InvalidRequestError(
        f"'{text}' is no capacity. Write a share of the trace's different blocks, above 0 % and up to 100 % (5%), "
        "or a number of blocks (2000)."
    )


def replay_many(
    traces: Sequence[Trace],
    policies: Sequence[str],
    capacities: Sequence[str],
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Replay]:
    """Every policy at every capacity on every trace, in that many processes, ordered by trace, capacity, policy.

    `progress` is called with replays done and replays in all.
    """
    check_policies(policies)
    sizes = [parse_capacity(capacity) for capacity in capacities]
    cells: list[_Cell] = []
    for place, trace in enumerate(traces):
        unique = trace.unique_blocks
        for size in sizes:
            blocks = size if isinstance(size, int) else max(1, round(size * unique))
            cells += [(place, name, blocks, unique) for name in policies]
    done: dict[int, Replay] = {}
    if progress is not None:
        progress(0, len(cells))
    if jobs == 1 or len(cells) < 2:
        for number, cell in enumerate(cells):
            done[number] = _replay_cell(traces, cell)
            if progress is not None:
                progress(len(done), len(cells))
    else:
        # Started anew, not forked: whoever calls may have threads.
        with ProcessPoolExecutor(
            min(jobs, len(cells)), multiprocessing.get_context("spawn"), _receive, (traces,)
        ) as pool:
            waiting = {pool.submit(_replay_received, cell): number for number, cell in enumerate(cells)}
            try:
                for future in as_completed(waiting):
                    done[waiting[future]] = future.result()
                    if progress is not None:
                        progress(len(done), len(cells))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return [done[number] for number in range(len(cells))]


_Cell = tuple[int, str, int, int]
"""Number of the trace, policy, blocks of the cache, different blocks of the trace."""

_received: Sequence[Trace] = ()


def _receive(traces: Sequence[Trace]) -> None:
    """Keep the traces in a process, so that each is sent there once."""
    global _received
    _received = traces


def _replay_received(cell: _Cell) -> Replay:
    return _replay_cell(_received, cell)


def _replay_cell(traces: Sequence[Trace], cell: _Cell) -> Replay:
    place, name, blocks, unique = cell
    trace = traces[place]
    result = replay(trace, make_policy(name, trace, blocks), blocks, name=name)
    result.unique_blocks = unique
    return result


def rows(replays: Sequence[Replay]) -> list[dict[str, Any]]:
    """What is printed or written of each replay.

    `gap_closed` is how much of the way from LRU to the optimum a policy makes, in token hits, where both were run.
    """
    rates = {(each.trace, each.capacity, each.policy): each.token_hit_rate for each in replays}
    found: list[dict[str, Any]] = []
    for each in replays:
        lru = rates.get((each.trace, each.capacity, "lru"))
        best = rates.get((each.trace, each.capacity, OPTIMUM))
        closed = None
        if lru is not None and best is not None and best > lru:
            closed = (each.token_hit_rate - lru) / (best - lru)
        found.append(
            {
                "trace": each.trace,
                "policy": each.policy,
                "capacity_blocks": each.capacity,
                "capacity_share": each.capacity / each.unique_blocks if each.unique_blocks else None,
                "requests": len(each.series),
                "prompt_tokens": each.prompt_tokens,
                "hit_tokens": each.hit_tokens,
                "token_hit_rate": each.token_hit_rate,
                "block_hit_rate": each.block_hit_rate,
                "gap_closed": closed,
                "hits_by_kind": each.hits_by_kind,
                "evictions": each.evictions,
                "seconds": each.seconds,
                "microseconds_per_eviction": 1e6 * each.evicting / each.evictions if each.evictions else None,
            }
        )
    return found
