"""SAECache: which queue a block goes to, the order of priorities, and what is learned, each within its bounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.block import Block
from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.saecache import (
    PARTS,
    ROLES,
    SCARCE,
    Place,
    PositionStatistics,
    QueueStatistics,
    Role,
    SAECache,
    TypeStatistics,
)
from ostinato.cache.use import TokenType, Use
from ostinato.lab.replay import Cache, replay
from ostinato.lab.trace import TraceRequest
from ostinato.lab.workload import mixed

# Routing.

FIRST = Use(0.0, "#1")
CHAT = replace(FIRST, turn=2, templated=True)


@pytest.mark.parametrize(
    ("kind", "use", "role"),
    [
        ("decode", replace(CHAT, agentic=True), "evict-first"),
        ("decode", replace(FIRST, returns=0.9), "evict-first"),
        ("user", FIRST, "evict-first"),
        ("document", replace(FIRST, templated=True), "structural"),
        ("user", replace(FIRST, templated=True), "structural"),
        ("system", CHAT, "chat"),
        ("user", replace(CHAT, templated=False), "chat"),
        ("tools", replace(CHAT, agentic=True), "agentic"),
        ("user", replace(FIRST, returns=0.5), "chat"),
        ("user", replace(FIRST, returns=0.5, agentic=True), "agentic"),
        ("user", replace(FIRST, returns=0.49), "evict-first"),
        ("user", replace(FIRST, returns=0.49, templated=True), "structural"),
        ("user", replace(FIRST, returns=0.49, templated=True, agentic=True), "structural"),
        ("user", replace(CHAT, returns=0.1), "chat"),
    ],
)
def test_blocks_go_to_the_queue_of_their_request(kind: TokenType, use: Use, role: Role) -> None:
    assert SAECache(100).role(Block(0, kind=kind, use=use)) == role


def test_without_a_prediction_first_turns_go_as_such_went_before() -> None:
    policy = SAECache(100)
    for number in range(40):
        policy.arrive(Use(float(number), f"named-{number}", 1))
        policy.arrive(Use(float(number), f"named-{number}", 2))
        policy.arrive(Use(float(number), f"#{number}", 1))
    named, nameless = Use(50.0, "named-50"), Use(50.0, "#50")
    assert policy.role(Block(0, kind="user", use=named)) == "chat"
    assert policy.role(Block(0, kind="user", use=nameless)) == "evict-first"
    assert policy.role(Block(0, kind="user", use=replace(named, returns=0.1))) == "evict-first"
    assert (
        policy.role(Block(0, kind="tools", use=replace(named, agentic=True, templated=True))) == "structural"
    )


# Priorities.


def priority(policy: SAECache, block: Block) -> float:
    return policy.priority(block, policy._of[block])


@pytest.mark.parametrize(
    ("kind", "use"),
    [
        ("decode", FIRST),
        ("user", replace(FIRST, templated=True)),
        ("assistant", CHAT),
        ("tool", replace(CHAT, agentic=True)),
    ],
)
def test_priorities_fall_with_idle_time(kind: TokenType, use: Use) -> None:
    policy = SAECache(100)
    block = Block(0, users=0, key=b"a", kind=kind, size=16, offset=16, use=use)
    policy.insert(block)
    policy.release(block)
    found: list[float] = []
    for time in (0.0, 0.5, 3.0, 20.0, 300.0, 9_000.0, 1e6):
        policy.arrive(Use(time))
        found.append(priority(policy, block))
    assert all(before > after > 0 for before, after in pairwise(found))


KINDS: tuple[TokenType, ...] = ("system", "user", "assistant", "tool", "document")
EVENT = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=5),  # path: the block at each depth
    st.integers(0, 1),  # blocks of the reply
    st.sampled_from([0.25, 1.0, 40.0, 600.0]),  # seconds since the event before
    st.sampled_from(["", "a", "b", "c"]),
    st.booleans(),
    st.booleans(),
)


def request_of(time: float, event: Any) -> TraceRequest:
    path, reply, _, session, agentic, templated = event
    keys = tuple(bytes(path[: end + 1]) for end in range(len(path)))
    return TraceRequest(
        time,
        keys,
        16 * len(keys),
        tuple(KINDS[(sum(key) + len(key)) % len(KINDS)] for key in keys),
        tuple(bytes([*path, 9])[: len(path) + 1] for _ in range(reply)),
        session,
        agentic=agentic,
        templated=templated,
    )


def leaves(cache: Cache) -> list[Block]:
    return [block for block in cache.store.blocks.values() if not block.users and not block.children]


def after_each(events: list[Any], capacity: int) -> Iterator[tuple[Cache, SAECache, Block]]:
    """The cache, its policy and the next victim, once each event has been served."""
    policy = SAECache(capacity)
    cache, time = Cache(policy, capacity, 16), 0.0
    for event in events:
        time += event[2]
        cache.ask(request_of(time, event))
        policy.arrive(Use(time + 0.125))
        victim = policy.victim()
        assert victim is not None
        yield cache, policy, victim


@settings(max_examples=80, deadline=None)
@given(
    events=st.lists(
        EVENT.map(lambda event: ([event[0][0] * 3 + len(event[0])], *event[1:])), min_size=1, max_size=80
    ),
    capacity=st.sampled_from([4, 9, 20]),
)
def test_the_victim_is_the_block_of_the_lowest_priority(events: list[Any], capacity: int) -> None:
    """Of all leaves, where a prompt is one block and at most one of a reply behind it."""
    for cache, policy, victim in after_each(events, capacity):
        lowest = min(priority(policy, leaf) for leaf in leaves(cache))
        assert priority(policy, victim) <= lowest * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(events=st.lists(EVENT, min_size=1, max_size=80), capacity=st.sampled_from([4, 9, 20]))
def test_the_victim_of_chains_is_the_lowest_head_of_a_queue(events: list[Any], capacity: int) -> None:
    for cache, policy, victim in after_each(events, capacity):
        assert victim in leaves(cache)
        heads = [head for place in {*policy._of.values()} if (head := place.queue.first()) is not None]
        assert priority(policy, victim) <= min(priority(policy, head) for head in heads) * (1 + 1e-9)


# What is learned.

COUNT = st.integers(0, 500)


@settings(max_examples=80, deadline=None)
@given(found=COUNT, made=COUNT, evicted=COUNT, missed=COUNT, weight=st.floats(0.1, 5.0))
def test_token_weights_move_toward_what_reuse_says(
    found: int, made: int, evicted: int, missed: int, weight: float
) -> None:
    policy = SAECache(100)
    policy.types["user"] = each = TypeStatistics(weight, found, made, evicted, missed)
    policy._adapt_weights()
    if found + made + evicted < 16:
        assert each.weight == weight
        return
    target = 1 + 5 * min(missed / max(evicted, 1), 1) + 2 * found / max(found + made, 1)
    target = min(max(target, 0.1), 5.0)
    assert 0.1 <= each.weight <= 5.0
    assert abs(each.weight - target) == pytest.approx(0.8 * abs(weight - target))


def test_what_is_missed_after_its_eviction_weighs_more() -> None:
    """Two documents that take turns, and no room for both, among one-shot prompts."""
    policy = SAECache(8)
    cache = Cache(policy, 8, 16)
    for number in range(600):
        name = f"{number}" if number % 3 == 2 else "ab"[number % 3]
        kind: TokenType = "user" if number % 3 == 2 else "document"
        keys = tuple(f"{name}/{depth}".encode() for depth in range(6))
        cache.ask(TraceRequest(float(number), keys, 96, (kind,) * 6))
    assert policy.types["document"].weight > 3 > 1.5 > policy.types["user"].weight


@settings(max_examples=60, deadline=None)
@given(
    queues=st.lists(
        st.tuples(st.integers(0, 10**9), st.sampled_from([0.0, 1e-9, 0.3, 50.0, 1e9])), min_size=4, max_size=4
    ),
    alpha=st.floats(0.1, 3.0),
)
def test_alphas_stay_in_bounds(queues: list[tuple[int, float]], alpha: float) -> None:
    policy = SAECache(100)
    for role, (hits, seconds) in zip(ROLES, queues, strict=True):
        policy.queues[role] = QueueStatistics(alpha, hit_tokens=hits, block_seconds=seconds)
    for _ in range(30):
        policy._adapt_queues()
        assert all(0.1 - 1e-9 <= each.alpha <= 3.0 + 1e-9 for each in policy.queues.values())


def test_the_queue_that_yields_most_weighs_most() -> None:
    policy = SAECache(100)
    for _ in range(20):
        for role, hits in zip(ROLES, (0, 100, 300, 900), strict=True):
            policy.queues[role].hit_tokens, policy.queues[role].block_seconds = hits, 10.0
        policy._adapt_queues()
    alphas = [policy.queues[role].alpha for role in ROLES]
    assert alphas == sorted(alphas)
    assert alphas[0] == pytest.approx(0.1, abs=0.01)
    assert alphas[3] == pytest.approx(3.0, abs=0.01)


def gamma(hits: range) -> float:
    position = PositionStatistics()
    for _ in range(30):
        for offset in range(0, 1600, 16):
            position.add(offset, found=False)
            if offset // 16 in hits:
                position.add(offset, found=True)
        position.learn()
    assert 0.1 <= position.gamma <= 8.0
    return position.gamma


def test_hits_at_the_front_make_the_decay_steep() -> None:
    front, half, even = gamma(range(15)), gamma(range(50)), gamma(range(100))
    assert front < half < even


@pytest.mark.parametrize("mix", ["chat", "agentic", "templated", "shift"])
def test_everything_stays_in_bounds(mix: str) -> None:
    policy = SAECache(400)
    replay(mixed(3, 500, mix), policy, 400)
    assert all(0.1 <= each.weight <= 5 for each in policy.types.values())
    assert all(0.1 <= each.alpha <= 3 for each in policy.queues.values())
    assert 0.1 <= policy.position.gamma <= 8
    assert all(math.isfinite(gaps.mu) and 0.1 <= gaps.sigma <= 3 for gaps in policy.gaps.values())
    assert 0 <= policy.found_share <= 1


@pytest.mark.parametrize("part", sorted(PARTS))
def test_a_part_that_is_off_says_nothing(part: str) -> None:
    trace = mixed(3, 400, "chat")
    unique = trace.unique_blocks // 40
    whole = replay(trace, SAECache(unique), unique)
    without = replay(trace, SAECache(unique, use=PARTS - {part}), unique)  # type: ignore[arg-type]
    assert without.hit_tokens != whole.hit_tokens
    assert 0.5 < without.hit_tokens / whole.hit_tokens < 2


# Traffic that never comes back.


def test_one_shot_traffic_goes_as_under_lru() -> None:
    trace = mixed(1, 1_200, "one-shot")
    for share in (0.01, 0.05):
        blocks = round(share * trace.unique_blocks)
        policy = SAECache(blocks)
        ours, lru = replay(trace, policy, blocks), replay(trace, LRU(), blocks)
        assert policy.found_share < SCARCE
        assert ours.token_hit_rate > lru.token_hit_rate - 0.001


def test_where_little_is_found_the_oldest_goes() -> None:
    trace = mixed(1, 500, "one-shot")
    policy = SAECache(600)
    cache = Cache(policy, 600, trace.block_size)
    for request in trace.requests:
        cache.ask(request)
    assert policy.found_share < SCARCE
    policy.arrive(Use(trace.requests[-1].time + 1))
    while (victim := policy.victim()) is not None:
        assert victim.use.time == min(block.use.time for block in leaves(cache))
        cache.store.remove(victim, evicted=True)
    assert not cache.store.blocks


# Without learning.


def test_unicache_learns_nothing() -> None:
    if "unicache" not in POLICIES:
        pytest.skip("there is no policy of that name")
    policy, new = POLICIES["unicache"](300), POLICIES["unicache"](300)
    assert isinstance(policy, SAECache)
    assert isinstance(new, SAECache)
    replay(mixed(2, 400, "shift"), policy, 300)
    for kind, each in new.types.items():
        assert policy.types[kind].weight == each.weight
    assert all(each.alpha == 1.0 for each in policy.queues.values())
    assert policy.position.gamma == new.position.gamma
    # However little is found, types and queues go on counting.
    policy.found_share = 0.0
    block = Block(0, key=b"k", kind="system", size=16, use=Use(policy._now, templated=True))
    other = Block(1, key=b"o", kind="decode", size=16, use=Use(policy._now, templated=True))
    place, behind = Place("structural", "system"), Place("structural", "decode")
    assert policy.priority(block, place) > policy.priority(other, behind)
    for name, gaps in policy.gaps.items():
        assert (gaps.mu, gaps.sigma) == (new.gaps[name].mu, new.gaps[name].sigma)
