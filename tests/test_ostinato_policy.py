"""The policy `ostinato`: what it learns of reuse, and that it evicts by that."""

from __future__ import annotations

import random

import numpy as np

from ostinato.cache.policy.ostinato import STEPS, Ostinato, Traits, Uses, age_bin
from ostinato.cache.use import TokenType
from ostinato.lab.replay import Cache
from ostinato.lab.trace import TraceRequest


def traits(kind: TokenType) -> Traits:
    return Traits(kind, False, "user", 1, False, 1, False, -1)


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


def rate(steps: float) -> float:
    return 2 ** (steps / STEPS)


def test_reuse_at_a_constant_rate_is_worth_that_rate_at_any_age() -> None:
    """Most gaps are not over when the fit is made: they count as what they are."""
    rng = random.Random(0)
    uses = Uses(1)
    events: list[tuple[float, int]] = []
    for number in range(4000):
        time = rng.uniform(0, 200)
        while time < 200:
            events.append((time, number))
            time += rng.expovariate(1 / 150)
    for time, number in sorted(events):
        uses.add(key(number), 0, time)
    worth = uses.worth([traits("user")], 200.0)[0]
    for age in (0, 10, 50, 100):
        assert 0.75 / 150 < rate(worth[age_bin(age)]) < 1.35 / 150


def test_what_is_due_is_worth_more_than_what_is_fresh_or_overdue() -> None:
    rng = random.Random(1)
    uses = Uses(1)
    events = [
        (start + gap, number)
        for number in range(3000)
        for start in [rng.uniform(0, 900)]
        for gap in (0, rng.gauss(60, 4))
    ]
    for time, number in sorted(events):
        uses.add(key(number), 0, time)
    worth = uses.worth([traits("user")], 1000.0)[0]
    assert worth[age_bin(55)] > worth[age_bin(5)] > worth[age_bin(200)]


def test_a_class_of_few_uses_takes_after_its_like() -> None:
    rng = random.Random(2)
    uses = Uses(1)
    for number in range(2000):  # "system" comes back after a second, "document" does not
        uses.add(key(number), 0, float(number))
        uses.add(key(number), 0, number + rng.uniform(0.5, 1.5))
        uses.add(key(100_000 + number), 1, float(number))
    # The same types of blocks in agents' sessions: nothing was seen of them.
    names = [
        traits("system"),
        traits("document"),
        *(traits(kind)._replace(turn=2) for kind in ("system", "document")),
    ]
    worth = uses.worth(names, 2000.0)
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
    policy = Ostinato(400)
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
        least = min(policy._of[block].worth for block in leaves)
        assert policy._of[victim].worth == least
        assert np.isfinite(least) or step < 300
