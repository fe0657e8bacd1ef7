"""The fit of pauses between turns, on sessions that are made up, of which not all are seen to their end."""

from __future__ import annotations

import math
import random
import statistics
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.cache.policy.turn_gaps import REFIT, TurnGaps, tail

MU, SIGMA, ENDS = math.log(60), 1.25, 0.2
WINDOW = 650.0
"""Seconds that are seen: few times the median gap."""


def turns(seed: int, sessions: int, window: float = WINDOW) -> list[tuple[float, str]]:
    """Turns up to the end of the window, in order of time; each is a session's last with probability `ENDS`."""
    choose = random.Random(seed)
    found: list[tuple[float, str]] = []
    for number in range(sessions):
        time = choose.uniform(0, window)
        while time < window:
            found.append((time, f"session-{number}"))
            if choose.random() < ENDS:
                break
            time += choose.lognormvariate(MU, SIGMA)
    return sorted(found)


def fitted(events: list[tuple[float, str]], mu: float = MU - 1, sigma: float = 1.0) -> TurnGaps:
    gaps = TurnGaps(mu, sigma)
    for time, session in events:
        gaps.turn(session, time)
    return gaps


def logs_of_ended_gaps(events: list[tuple[float, str]]) -> list[float]:
    times: dict[str, list[float]] = {}
    for time, session in events:
        times.setdefault(session, []).append(time)
    return [math.log(after - before) for each in times.values() for before, after in pairwise(each)]


def test_open_gaps_count() -> None:
    """docs/eviction.md has these figures."""
    naive_mus: list[float] = []
    naive_sigmas: list[float] = []
    fits: list[TurnGaps] = []
    for seed in range(5):
        events = turns(seed, 2_900)
        ended = logs_of_ended_gaps(events)
        naive_mus.append(statistics.fmean(ended))
        naive_sigmas.append(statistics.pstdev(ended))
        gaps = fitted(events)
        assert naive_sigmas[-1] < SIGMA - 0.1
        assert naive_mus[-1] < MU - 0.25
        assert gaps.sigma == pytest.approx(SIGMA, abs=0.06)
        assert gaps.mu == pytest.approx(MU, abs=0.06)
        assert gaps.returning == pytest.approx(1 - ENDS, abs=0.03)
        fits.append(gaps)
    assert round(statistics.fmean(naive_sigmas), 2) == 1.08
    assert round(math.exp(statistics.fmean(naive_mus))) == 42
    assert statistics.fmean(gaps.sigma for gaps in fits) == pytest.approx(1.26, abs=0.01)
    assert math.exp(statistics.fmean(gaps.mu for gaps in fits)) == pytest.approx(60, abs=1)


def test_a_longer_look_changes_little() -> None:
    gaps = fitted(turns(1, 1_200, window=20_000.0))
    assert gaps.sigma == pytest.approx(SIGMA, abs=0.06)
    assert gaps.mu == pytest.approx(MU, abs=0.06)


def test_survival_is_of_the_fitted_distribution() -> None:
    gaps = TurnGaps(MU, SIGMA)
    assert gaps.survival(60) == pytest.approx(0.5)
    assert gaps.survival(60 * math.exp(1.645 * SIGMA)) == pytest.approx(0.05, abs=1e-3)
    assert gaps.survival(0.0) == pytest.approx(1.0)
    assert tail(-1.0) + tail(1.0) == pytest.approx(1.0)


def test_few_gaps_are_no_reason_to_change() -> None:
    gaps = fitted([(float(time), f"s{time % 3}") for time in range(9)], mu=3.0, sigma=0.7)
    assert (gaps.mu, gaps.sigma) == (3.0, 0.7)
    assert not gaps.turn("s0", 9.0)


def test_a_fit_now_and_then() -> None:
    gaps = TurnGaps(MU, 1.0)
    fits = sum(gaps.turn(session, time) for time, session in turns(2, 1_000))
    assert 5 < fits < 40
    assert fits >= sum(1 for _ in turns(2, 1_000)) // REFIT


def test_a_single_session() -> None:
    """Pauses of 30 seconds, each: nothing is open but the last."""
    gaps = fitted([(30.0 * turn, "one") for turn in range(200)])
    assert gaps.mu == pytest.approx(math.log(30), abs=0.05)
    assert gaps.sigma == pytest.approx(0.1, abs=0.05)  # as small as it may be
    assert gaps.returning > 0.9
    finite(gaps)


def test_turns_at_one_time() -> None:
    gaps = fitted([(5.0, f"s{number % 7}") for number in range(500)])
    finite(gaps)
    assert gaps.survival(1.0) < 0.01


def test_sessions_that_never_come_back() -> None:
    gaps = fitted([(float(number), f"s{number}") for number in range(1_000)])
    assert (gaps.mu, gaps.sigma) == (MU - 1, 1.0)


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(
        st.tuples(st.sampled_from([0.0, 1e-9, 0.5, 30.0, 1e4, 1e9]), st.integers(0, 12)), max_size=400
    )
)
def test_never_not_a_number(events: list[tuple[float, int]]) -> None:
    gaps, time = TurnGaps(MU, 1.0), 0.0
    for wait, session in events:
        time += wait
        gaps.turn(f"s{session}", time)
        finite(gaps)


def finite(gaps: TurnGaps) -> None:
    assert math.isfinite(gaps.mu)
    assert gaps.sigma * 1.000001 >= 0.1
    assert gaps.sigma <= 3
    assert 0 <= gaps.returning < 1
    for elapsed in (0.0, 1.0, 1e3, 1e12):
        assert 0 <= gaps.survival(elapsed) <= 1
