"""The benchmark of eviction policies: the policy that is told how a workload is made, and those told at a shift."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from ostinato.cache.policy.arc import ARC
from ostinato.cache.policy.ostinato import Ostinato
from ostinato.cache.policy.reuse import Reuse
from ostinato.lab.replay import replay
from ostinato.lab.workload import mixed


@pytest.fixture
def informed(import_benchmark: Callable[[str], Any]) -> Any:
    return import_benchmark("informed")


@pytest.fixture
def shift(import_benchmark: Callable[[str], Any]) -> Any:
    return import_benchmark("shift")


def test_naming_the_sessions_changes_nothing_of_the_requests() -> None:
    some, every = mixed(3, 300, "balanced"), mixed(3, 300, "balanced", named=1.0)
    assert [(each.time, each.keys, each.reply_keys) for each in some.requests] == [
        (each.time, each.keys, each.reply_keys) for each in every.requests
    ]


def test_the_worth_of_waiting_for_a_session(informed: Any) -> None:
    """Against the definition, on a grid of its own: the best of returns per second held, over all times to wait."""
    table = informed.worth([(0.8, (3.6, 1.0))])
    for age in (0.0, 20.0, 200.0):
        at = max(place for place, each in enumerate(informed.AGES) if each <= age)
        begin = float(informed.AGES[at])

        def stays(time: float) -> float:
            return 1 - 0.8 * 0.5 * math.erfc(-(math.log(max(time, 1e-9)) - 3.6) / math.sqrt(2))

        held, best, step = 0.0, 0.0, 0.05
        for number in range(1, 12_000):
            time = begin + number * step
            held += step * (stays(time) + stays(time - step)) / 2
            best = max(best, (stays(begin) - stays(time)) / held)
        assert table[at] == pytest.approx(best, rel=0.05)


def test_who_knows_how_the_workload_is_made_is_ahead(informed: Any) -> None:
    trace = mixed(1, 1_200, "balanced", named=1.0)
    blocks = round(0.025 * trace.unique_blocks)
    told, arc = replay(trace, informed.Informed(trace), blocks), replay(trace, ARC(blocks), blocks)
    assert told.token_hit_rate > arc.token_hit_rate + 0.03


def test_what_is_told_at_the_shift_is_what_is_known_then(shift: Any) -> None:
    trace = mixed(1, 600, "shift")
    blocks = round(0.025 * trace.unique_blocks)
    first = Ostinato(blocks)
    plain = replay(trace, first, blocks)
    told = Ostinato(blocks)
    shift.before(told, 300, lambda: shift.know(told.reuse, first.reuse))
    again = replay(trace, told, blocks)
    assert again.series[:300] == plain.series[:300], "up to the shift it knows no more"
    assert again.series[300:] != plain.series[300:]
    for name, number in first.reuse.returning.items():
        if number < len(first.reuse.worth):
            assert told.reuse.worth[told.reuse.returning[name]] == first.reuse.worth[number]


def test_knowledge_goes_by_the_class_not_by_its_number(shift: Any) -> None:
    from ostinato.cache.use import Use

    here, there = Reuse(10), Reuse(10)
    for reuse, kinds in ((here, ("user", "system")), (there, ("system", "user", "tool"))):
        for kind in kinds:
            reuse.classes(kind, Use(0.0, "x"), 0, partial=False)
    there.worth, there.ratio = [[1.0], [2.0], [3.0]], [[4.0], [5.0], [6.0]]
    shift.know(here, there)
    assert here.worth == [[2.0], [1.0], [3.0]]
    assert here.ratio == [[5.0], [4.0], [6.0]]


def test_when_a_policy_has_caught_up(shift: Any) -> None:
    told = [0.5] * 8
    assert shift.caught_up([0.1, 0.1, 0.1, 0.1, 0.4, 0.49, 0.47, 0.5], told, 4) == "300"
    assert shift.caught_up([0.1, 0.1, 0.1, 0.1, 0.49, 0.49, 0.5, 0.7], told, 4) == "0"
