"""The policy `ostinato`: what it learns of reuse, that it evicts by that, and when it goes by a simpler rule."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.gdsf import GDSF
from ostinato.cache.policy.gittins import Gittins
from ostinato.cache.policy.lru import LRU
from ostinato.cache.policy.ostinato import Ostinato
from ostinato.cache.policy.reuse import APPLICATIONS, KNOWN, RECENT, Past, Reuse
from ostinato.cache.policy.run import Run
from ostinato.cache.policy.shadow import Shadow
from ostinato.cache.policy.survival import age_bin
from ostinato.cache.policy.window import COVER, WATCHED, Window
from ostinato.cache.use import TokenType, Use
from ostinato.lab.replay import Cache, replay
from ostinato.lab.trace import TraceRequest
from ostinato.lab.workload import mixed


def key(number: int) -> bytes:
    return number.to_bytes(8, "little")


class Watcher:
    """Tells `reuse` of uses as the policy does, block by block."""

    def __init__(self, blocks: int = 1) -> None:
        self.reuse = Reuse(blocks)
        self.pasts: dict[int, Past] = {}

    def use(self, number: int, time: float, session: str, kind: TokenType = "user", turn: int = 1) -> None:
        use = Use(time, session, turn, begins="user")
        past = self.pasts.get(number)
        if past is None:
            past = self.pasts[number] = Past(use)
        else:
            past.add(use)
        self.reuse.window.inserted += 1
        self.reuse.add(key(number), past, *self.classes(kind, turn, past.others))

    def classes(self, kind: TokenType, turn: int = 1, others: float = 0) -> tuple[int, int]:
        return self.reuse.classes(kind, Use(0.0, "name", turn, begins="user"), others, partial=False)

    def returns(self, kind: TokenType, age: float, turn: int = 1) -> float:
        """What its session's return makes a block worth, by the last fit."""
        return self.reuse.worth[self.classes(kind, turn)[0]][age_bin(age)]

    def shared(self, kind: TokenType, age: float, others: float, known: float, turn: int = 1) -> float:
        """The same of others' use."""
        run = Run(self.classes(kind, turn, others), others, known, 0.0, 1, 0.0)
        run.bin = age_bin(age)
        return self.reuse.value(run, age) - self.returns(kind, age, turn)


def test_a_return_at_a_constant_rate_is_worth_that_rate_at_any_age() -> None:
    """Most gaps are not over when the fit is made: they count as what they are."""
    rng = random.Random(0)
    watcher = Watcher()
    events: list[tuple[float, int]] = []
    for number in range(4000):
        time = rng.uniform(0, 200)
        while time < 200:
            events.append((time, number))
            time += rng.expovariate(1 / 150)
    for time, number in sorted(events):
        watcher.use(number, time, f"session {number}")
    watcher.reuse.fit(200.0)
    for age in (0, 10, 50, 100):
        assert 0.75 / 150 < watcher.returns("user", age) < 1.35 / 150


def test_what_is_due_is_worth_more_than_what_is_fresh_or_overdue() -> None:
    rng = random.Random(1)
    watcher = Watcher()
    events = [
        (start + gap, number)
        for number in range(3000)
        for start in [rng.uniform(0, 900)]
        for gap in (0, rng.gauss(60, 4))
    ]
    for time, number in sorted(events):
        watcher.use(number, time, f"session {number}")
    watcher.reuse.fit(1000.0)
    assert watcher.returns("user", 55) > watcher.returns("user", 5) > watcher.returns("user", 200)


def test_a_class_of_few_uses_takes_after_its_like() -> None:
    rng = random.Random(2)
    watcher = Watcher()
    for number in range(2000):  # "system" comes back after a second, "document" does not
        watcher.use(number, float(number), f"{number}", "system")
        watcher.use(number, number + rng.uniform(0.5, 1.5), f"{number}", "system")
        watcher.use(100_000 + number, float(number), f"{number}", "document")
    for kind in ("system", "document"):
        watcher.classes(kind, turn=2)  # the same types in later turns: nothing was seen of them
    watcher.reuse.fit(2000.0)
    assert watcher.returns("system", 0) > 4 * watcher.returns("document", 0)
    assert watcher.returns("system", 0, turn=2) > 2 * watcher.returns("document", 0, turn=2)


def test_others_use_a_block_at_the_rate_at_which_they_did() -> None:
    """Texts of very different popularity, each use by a session of its own. The rate is the block's, not the class's."""
    rng = random.Random(6)
    watcher = Watcher(40)
    rates = {number: 2.0 ** -(number % 6) for number in range(60)}
    events = sorted(
        (time, number)
        for number, each in rates.items()
        for time in accumulate(rng.expovariate(each) for _ in range(int(400 * each)))
        if time < 400
    )
    for count, (time, number) in enumerate(events):
        watcher.use(number, time, f"session {count}", "template")
    watcher.reuse.fit(400.0)
    for rate in (1 / 4, 1 / 32):
        worth = watcher.shared("template", 0.5, 400 * rate, 400.0)
        assert 0.6 * rate < worth < 1.6 * rate
    assert watcher.returns("template", 0.5) < 0.01  # no session came twice
    # What should have come long ago is worth less.
    assert watcher.shared("template", 1500.0, 12, 400.0) < 0.7 * watcher.shared("template", 10.0, 12, 400.0)


def test_what_nobody_shares_is_not_expected_to_be_shared() -> None:
    watcher = Watcher(40)
    for number in range(1500):
        watcher.use(number, number / 10, f"{number}", "user")
        watcher.use(10_000 + number % 30, number / 10, f"{number}", "system")
    watcher.reuse.fit(150.0)
    assert watcher.shared("user", 1.0, 0, 0.0) < 0.02 * watcher.shared("system", 1.0, 0, 0.0)


def test_the_older_half_of_many_uses_is_forgotten() -> None:
    past = Past(Use(0.0, "0"))
    for number in range(1, 401):
        past.add(Use(float(number), f"{number}"))
        assert past.others <= RECENT
        assert abs(past.others / past.known - 1) < 0.3
    past.add(Use(500.0, "400"))  # the same session as before is no other
    assert past.others <= RECENT


def test_replies_are_of_their_application() -> None:
    """What two applications do with replies differs: one sends them back, one does not."""
    reuse = Reuse(100)
    for number in range(KNOWN):
        for starts in (b"one", b"other"):
            reuse.arrive(Use(float(number), f"{starts!r} {number}", begins="system", starts=starts))

    def classes(kind: TokenType, starts: bytes) -> tuple[int, int]:
        return reuse.classes(kind, Use(0.0, "x", begins="system", starts=starts), 0, partial=False)

    assert classes("decode", b"one") != classes("decode", b"other")
    assert classes("decode", b"rare") not in (classes("decode", b"one"), classes("decode", b"other"))
    assert classes("user", b"one") == classes("user", b"other")
    for number in range(4 * APPLICATIONS):  # numbers are given again, the one used last stays
        reuse.arrive(Use(10.0, "again", 2, starts=b"one"))
        for _ in range(KNOWN):
            reuse.arrive(Use(10.0, "", starts=key(number)))
    numbers = {classes("decode", key(number))[0] for number in range(4 * APPLICATIONS)}
    assert len(numbers) == APPLICATIONS
    assert classes("decode", b"one")[0] not in numbers - {classes("decode", b"rare")[0]}


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
        runs = {block: policy._runs.get(block) for block in leaves}
        least = min(run.worth for run in runs.values() if run is not None)
        stays = runs[victim]
        assert stays is not None
        assert stays.worth == least
        assert None not in runs.values()
        assert np.isfinite(least) or step < 300


def test_a_request_of_many_blocks_counts_as_one() -> None:
    """Nothing of a thousand blocks of one request came back yet: that says little of their class."""
    worth: list[float] = []
    for blocks in (1, 1000):
        watcher = Watcher()
        for number in range(200):
            watcher.use(number, float(number), f"{number}", "system")
            watcher.use(number, number + 0.5, f"{number}", "system")
        for number in range(blocks):
            watcher.use(10_000 + number, 200.0, "last", "document")
        watcher.reuse.fit(300.0)
        worth.append(watcher.returns("document", 0))
    assert abs(np.log2(worth[0] / worth[1])) <= 3


def test_the_window_covers_many_turnovers_of_the_cache() -> None:
    window = Window(1000)
    for number in range(12 * WATCHED):
        window.inserted += number % 3 == 0
        window.add(key(number), float(number), f"{number}", number % 5, number % 7, number / 2, number / 4)
    watched = sorted(window._start[at] for at in window._latest.values())
    assert watched[-1] - watched[0] >= 3 * COVER * 1000
    assert WATCHED // 2 <= len(watched) <= WATCHED
    for name, at in window._latest.items():
        number = int(window._start[at])
        assert window._key[at] == name == key(number)
        assert (window._session[at], window._returning[at], window._sharing[at]) == (
            f"{number}",
            number % 5,
            number % 7,
        )
        assert (window._odds[at], window._known[at]) == (number / 2, number / 4)


def test_a_window_knows_when_and_by_whom_a_key_was_used_next() -> None:
    window = Window(1000)
    window.add(b"a", 1.0, "x", 0, 0, 0.5, 0.0)
    window.add(b"b", 2.0, "x", 0, 0, 0.5, 0.0)
    window.add(b"a", 4.0, "x", 0, 0, 0.5, 0.0)
    window.add(b"b", 7.0, "y", 0, 0, 0.5, 0.0)
    seen = window.watched()
    assert seen.gap.tolist() == [3.0, 5.0, float("inf"), float("inf")]
    assert seen.same.tolist() == [True, False, False, False]


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
