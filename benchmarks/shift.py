"""A shift of the traffic: how soon a policy does as well as one that knows the new traffic already."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence

from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ostinato import Ostinato
from ostinato.cache.policy.reuse import Reuse
from ostinato.cache.policy.saecache import SAECache
from ostinato.cache.use import Use
from ostinato.lab.replay import Replay, replay
from ostinato.lab.trace import Trace

WINDOW = 100
"""Requests of a point."""
BACK = 0.02
TOLD = "-told"
"""Behind the name of a policy that is told at the shift what it would have learned by the end."""

Pairs = Sequence[Sequence[int]]
"""Prompt tokens and hit tokens of each request."""


def before(policy: Policy, at: int, tell: Callable[[], None]) -> None:
    """Have `tell` called before request number `at` comes in."""
    arrive, requests = policy.arrive, itertools.count()

    def watched(use: Use) -> None:
        if next(requests) == at:
            tell()
        arrive(use)

    policy.arrive = watched


def adopt(policy: SAECache, wise: SAECache) -> None:
    """Give `policy` the parameters of `wise`, from which it goes on learning."""
    policy.types = wise.types
    policy.position.gamma = wise.position.gamma
    for role, each in policy.queues.items():
        each.alpha = wise.queues[role].alpha
    for role, gaps in policy.gaps.items():
        other = wise.gaps[role]
        gaps.mu, gaps.sigma, gaps.returning = other.mu, other.sigma, other.returning


def know(reuse: Reuse, wise: Reuse) -> None:
    """Give `reuse` the knowledge of `wise`, class by class, for good."""
    for name in wise.returning:
        reuse.returning.setdefault(name, len(reuse.returning))
    for name in wise.sharing:
        reuse.sharing.setdefault(name, len(reuse.sharing))
    worth = {name: wise.worth[at] for name, at in wise.returning.items() if at < len(wise.worth)}
    ratio = {name: wise.ratio[at] for name, at in wise.sharing.items() if at < len(wise.ratio)}
    reuse.worth = [worth.get(name, next(iter(worth.values()))) for name in reuse.returning]
    reuse.ratio = [ratio.get(name, next(iter(ratio.values()))) for name in reuse.sharing]
    reuse.fits += 1
    reuse.fit = lambda now: None  # noqa: ARG005


def replay_told(trace: Trace, name: str, blocks: int) -> Replay:
    """A policy of which a first run has learned what a second is told at half of the requests."""
    wise, policy = POLICIES[name](blocks), POLICIES[name](blocks)
    replay(trace, wise, blocks)

    def tell() -> None:
        if isinstance(policy, SAECache) and isinstance(wise, SAECache):
            adopt(policy, wise)
        elif isinstance(policy, Ostinato) and isinstance(wise, Ostinato):
            know(policy.reuse, wise.reuse)

    before(policy, len(trace.requests) // 2, tell)
    return replay(trace, policy, blocks, name=name + TOLD)


def rates(runs: Sequence[Pairs]) -> list[float]:
    """Hit rate of every `WINDOW` requests, over all runs."""
    found: list[float] = []
    for start in range(0, min(map(len, runs)) - WINDOW + 1, WINDOW):
        pairs = [pair for run in runs for pair in run[start : start + WINDOW]]
        found.append(sum(hit for _, hit in pairs) / max(1, sum(tokens for tokens, _ in pairs)))
    return found


def back_after(rates: Sequence[float], shift: int, last: int) -> str:
    """Requests from the shift until a window is within `BACK` of the mean from `last` on."""
    later = statistics.fmean(rates[last:])
    at = next((place for place in range(shift, len(rates)) if rates[place] >= later - BACK), None)
    return "never" if at is None else f"{(at - shift + 1) * WINDOW:,}"


def caught_up(rates: Sequence[float], told: Sequence[float], shift: int) -> str:
    """Requests from the shift until no later window is more than `BACK` below the one that was told."""
    behind = [place for place in range(shift, len(rates)) if rates[place] < told[place] - BACK]
    return f"{(max(behind) - shift + 1) * WINDOW:,}" if behind else "0"


def rows(series: Mapping[str, list[float]], best: str) -> list[list[str]]:
    """The table: a row for each window around the shift, and what they say."""
    shown = [name for name in series if not name.endswith(TOLD)]
    points = min(len(each) for each in series.values())
    half, last = points // 2, points - max(1, points // 4)
    found = [
        [f"{(place - half) * WINDOW:+,} to {(place - half + 1) * WINDOW:+,}"]
        + [f"{100 * series[name][place]:.1f}" for name in shown]
        for place in range(max(0, half - 4), min(points, half + 12))
    ]

    def row(title: str, cells: Mapping[str, str]) -> None:
        found.append([title, *(cells.get(name, "–") for name in shown)])

    quarter = max(0, half - points // 4)
    row(
        "the quarter before",
        {name: f"{100 * statistics.fmean(series[name][quarter:half]):.1f}" for name in shown},
    )
    row("the last quarter", {name: f"{100 * statistics.fmean(series[name][last:]):.1f}" for name in shown})
    told = {name: series[name + TOLD] for name in shown if name + TOLD in series}
    row(
        "level with what knows, after",
        {name: caught_up(series[name], each, half) for name, each in told.items()},
    )
    most = {
        name: max(b - a for a, b in zip(series[name][half:], each[half:], strict=True))
        for name, each in told.items()
    }
    row("most below it, points", {name: f"{100 * each:.1f}" for name, each in most.items()})
    row("back after", {name: back_after(series[name], half, last) for name in shown})
    if best in series:
        shares = {
            name: [
                rate / most if most else 1.0 for rate, most in zip(series[name], series[best], strict=True)
            ]
            for name in shown
            if name != best
        }
        row(
            f"back after, of {best}'s hits",
            {name: back_after(each, half, last) for name, each in shares.items()},
        )
    return found
