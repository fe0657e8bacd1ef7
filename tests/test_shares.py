"""Shares of the engine: whoever has few requests is served beside whoever has many, and nobody is starved.

Nothing here looks at a clock: what steps cost is made up, and what is counted is steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import Engine, SamplingParams
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope
from ostinato.cache.index import Index
from ostinato.cache.policy.lru import LRU
from ostinato.cache.pool import Pool
from ostinato.engine.scheduler import OVERTAKEN, Scheduler, Work
from ostinato.engine.sequence import Sequence, sequence_chains
from ostinato.engine.shares import Shares, User, fair, holdings_of
from ostinato.prompt.span import Span, plain
from server_fixtures import DEADLINE, idle, wait_until

SIZE = 4
MOST = 512
"""Tokens of a step."""


def user(org: str, name: str = "x") -> Scope:
    return Scope("user", org, name)


# -- how tokens are split ---------------------------------------------------------------------------------


def one_by_one(budget: int, demands: Mapping[str, int], served: Mapping[str, float]) -> dict[str, int]:
    """Max-min fairness as it is defined: each token to whoever of those that want one has fewest."""
    shares = dict.fromkeys(demands, 0)
    for _ in range(budget):
        wanting = [who for who in demands if shares[who] < demands[who]]
        if not wanting:
            break
        shares[min(wanting, key=lambda who: (shares[who], served[who]))] += 1
    return shares


@settings(max_examples=500, database=None)
@given(
    budget=st.integers(0, 120),
    demands=st.dictionaries(st.sampled_from("abcdefg"), st.integers(0, 40)),
    served=st.permutations(range(7)),
)
def test_nobody_gets_more_while_another_has_less(
    budget: int, demands: dict[str, int], served: list[int]
) -> None:
    had = dict(zip("abcdefg", map(float, served), strict=True))
    shares, exact = fair(budget, demands, had), one_by_one(budget, demands, had)
    assert sum(shares.values()) == min(budget, sum(demands.values()))
    assert sorted(shares.values()) == sorted(exact.values())
    for who, share in shares.items():
        assert 0 <= share <= demands[who]
        assert abs(share - exact[who]) <= 1


@given(budget=st.integers(1, 40), served=st.permutations(range(5)))
def test_the_odd_token_is_for_who_had_least(budget: int, served: list[int]) -> None:
    had = dict(zip("abcde", map(float, served), strict=True))
    assert fair(budget, dict.fromkeys("abcde", 40), had) == one_by_one(
        budget, dict.fromkeys("abcde", 40), had
    )


@given(
    held=st.dictionaries(
        st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")),
        st.tuples(st.integers(0, 64), st.integers(0, 500)),
    ),
    seats=st.integers(1, 64),
    blocks=st.integers(1, 2_000),
)
def test_organisations_have_equal_parts_and_their_users_too(
    held: dict[tuple[str, str], tuple[int, int]], seats: int, blocks: int
) -> None:
    by_user: dict[User, tuple[int, int]] = {user(*who): has for who, has in held.items()}
    holdings = holdings_of(by_user, seats, blocks)
    assert {who: (own.seats, own.blocks) for who, own in holdings.items()} == by_user
    orgs = {org for org, _ in held}
    for org in orgs:
        own = [holding for who, holding in holdings.items() if who is not None and who.org == org]
        assert len({(each.seats_part, each.blocks_part) for each in own}) == 1
        assert sum(each.blocks_part for each in own) <= blocks / len(orgs)
        assert sum(each.seats_part for each in own) <= max(seats / len(orgs), len(own))
        assert all(each.seats_part >= 1 for each in own), "everybody may have one"
    for holding in holdings.values():
        assert holding.may_have_seat == (holding.seats < holding.seats_part)
        assert holding.may_have_blocks(0) == (holding.blocks <= holding.blocks_part)
        assert holding.may_have_seat == (holding.seats_over < 1)


# -- what steps cost --------------------------------------------------------------------------------------

Cost = Callable[[int, int], float]
"""Seconds that a step takes, from the tokens of prefill and the replies in it."""
Load = tuple[str, int]
"""What a user always has to compute: so many replies, or prefill of so many tokens."""


def smooth(prefill: int, replies: int) -> float:
    """More costs more, and together is cheaper than apart."""
    return 0.03 + 0.01 * replies + 0.002 * prefill


def jump(prefill: int, replies: int) -> float:
    """Two replies in one step cost more than one in each of two."""
    return 0.002 * prefill + (0.04 if replies == 1 else 0.12 + 0.008 * replies if replies else 0.0)


def apart(prefill: int, replies: int) -> float:
    """Whatever is computed together costs far more than apart."""
    return jump(prefill, replies) + (0.3 if prefill and replies else 0.0) + (0.2 if replies > 1 else 0.0)


class World:
    """Users who always have something to compute, and the time that passes."""

    def __init__(self, cost: Cost, loads: Mapping[User, Load]) -> None:
        self.cost = cost
        self.shares = Shares()
        self.loads = dict(loads)
        self.tokens: dict[User, int] = dict.fromkeys(loads, 0)
        self.seconds = 0.0
        for who in loads:  # each has been alone, for long enough to know what that costs
            for _ in range(20):
                self.step([who])
        self.tokens, self.seconds = dict.fromkeys(loads, 0), 0.0

    def step(self, there: list[User] | None = None) -> dict[User, int]:
        """The tokens that each user has of the next step."""
        demands = {who: min(self.loads[who][1], MOST) for who in (self.loads if there is None else there)}
        split = self.shares.split(demands, MOST)
        tokens = {who: min(share, demands[who]) for who, share in split.items() if share}
        kinds = {kind: sum(n for who, n in tokens.items() if self.loads[who][0] == kind) for kind in "pr"}
        seconds = self.cost(kinds["p"], kinds["r"])
        self.shares.took(kinds["p"], kinds["r"], seconds)
        self.seconds += seconds
        for who, count in tokens.items():
            self.tokens[who] += count
        return tokens

    def run(self, seconds: float) -> None:
        while self.seconds < seconds:
            self.step()

    def part(self, who: User) -> float:
        """What a user has had done, of what it would have alone."""
        kind, count = self.loads[who]
        count = min(count, MOST)
        alone = self.cost(count, 0) if kind == "p" else self.cost(0, count)
        return self.tokens[who] / count * alone / self.seconds


ONE, HOG, LONG = ("r", 1), ("r", 128), ("p", 10**6)


@pytest.mark.parametrize("cost", [smooth, jump, apart])
@pytest.mark.parametrize("other", [ONE, HOG, LONG, ("r", 2)])
def test_two_have_half_of_the_time_each(cost: Cost, other: Load) -> None:
    small, large = user("a"), user("b")
    world = World(cost, {small: ONE, large: other})
    world.run(400.0)
    # As if each had every second second to itself, or better, but for what it costs to look whether it is.
    assert world.part(small) >= 0.44
    if cost is not jump:  # what is a little slower together is not worth turns
        assert world.part(large) >= 0.30


@pytest.mark.parametrize("cost", [smooth, jump, apart])
def test_three_have_a_third_each(cost: Cost) -> None:
    loads: dict[User, Load] = {user("a"): ONE, user("b"): HOG, user("c"): ("r", 64)}
    world = World(cost, loads)
    world.run(600.0)
    for who in loads:
        assert world.part(who) >= 0.29


def test_organisations_come_before_their_users() -> None:
    """An organisation of three users has no more than one of a single user: in turns, and together."""
    loads: dict[User, Load] = {user("a"): ONE, **{user("b", name): ONE for name in "xyz"}}
    world = World(lambda prefill, replies: apart(prefill, replies) + 2.0 * (replies > 1), loads)
    world.run(600.0)
    assert world.part(user("a")) >= 0.7 * sum(world.part(user("b", name)) for name in "xyz") > 0
    parts = [world.part(user("b", name)) for name in "xyz"]
    assert max(parts) <= 1.1 * min(parts)
    together = World(smooth, {user("a"): LONG, **{user("b", name): LONG for name in "xyz"}})
    split = together.step()
    assert split[user("a")] == MOST // 2
    assert sum(split.values()) == MOST


def test_a_newcomer_begins_where_the_others_stand() -> None:
    """Having been away saves nothing up, and whoever was alone owes nothing."""
    old, new = user("a"), user("b")
    world = World(apart, {old: ONE, new: ONE})
    for _ in range(5_000):
        world.step([old])
    turns: list[frozenset[User]] = [frozenset(world.step()) for _ in range(40)]
    for at in range(0, 40, 4):
        assert frozenset[User]().union(*turns[at : at + 4]) == {old, new}


@settings(max_examples=60, deadline=None, database=None)
@given(
    cost=st.sampled_from([smooth, jump, apart]),
    loads=st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from([ONE, ("r", 5), HOG, ("p", 70), LONG])),
        min_size=2,
        max_size=5,
    ),
    seed=st.randoms(use_true_random=False),
)
def test_nobody_starves(cost: Cost, loads: list[tuple[str, Load]], seed: Any) -> None:
    """Whoever stays is served again and again, though others come and go."""
    users: dict[User, Load] = {user(org, f"u{number}"): load for number, (org, load) in enumerate(loads)}
    world = World(cost, users)
    stays, *others = users
    waited = 0
    for _ in range(600):
        there = [stays, *(other for other in others if seed.random() < 0.7)]
        waited = 0 if world.step(there).get(stays) else waited + 1
        assert waited <= 300


def test_alone_a_step_is_as_full_as_can_be() -> None:
    world = World(smooth, {user("a"): LONG, user("b"): ONE})
    assert world.shares.split({user("a"): MOST}, MOST) == {user("a"): MOST}
    fresh = Shares()
    assert fresh.split({None: 10**6}, MOST) == {None: MOST}


# -- the scheduler ----------------------------------------------------------------------------------------


def no_move(_sources: list[int], _targets: list[int], _by: int) -> None:
    raise AssertionError("no chain here is moved")


def scheduler_of(blocks: int, *, tokens: int = MOST, seats: int = 64) -> Scheduler:
    pool = Pool(
        layers=1, kv_heads=1, head_dim=1, blocks=blocks, block_size=SIZE, dtype=torch.float64,
        device=torch.device("cpu"),
    )  # fmt: skip
    return Scheduler(Index(pool, LRU()), max_batch_tokens=tokens, max_sequences=seats, move=no_move)


def sequence_of(number: int, tokens: int, who: User = None, reply: int = 1) -> Sequence:
    """A request whose text nobody else has."""
    text = (number + 1, *range(10_000 + 1_000 * number, 10_000 + 1_000 * number + tokens - 1))
    sequence = Sequence(number, sequence_chains(plain(Span(text)), b"model", SIZE), SamplingParams(), reply)
    sequence.asker = who
    return sequence


def advance(scheduler: Scheduler) -> list[Work]:
    """A step of which every request that samples goes on with some token."""
    work = scheduler.schedule()
    sampling = [item.sequence for item in work if item.samples]
    scheduler.computed(work)
    for sequence in sampling:
        sequence.last.token_ids.append(7)
        if sequence.generated >= sequence.max_tokens:
            scheduler.finish(sequence)
    return work


@settings(max_examples=100, deadline=None, database=None)
@given(
    prompts=st.lists(st.integers(2, 60), min_size=1, max_size=10),
    tokens=st.integers(32, 64),
    late=st.integers(0, 10),
)
def test_a_single_user_has_what_it_always_had(prompts: list[int], tokens: int, late: int) -> None:
    """Every reply its token; of the rest, half is for the oldest prompt, and half for the shortest ones."""
    scheduler = scheduler_of(400, tokens=tokens)
    waiting = [sequence_of(number, count, reply=4) for number, count in enumerate(prompts)]
    for sequence in waiting[late:]:
        scheduler.add(sequence)
    for step in range(200):
        if step == 3:
            for sequence in waiting[:late]:
                scheduler.add(sequence)
        before = {s: s.remaining or len(s.last.token_ids) for s in (*scheduler.running, *scheduler.waiting)}
        order = sorted(before, key=lambda s: s.id)
        expected = dict.fromkeys((s for s in order if before[s] == 1), 1)
        prefilling = [s for s in order if before[s] > 1]
        rest = max(tokens - len(expected), SIZE)
        if prefilling:
            oldest = prefilling[0]
            part = rest if len(prefilling) == 1 else max(rest // 2, SIZE)
            chunks = {oldest: min(before[oldest], part)}
            rest -= chunks[oldest]
            for sequence in sorted(prefilling[1:], key=lambda s: before[s]):
                if rest > 0:
                    chunks[sequence] = min(before[sequence], rest)
                    rest -= chunks[sequence]
            chunks[oldest] += max(0, min(rest, before[oldest] - chunks[oldest]))
            expected |= chunks
        assert {item.sequence: item.tokens for item in advance(scheduler)} == expected
    assert not scheduler.running


def test_a_request_of_another_user_takes_a_seat_at_once() -> None:
    scheduler = scheduler_of(1_000, seats=8)
    for number in range(64):
        scheduler.add(sequence_of(number, 8, user("evil"), reply=50))
    for _ in range(5):
        advance(scheduler)
    assert len(scheduler.running) == 8
    one = sequence_of(100, 8, user("acme"), reply=3)
    scheduler.add(one)
    work = advance(scheduler)
    assert one in scheduler.running
    assert one in [item.sequence for item in work]
    assert scheduler.preemptions == 1
    # Who gave way is the youngest, and the first of its user's to go on.
    assert scheduler.waiting[0].id == 7
    more = [sequence_of(101 + number, 8, user("acme"), reply=3) for number in range(8)]
    for sequence in more:
        scheduler.add(sequence)
    advance(scheduler)
    assert sum(s.asker == user("acme") for s in scheduler.running) == 4, "half of the seats, and not more"


def test_who_holds_the_whole_pool_gives_way() -> None:
    scheduler = scheduler_of(64)
    for number in range(4):
        scheduler.add(sequence_of(number, 56, user("evil"), reply=20))
    for _ in range(3):
        advance(scheduler)
    held = sum(len(s.last.blocks) for s in scheduler.running)
    assert held >= 56
    one = sequence_of(100, 80, user("acme"))
    scheduler.add(one)
    assert one in [item.sequence for item in advance(scheduler)]
    assert scheduler.preemptions >= 1
    before = scheduler.preemptions
    two = sequence_of(101, 120, user("acme"))
    scheduler.add(two)
    advance(scheduler)
    assert two in scheduler.waiting, "it would have more than its part"
    assert scheduler.preemptions == before


def test_what_is_large_is_not_overtaken_for_ever() -> None:
    scheduler = scheduler_of(64)
    number = 0

    def small(who: str) -> Sequence:
        nonlocal number
        number += 1
        return sequence_of(number, 12, user(who), reply=6)

    for _ in range(4):
        scheduler.add(small("b"))
    advance(scheduler)
    number += 1
    large = sequence_of(number, 200, user("a"))
    scheduler.add(large)
    steps = overtaking = 0
    while large in scheduler.waiting:
        # There is always one of another user's who has little and asks for little.
        while sum(s.asker == user("b") for s in (*scheduler.waiting, *scheduler.running)) < 6:
            scheduler.add(small("b"))
        before = set(scheduler.running)
        advance(scheduler)
        overtaking += len(set(scheduler.running) - before - {large})
        steps += 1
        assert steps < 2_000
    assert large.overtaken <= OVERTAKEN
    assert overtaking <= 6 * OVERTAKEN, "six come at once where one makes it give way"
    assert large in scheduler.running or not large.remaining


# -- the engine -------------------------------------------------------------------------------------------

HOGS, NEIGHBOUR = Principal("evil", "mallory"), Principal("acme", "ann")


class Steps:
    """The work of each step of an engine, whose steps cost what is made up, and can be held up."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch, cost: Cost) -> None:
        self.work: list[dict[Sequence, int]] = []
        self._engine = engine
        self._gate = threading.Event()
        self._gate.set()
        self._held = threading.Event()
        scheduler, shares = engine.scheduler, engine.scheduler.shares
        schedule, took = scheduler.schedule, shares.took

        def watched() -> list[Work]:
            if not self._gate.is_set():
                self._held.set()
                assert self._gate.wait(DEADLINE)
                engine._read_inbox()  # pyright: ignore[reportPrivateUsage]
            work = schedule()
            self.work.append({item.sequence: item.tokens for item in work})
            return work

        def costed(prefill: int, replies: int, _: float) -> None:
            took(prefill, replies, cost(prefill, replies))

        patch.setattr(scheduler, "schedule", watched)
        patch.setattr(shares, "took", costed)

    @contextmanager
    def held(self) -> Generator[None]:
        """No step is chosen meanwhile; what is asked is there when the next one is."""
        self._held.clear()
        self._gate.clear()
        if not idle(self._engine):
            assert self._held.wait(DEADLINE)
        try:
            yield
        finally:
            self._gate.set()

    def of(self, who: Principal, since: int) -> list[int]:
        """In which steps a user has tokens, counted from one of them."""
        scope = who.scope("user")
        return [
            number
            for number, work in enumerate(self.work[since:])
            if any(sequence.asker == scope for sequence in work)
        ]


@contextmanager
def engine_of(model: Path, **options: Any) -> Generator[Engine]:
    with Engine(str(model), dtype="float32", **options) as engine:
        yield engine


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (number * 37 + at * (1 + number % 11)) % 250 for at in range(tokens)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("cost", [smooth, jump])
def test_one_request_beside_a_hundred_and_twenty_eight(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, cost: Cost
) -> None:
    with engine_of(tiny_model, kv_tokens=32_768) as engine:
        alone = engine.generate(prompt(500, 40), greedy(30), principal=NEIGHBOUR)
        expected = [engine.generate(prompt(number, 24), greedy(30)).token_ids for number in range(3)]
        steps = Steps(engine, monkeypatch, cost)
        hogs = [engine.stream(prompt(number, 24), greedy(300), principal=HOGS) for number in range(128)]
        began = [next(stream) for stream in hogs[:3]]
        wait_until(lambda: (engine.stats().running, engine.stats().waiting) == (64, 64))
        with steps.held():
            since = len(steps.work)
            one = engine.stream(prompt(500, 40), greedy(30), principal=NEIGHBOUR)
        tokens = tuple(token for chunk in one for token in chunk.token_ids)
        assert tokens == alone.token_ids, "the company that a reply has changes nothing of it"
        had = steps.of(NEIGHBOUR, since)
        assert had[0] <= 1, "it starts at once"
        # Prefill and replies may take turns, and the hog has its own; nothing like one in sixty-four.
        gaps = [later - earlier for earlier, later in pairwise(had)]
        assert max(gaps) <= 4
        assert had[-1] <= 3 * len(had)
        assert steps.of(HOGS, since), "and neither does the hog stand still"
        for number, (stream, first) in enumerate(zip(hogs[:3], began, strict=True)):
            going: list[int] = [*first.token_ids]
            while len(going) < 30:
                going += next(stream).token_ids
            assert tuple(going[:30]) == expected[number], "preempted or not"
        assert engine.stats().preemptions >= 1
        for stream in hogs:
            stream.close()
        wait_until(lambda: idle(engine))


def test_a_pool_that_is_full_of_anothers(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tiny_model, kv_tokens=2_048) as engine:
        params = greedy(40)
        alone = engine.generate(prompt(500, 300), params, principal=NEIGHBOUR).token_ids
        theirs = [engine.generate(prompt(n, 400), params).token_ids for n in range(4)]
        engine.clear_cache()
        steps = Steps(engine, monkeypatch, smooth)
        hogs = [engine.stream(prompt(n, 400), params, principal=HOGS) for n in range(4)]
        began = [next(stream) for stream in hogs]
        with steps.held():
            assert engine.stats().slots_used > 1_600
            since = len(steps.work)
            one = engine.stream(prompt(500, 300), params, principal=NEIGHBOUR)
        assert tuple(token for chunk in one for token in chunk.token_ids) == alone
        assert steps.of(NEIGHBOUR, since)[0] <= 1
        assert engine.stats().preemptions >= 1
        for first, stream, expected in zip(began, hogs, theirs, strict=True):
            rest = tuple(token for chunk in stream for token in chunk.token_ids)
            assert (*first.token_ids, *rest) == expected
        wait_until(lambda: idle(engine))


def test_whoever_waits_longest_of_many_users_is_served(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More users than seats: all are answered, and no one's second before the first of any."""
    with engine_of(tiny_model, kv_tokens=4_096, max_sequences=4) as engine:
        steps = Steps(engine, monkeypatch, smooth)
        params = greedy(3)
        with steps.held():
            many = [engine.stream(prompt(n, 20), params, principal=HOGS) for n in range(20)]
            others = [
                engine.stream(prompt(100 + n, 20), params, principal=Principal("acme", f"user {n}"))
                for n in range(12)
            ]
        for stream in (*others, *many):
            assert sum(len(chunk.token_ids) for chunk in stream) == 3
        last = max(max(steps.of(Principal("acme", f"user {n}"), 0)) for n in range(12))
        assert max(steps.of(HOGS, 0)) > last, "the hog is the last to be done"
