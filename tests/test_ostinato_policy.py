"""The policy `ostinato`: what it learns of reuse, that it evicts by that, and when it goes by a simpler rule."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.gdsf import GDSF
from ostinato.cache.policy.gittins import Gittins
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.ostinato import Ostinato
from ostinato.cache.policy.reuse import COVER, STEPS, WATCHED, Reuse, Traits, age_bin
from ostinato.cache.policy.shadow import Shadow
from ostinato.cache.use import TokenType, Use
from ostinato.lab.replay import Cache, replay
from ostinato.lab.trace import TraceRequest
from ostinato.lab.workload import mixed


def traits(kind: TokenType) -> Traits:
    return Traits(kind, False, "user", 1, False, -1, 1, 1, False)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def fitted(reuse: Reuse, names: list[Traits], now: float) -> NDArray[np.float64]:
    assert [reuse.number(name) for name in names] == list(range(len(names)))
    reuse.fit(now)
    return reuse.worth


def rate(steps: float) -> float:
    return 2 ** (steps / STEPS)


def test_reuse_at_a_constant_rate_is_worth_that_rate_at_any_age() -> None:
    """Most gaps are not over when the fit is made: they count as what they are."""
    rng = random.Random(0)
    reuse = Reuse(1)
    events: list[tuple[float, int]] = []
    for number in range(4000):
        time = rng.uniform(0, 200)
        while time < 200:
            events.append((time, number))
            time += rng.expovariate(1 / 150)
    for time, number in sorted(events):
        reuse.add(key(number), 0, time)
    worth = fitted(reuse, [traits("user")], 200.0)[0]
    for age in (0, 10, 50, 100):
        assert 0.75 / 150 < rate(worth[age_bin(age)]) < 1.35 / 150


def test_what_is_due_is_worth_more_than_what_is_fresh_or_overdue() -> None:
    rng = random.Random(1)
    reuse = Reuse(1)
    events = [
        (start + gap, number)
        for number in range(3000)
        for start in [rng.uniform(0, 900)]
        for gap in (0, rng.gauss(60, 4))
    ]
    for time, number in sorted(events):
        reuse.add(key(number), 0, time)
    worth = fitted(reuse, [traits("user")], 1000.0)[0]
    assert worth[age_bin(55)] > worth[age_bin(5)] > worth[age_bin(200)]


def test_a_class_of_few_uses_takes_after_its_like() -> None:
    rng = random.Random(2)
    reuse = Reuse(1)
    for number in range(2000):  # "system" comes back after a second, "document" does not
        reuse.add(key(number), 0, float(number))
        reuse.add(key(number), 0, number + rng.uniform(0.5, 1.5))
        reuse.add(key(100_000 + number), 1, float(number))
    # The same types of blocks in agents' sessions: nothing was seen of them.
    names = [
        traits("system"),
        traits("document"),
        *(traits(kind)._replace(turn=2) for kind in ("system", "document")),
    ]
    worth = fitted(reuse, names, 2000.0)
    assert worth[0, 0] > worth[1, 0] + 2 * STEPS
    assert worth[2, 0] > worth[3, 0] + STEPS


def test_it_learns_which_types_come_back_and_keeps_them() -> None:
    """Two kinds of requests that LRU cannot tell apart; only one of them is repeated, after more than fits."""
    rng = random.Random(3)
    repeated: list[tuple[float, int]] = [(0.2 * i + 40 * lap, i) for lap in range(40) for i in range(100)]
    once = [(rng.uniform(0, 1600), 10_000 + i) for i in range(8000)]
    hits = {name: 0 for name in ("system", "user")}
    cache = Cache(Ostinato(120), 120, 16)
    for time, number in sorted(repeated + once):
        kind: TokenType = "system" if number < 10_000 else "user"
        found = cache.ask(TraceRequest(time, (key(number),), 16, (kind,)))
        hits[kind] += len(found)
    assert hits["system"] > 0.7 * len(repeated)
    assert hits["user"] == 0


def test_the_victim_is_the_leaf_of_least_worth() -> None:
    rng = random.Random(4)
    policy = Gittins(400)
    cache = Cache(policy, 400, 16)
    kinds: tuple[TokenType, ...] = ("system", "user", "decode")
    chains = [[key(1000 * c + i) for i in range(rng.randrange(1, 9))] for c in range(200)]
    for step in range(2500):
        chain = rng.choice(chains)
        cache.ask(
            TraceRequest(
                step * 0.7, tuple(chain), 16 * len(chain), tuple(kinds[i % 3] for i in range(len(chain)))
            )
        )
        if step % 50:
            continue
        policy._sort()
        victim = policy.victim()
        assert victim is not None
        leaves = [block for block in cache.store.blocks.values() if not block.children and not block.users]
        runs = {block: policy._past[block].run for block in leaves}
        least = min(run.worth for run in runs.values() if run is not None)
        stays = runs[victim]
        assert stays is not None
        assert stays.worth == least
        assert None not in runs.values()
        assert np.isfinite(least) or step < 300


def test_a_request_of_many_blocks_counts_as_one() -> None:
    """Nothing of a thousand blocks of one request came back yet: that says little of their class."""
    alone, together = Reuse(1), Reuse(1)
    for reuse, blocks in ((alone, 1), (together, 1000)):
        for number in range(200):
            reuse.add(key(number), 0, float(number))
            reuse.add(key(number), 0, number + 0.5)
        for number in range(blocks):
            reuse.add(key(10_000 + number), 1, 200.0)
    names = [traits("system"), traits("document")]
    one, many = fitted(alone, names, 300.0)[1, 0], fitted(together, names, 300.0)[1, 0]
    assert abs(one - many) <= 3 * STEPS


def test_the_window_covers_many_turnovers_of_the_cache() -> None:
    reuse = Reuse(1000)
    for number in range(12 * WATCHED):
        reuse.inserted += number % 3 == 0
        reuse.add(key(number), 0, float(number))
    watched = sorted(reuse._start[at] for at in reuse._latest.values())
    assert watched[-1] - watched[0] >= 3 * COVER * 1000
    assert WATCHED // 2 <= len(watched) <= WATCHED
    for name, at in reuse._latest.items():
        assert reuse._key[at] == name
        assert key(int(reuse._start[at])) == name


@pytest.mark.parametrize("name", ["lru", "gdsf", "arc"])
def test_a_shadow_that_sees_all_finds_what_a_cache_finds(name: str) -> None:
    trace, blocks = mixed(1, 400, "balanced"), 500
    cache, shadow = (
        Cache(POLICIES[name](blocks), blocks, trace.block_size),
        Shadow(POLICIES[name](blocks), blocks),
    )
    for number, request in enumerate(trace.requests):
        found = sum(block.size for block in cache.ask(request))
        chain = [cache.store.blocks[key] for key in (*request.keys, *request.reply_keys)]
        use = Use(request.time, f"{number}")
        assert shadow.ask(use, chain, len(request.keys)) == found


def test_where_recency_is_all_it_goes_by_recency() -> None:
    """Sessions that go on for long and come back soon, with nothing that tells them apart."""
    rng = random.Random(5)
    lengths = [20] * 60
    requests: list[TraceRequest] = []
    for step in range(4000):
        session = min(59, int(rng.expovariate(0.08)) + step // 80 % 30)
        lengths[session] += 1
        keys = tuple(key(100_000 * session + i) for i in range(lengths[session]))
        requests.append(TraceRequest(float(step), keys, 16 * len(keys)))
    hits: dict[str, int] = {}
    for name, policy in (("ours", Ostinato(1500)), ("lru", LRU()), ("gdsf", GDSF())):
        cache = Cache(policy, 1500, 16)
        hits[name] = sum(len(cache.ask(request)) for request in requests)
    assert hits["ours"] > 0.985 * max(hits["lru"], hits["gdsf"])


def test_what_is_learned_decides_where_there_is_something_to_learn() -> None:
    trace = mixed(2, 1_500, "balanced")
    blocks = round(0.025 * trace.unique_blocks)
    policy = Ostinato(blocks)
    ours, lru = replay(trace, policy, blocks), replay(trace, LRU(), blocks)
    assert policy.rule == "learned"
    assert ours.token_hit_rate > lru.token_hit_rate + 0.03
