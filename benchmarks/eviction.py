"""Eviction policies side by side: hit rates, what each part of SAECache is worth, and what a choice costs.

    python benchmarks/eviction.py --data ../shared/data --json eviction.json --docs docs/eviction.md --plot docs/eviction.png
    python benchmarks/eviction.py --only a,e --seeds 2 --requests 800
    python benchmarks/eviction.py --from eviction.json --docs docs/eviction.md      # tables again, nothing replayed

Sections, of which --only names some:

    a  workloads of mixed traffic, at three capacities
    b  a workload that shifts half-way
    c  recorded traces: Mooncake, coding agents, tau-bench (left out without --data)
    d  traffic that never comes back
    e  SAECache with one part off at a time
    f  time of an eviction at 100,000 blocks, and of a long replay

Sections a, b, c and e replay in --jobs processes; what is timed (d, f) runs alone afterwards. Intervals are of 95 %
confidence, from Student's t over the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from informed import Informed
from ostinato.cache.block import Block
from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.saecache import PARTS, SAECache
from ostinato.cache.use import Use
from ostinato.lab.cli import CLASSICAL
from ostinato.lab.replay import OPTIMUM, Cache, make_policy, replay
from ostinato.lab.replay_plot import pyplot
from ostinato.lab.trace import Trace
from ostinato.lab.traces import load
from peers import cpu_name
from shift import BACK, TOLD, WINDOW, rates, replay_told, rows

SECTIONS = "abcdef"
MIXED = ("balanced", "rag", "polluted")
SHARES = (0.01, 0.025, 0.05)
MIDDLE = 0.025
FILES = {
    "mooncake_conversation": "traces/mooncake_conversation.jsonl",
    "mooncake_synthetic": "traces/mooncake_synthetic.jsonl",
    "agent_traces": "agent_traces",
    "tau_bench_airline": "tau_bench_airline.json",
}
SHORT = {
    "mooncake_conversation": "conversation",
    "mooncake_synthetic": "synthetic",
    "agent_traces": "agents",
    "tau_bench_airline": "tau-bench",
}
MOONCAKE, MOONCAKE_SHARES = ("mooncake_conversation", "mooncake_synthetic"), (0.02, 0.05, 0.1, 0.25)
AGENTS, AGENT_SHARES = ("agent_traces", "tau_bench_airline"), (0.02, 0.05, 0.1)
OURS = ("saecache", "ostinato")
INFORMED = "informed"
"""A policy that is told how the workload is made."""
SHIFTED = ("lru", "arc", "unicache", "saecache", "ostinato", OPTIMUM)
TIMED = ("lru", "saecache", "ostinato")
TITLES = {"weights": "token weights", "timing": "timing", "position": "position", "queues": "queue weights"}
PAPER = {"weights": 23, "timing": 14, "position": 12, "queues": 39}
"""What each part adds to the hit rate according to the paper, in per cent."""
EVICTIONS = 20_000
ROUNDS = 3
COLOURS = {
    "lru": "#4e79a7",
    "arc": "#59a14f",
    "unicache": "#b07aa1",
    "saecache": "#f28e2b",
    "ostinato": "#e15759",
}

# 97.5 % quantiles of Student's t, for 1 to 29 degrees of freedom.
T975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045,
)  # fmt: skip


# -- replays ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One replay. `trace` is a name of `FILES`, or of a mix."""

    trace: str
    seed: int
    policy: str
    share: float
    """Capacity, of the trace's different blocks."""


@dataclass(frozen=True)
class Setup:
    """What all replays of a run have in common."""

    data: str = ""
    """Folder of the recorded traces; empty without one."""
    requests: int = 4000
    """Of a workload."""
    limit: int | None = None
    """Requests that are read of a recorded trace."""
    seeds: int = 5
    cost_blocks: int = 100_000


Result = dict[str, Any]
Results = dict[Cell, Result]


@lru_cache(maxsize=2)
def trace_of(name: str, seed: int, setup: Setup, named: float = 0.5) -> tuple[Trace, int]:
    """A trace, and how many different blocks it has."""
    if name in FILES:
        trace = load(str(Path(setup.data) / FILES[name]))
        trace = replace(trace, requests=trace.requests[: setup.limit])
    else:
        trace = load(f"workload:{name}?seed={seed}&requests={setup.requests}&named={named}")
    return trace, trace.unique_blocks


def policy_of(name: str, trace: Trace, blocks: int) -> Policy:
    """A policy by name; "saecache-weights" is SAECache without token weights."""
    if name == INFORMED:
        return Informed(trace)
    whole, _, part = name.partition("-")
    if whole == "saecache" and part:
        return SAECache(blocks, use=PARTS - {part})  # pyright: ignore[reportArgumentType]
    return make_policy(name, trace, blocks)


def run(cell: Cell, setup: Setup) -> Result:
    # The names of sessions tell the informed which go on; the requests are the same.
    trace, unique = trace_of(cell.trace, cell.seed, setup, 1.0 if cell.policy == INFORMED else 0.5)
    blocks = max(1, round(cell.share * unique))
    if cell.policy.endswith(TOLD):
        found = replay_told(trace, cell.policy.removesuffix(TOLD), blocks)
    else:
        found = replay(trace, policy_of(cell.policy, trace, blocks), blocks, name=cell.policy)
    result = asdict(found)
    result.update(unique_blocks=unique, requests=len(trace.requests))
    late = found.series[len(found.series) // 2 :]
    result.update(late_tokens=sum(pair[0] for pair in late), late_hit_tokens=sum(pair[1] for pair in late))
    if cell.trace != "shift":
        del result["series"]
    return result


def run_all(cells: Iterable[Cell], setup: Setup, jobs: int, tell: Callable[[int, int], None]) -> Results:
    """Every cell once; those of a trace one after the other, so that a process makes it once."""
    ordered = sorted(set(cells), key=lambda cell: (cell.trace, cell.seed, cell.share, cell.policy))
    results: Results = {}
    tell(0, len(ordered))
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(run, cell, setup): cell for cell in ordered}
        try:
            for future in as_completed(waiting):
                results[waiting[future]] = future.result()
                tell(len(results), len(ordered))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


def known(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in POLICIES or name == OPTIMUM]


def cells_of(section: str, setup: Setup) -> list[Cell]:
    """The replays that a section is made from; none where it needs data that there is not."""
    everyone = [*POLICIES, OPTIMUM]
    seeds = range(setup.seeds)
    match section:
        case "a":
            return [
                Cell(mix, seed, policy, share)
                for mix in MIXED for seed in seeds for share in SHARES for policy in (*everyone, INFORMED)
            ]  # fmt: skip
        case "b":
            told = [name + TOLD for name in known(OURS)]
            return [
                Cell("shift", seed, policy, MIDDLE) for seed in seeds for policy in (*known(SHIFTED), *told)
            ]
        case "c" if setup.data:
            return [
                Cell(name, 0, policy, share)
                for names, shares in ((MOONCAKE, MOONCAKE_SHARES), (AGENTS, AGENT_SHARES))
                for name in names for share in shares for policy in everyone
            ]  # fmt: skip
        case "d":
            return [
                Cell("one-shot", seed, policy, MIDDLE)
                for seed in seeds
                for policy in known((*TIMED, OPTIMUM))
            ]
        case "e":
            names = ["saecache", *(f"saecache-{part}" for part in TITLES)]
            return [Cell(mix, seed, name, MIDDLE) for mix in MIXED for seed in seeds for name in names]
        case _:
            return []


# -- time -------------------------------------------------------------------------------------------------


class Timed(Policy):
    """Another policy, and the seconds spent in it."""

    def __init__(self, policy: Policy) -> None:
        self.seconds = 0.0
        self.calls = 0
        for name in ("arrive", "miss", "insert", "hit", "release", "leaf", "remove", "victim"):
            setattr(self, name, self._timed(getattr(policy, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments, **named)
            self.seconds += time.perf_counter() - start
            self.calls += 1
            return result

        return timed

    def own_seconds(self) -> float:
        """Without what the clock takes."""
        still = Timed(Still())
        for _ in range(100_000):
            still.miss(b"", Use(0.0))
        return max(0.0, self.seconds - self.calls * still.seconds / still.calls)


class Still(Policy):
    """Does nothing."""

    def miss(self, key: bytes, use: Use) -> None:
        pass

    def release(self, block: Block) -> None:
        pass

    def leaf(self, block: Block) -> None:
        pass

    def remove(self, block: Block, *, evicted: bool) -> None:
        pass

    def victim(self) -> Block | None:
        return None


def time_requests(setup: Setup, tell: Callable[[int, int], None]) -> dict[str, list[float]]:
    """Microseconds of policy for each request of one-shot traffic, in rounds that take turns."""
    trace, unique = trace_of("one-shot", 0, setup)
    blocks = max(1, round(MIDDLE * unique))
    names = known(TIMED)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(ROUNDS * len(names)):
        name = names[number % len(names)]
        policy = Timed(make_policy(name, trace, blocks))
        replay(trace, policy, blocks)
        taken[name].append(1e6 * policy.own_seconds() / len(trace.requests))
        tell(number + 1, ROUNDS * len(names))
    return taken


def time_evictions(setup: Setup, tell: Callable[[int, int], None]) -> dict[str, Result]:
    """The cost of a choice in a cache of many blocks, filled with mixed traffic that goes on; and of a long replay."""
    trace = load(f"workload:balanced?seed=0&requests={max(64, setup.cost_blocks // 25)}")
    long = trace_of(MOONCAKE[0], 0, setup) if setup.data else None
    found: dict[str, Result] = {}
    for number, name in enumerate(POLICIES):
        cache = Cache(make_policy(name, trace, setup.cost_blocks), setup.cost_blocks, trace.block_size)
        for request in trace.requests:
            cache.ask(request)
            if cache.evictions >= EVICTIONS:
                break
        found[name] = {"evictions": cache.evictions, "evicting": cache.evicting}
        if long is not None:
            blocks = max(1, round(0.1 * long[1]))
            found[name]["replay_seconds"] = replay(
                long[0], make_policy(name, long[0], blocks), blocks
            ).seconds
        tell(number + 1, len(POLICIES))
    return found


# -- tables -----------------------------------------------------------------------------------------------


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean, and half the width of its interval of 95 % confidence; None for a single value."""
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), T975[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def number(values: Sequence[float], *, sign: bool = False, digits: int = 1) -> str:
    """Mean and interval, in per cent or points."""
    mean, half = interval(values)
    text = f"{round(100 * mean, digits) + 0.0:{'+' if sign else ''}.{digits}f}"
    return text if half is None else f"{text} ± {100 * half:.{digits}f}"


def token_rate(result: Result) -> float:
    return result["hit_tokens"] / result["prompt_tokens"] if result["prompt_tokens"] else 0.0


def late_rate(result: Result) -> float:
    """Of the second half of the requests, when cache and policy are warm."""
    return result["late_hit_tokens"] / result["late_tokens"] if result["late_tokens"] else 0.0


def block_rate(result: Result) -> float:
    return result["hit_blocks"] / result["prompt_blocks"] if result["prompt_blocks"] else 0.0


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def seeds_of(setup: Setup) -> str:
    return f"{setup.seeds} seed{'s' if setup.seeds > 1 else ''}"


def title(column: tuple[str, float]) -> str:
    trace, share = column
    return f"{SHORT.get(trace, trace)} {percent(share)}"


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heading)} |", "|---|" + "---:|" * (len(heading) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


@dataclass
class Rates:
    """Hit rates of policies on traces at capacities, each a list over the seeds."""

    results: Results
    of: Callable[[Result], float] = token_rate

    def get(self, trace: str, share: float, policy: str) -> list[float]:
        found = {
            cell.seed: self.of(result)
            for cell, result in self.results.items()
            if (cell.trace, cell.share, cell.policy) == (trace, share, policy)
        }
        return [found[seed] for seed in sorted(found)]

    def policies(self, trace: str) -> list[str]:
        found = {cell.policy for cell in self.results if cell.trace == trace}
        return [name for name in (*POLICIES, INFORMED, OPTIMUM) if name in found]

    def best_classical(self, trace: str, share: float) -> str:
        """That of the highest mean."""
        names = [name for name in self.policies(trace) if name in CLASSICAL]
        return max(names, key=lambda name: statistics.fmean(self.get(trace, share, name)))

    def table(self, columns: Sequence[tuple[str, float]]) -> str:
        """A row for each policy; the best of those that learn is bold."""
        names = self.policies(columns[0][0])
        best = {
            column: max(
                (name for name in names if name not in (INFORMED, OPTIMUM)), key=lambda name: statistics.fmean(self.get(*column, name))
            )
            for column in columns
        }  # fmt: skip
        rows: list[list[str]] = []
        for name in names:
            cells = [number(self.get(*column, name)) for column in columns]
            rows.append(
                [name]
                + [f"**{text}**" if best[column] == name else text for column, text in zip(columns, cells, strict=True)]
            )  # fmt: skip
        return markdown(["policy", *map(title, columns)], rows)

    def closed(self, columns: Sequence[tuple[str, float]]) -> str:
        """How much of the way from LRU to the optimum each policy goes, in per cent."""
        rows: list[list[str]] = []
        for name in self.policies(columns[0][0]):
            if name in ("lru", OPTIMUM):
                continue
            row = [name]
            for column in columns:
                least, most = self.get(*column, "lru"), self.get(*column, OPTIMUM)
                ways = zip(self.get(*column, name), least, most, strict=True)
                row.append(
                    number(
                        [(rate - low) / (high - low) if high > low else 0.0 for rate, low, high in ways],
                        digits=0,
                    )
                )
            rows.append(row)
        return markdown(["policy", *map(title, columns)], rows)

    def differences(self, columns: Sequence[tuple[str, float]]) -> str:
        """Ours less the best classical policy, seed by seed, in points."""
        ours = [name for name in (*OURS, INFORMED) if name in self.policies(columns[0][0])]
        late = replace(self, of=late_rate)
        rows: list[list[str]] = []
        for column in columns:
            best = self.best_classical(*column)
            apart = [number(self.apart([column], name), sign=True) for name in ours]
            rows.append([title(column), best, number(self.get(*column, best)), *apart])
        for name, part in (("**mean**", self), ("the same, second half of the requests", late)):
            rows.append(
                [name, "", "", *(number(part.apart(columns, each), sign=True, digits=2) for each in ours)]
            )
        return markdown(
            ["workload", "best classical", "its hit rate", *(f"{name} − best" for name in ours)], rows
        )

    def apart(self, columns: Sequence[tuple[str, float]], name: str) -> list[float]:
        """A policy's rate less that of each column's best classical policy, seed by seed, the mean of the columns."""
        pairs = [
            zip(self.get(*column, name), self.get(*column, self.best_classical(*column)), strict=True)
            for column in columns
        ]
        return [statistics.fmean(rate - best for rate, best in seed) for seed in zip(*pairs, strict=True)]


def mixed_tables(results: Results, setup: Setup) -> str:
    rates = Rates(results)
    parts = [
        f"Tokens hit, in per cent; {setup.requests:,} requests, {seeds_of(setup)}; the capacity is a share of the "
        "trace's different blocks. Bold: the best of those that learn. "
        "`informed` learns only how popular texts are: it is told of the rest how the workload is made."
    ]
    columns = [(mix, share) for mix in MIXED for share in SHARES]
    parts += [
        rates.table(columns),
        "Against the classical policy of the highest mean in that cell, seed by seed, in points:",
        rates.differences(columns),
        "How much of the gap from LRU to OPT each closes, in per cent:",
        rates.closed(columns),
    ]
    return "\n\n".join(parts)


def shift_series(results: Results) -> dict[str, list[float]]:
    """Hit rate of every `WINDOW` requests, over all seeds."""
    found: dict[str, list[float]] = {}
    for policy in dict.fromkeys((*SHIFTED, *(cell.policy for cell in results))):
        runs = [
            result["series"]
            for cell, result in results.items()
            if (cell.trace, cell.policy) == ("shift", policy)
        ]
        if runs:
            found[policy] = rates(runs)
    return found


def shift_table(results: Results, setup: Setup) -> str:
    series = shift_series(results)
    shown = [name for name in series if not name.endswith(TOLD)]
    points = f"{100 * BACK:g} points"
    return "\n\n".join(
        [
            f"Tokens hit by requests since the shift, in per cent, over {seeds_of(setup)} together; "
            f"{setup.requests:,} requests, {percent(MIDDLE)} of the different blocks. *Level with what knows, after*: "
            "requests since the shift until it is never again more than "
            f"{points} below itself in another run, in which it is told at the shift what it has learned by the end. *Back "
            f"after*: end of the first {WINDOW} requests behind the shift with at most {points} less than in the last "
            "quarter; below that, the same of the share of opt's hits. These two also wait for the traffic, which becomes "
            "easier as the old chats end.",
            markdown(["requests", *shown], rows(series, OPTIMUM)),
        ]
    )


def recorded_tables(results: Results, setup: Setup) -> str:
    first = "" if setup.limit is None else f"; the first {setup.limit:,} requests"
    short = {cell: result for cell, result in results.items() if cell.trace in FILES}
    blocks = Rates(short, block_rate)
    tokens = Rates(short)
    return "\n\n".join(
        [
            f"Mooncake: blocks hit, in per cent{first}.",
            blocks.table([(name, share) for name in MOONCAKE for share in MOONCAKE_SHARES]),
            f"Coding agents and tau-bench: tokens hit, in per cent{first}. The times of tau-bench and the starts of the "
            "agents' sessions are made up.",
            tokens.table([(name, share) for name in AGENTS for share in AGENT_SHARES]),
        ]
    )


def one_shot_table(results: Results, taken: dict[str, list[float]], setup: Setup) -> str:
    rates = Rates(results)
    rows = [
        [
            name,
            number(rates.get("one-shot", MIDDLE, name), digits=2),
            f"{statistics.median(taken[name]):.0f}" if name in taken else "–",
        ]
        for name in rates.policies("one-shot")
        if name in TIMED or name == OPTIMUM
    ]
    return "\n\n".join(
        [
            f"95 % of the requests share nothing; {setup.requests:,} requests, {seeds_of(setup)}, {percent(MIDDLE)} "
            f"of the different blocks. Time: all calls of the policy, median of {ROUNDS} rounds.",
            markdown(["policy", "tokens hit, %", "µs a request"], rows),
        ]
    )


def ablation_table(results: Results, setup: Setup) -> str:
    rates = Rates(results)
    rows: list[list[str]] = []
    for part, called in TITLES.items():
        row = [called, f"+{PAPER[part]}"]
        for mix in MIXED:
            whole, without = (rates.get(mix, MIDDLE, name) for name in ("saecache", f"saecache-{part}"))
            row.append(
                number([a / b - 1 if b else 0.0 for a, b in zip(whole, without, strict=True)], sign=True)
            )
        rows.append(row)
    return "\n\n".join(
        [
            "What a part adds: SAECache's hit rate relative to its hit rate without the part, in per cent; "
            f"{setup.requests:,} requests, {seeds_of(setup)}, {percent(MIDDLE)} of the different blocks.",
            markdown(["part", "paper", *MIXED], rows),
        ]
    )


def cost_table(costs: dict[str, Result], setup: Setup) -> str:
    long = any("replay_seconds" in each for each in costs.values())
    rows = [
        [name, f"{1e6 * each['evicting'] / max(1, each['evictions']):.1f}"]
        + ([f"{each['replay_seconds']:.1f}"] if long else [])
        for name, each in costs.items()
    ]
    text = (
        f"{cpu_name()}, Python {platform.python_version()}. An eviction: the choice and the removal, at "
        f"{setup.cost_blocks:,} blocks of mixed traffic that goes on, mean of "
        f"{max(each['evictions'] for each in costs.values()):,}."
    )
    if long:
        part = "all" if setup.limit is None else f"the first {setup.limit:,} requests"
        text += f" A replay: {part} of `{MOONCAKE[0]}` at 10 %, the store's work included."
    return f"{text}\n\n" + markdown(["policy", "µs an eviction", *(["s a replay"] if long else [])], rows)


# -- plots ------------------------------------------------------------------------------------------------


def _style(policy: str) -> dict[str, Any]:
    best = policy == OPTIMUM
    return {
        "label": policy,
        "color": "#8a8a8a" if best else COLOURS[policy],
        "linestyle": "--" if best else "-",
        "linewidth": 1.6,
        "zorder": 3 if best else 2,
    }


def _percent(value: float, _place: int) -> str:
    return percent(round(value, 6))


def _panel(panel: Any, title: str) -> None:
    panel.set_title(title, fontsize=10, loc="left")
    panel.spines[["top", "right"]].set_visible(False)
    panel.yaxis.set_major_formatter(_percent)
    panel.tick_params(labelsize=8)
    panel.grid(alpha=0.25)


def plot_capacity(results: Results, path: Path) -> None:
    """Hit rate by capacity, a panel for each mix and one for Mooncake's conversations, where there are any."""
    present = {cell.trace for cell in results}
    shown: list[tuple[str, tuple[float, ...], Callable[[Result], float]]] = [
        (mix, SHARES, token_rate) for mix in MIXED if mix in present
    ]
    if MOONCAKE[0] in present:
        shown.append((MOONCAKE[0], MOONCAKE_SHARES, block_rate))
    figure, panels = pyplot().subplots(2, 2, figsize=(9, 6.4), squeeze=False, layout="constrained")
    for panel, (trace, shares, of) in zip(panels.flat, shown, strict=False):
        rates = Rates(results, of)
        for policy in known((*(name for name in COLOURS if name != "unicache"), OPTIMUM)):
            means = [statistics.fmean(rates.get(trace, share, policy)) for share in shares]
            panel.plot(shares, means, marker="o", markersize=4, **_style(policy))
        _panel(panel, f"Mooncake, {SHORT[trace]}" if trace in SHORT else trace)
        panel.set_xscale("log")
        panel.set_xticks(shares, [percent(share) for share in shares])
        panel.minorticks_off()
        panel.set_ylabel("prompt tokens hit" if of is token_rate else "blocks hit", fontsize=8)
        panel.set_xlabel("capacity, of the different blocks", fontsize=8)
    for panel in list(panels.flat)[len(shown) :]:
        panel.set_visible(False)
    panels.flat[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def plot_shift(results: Results, path: Path) -> None:
    figure, panel = pyplot().subplots(figsize=(7, 3.2), layout="constrained")
    series = shift_series(results)
    points = min(map(len, series.values()))
    for policy in (name for name in SHIFTED if name in series):
        panel.plot(
            [(place + 0.5 - points // 2) * WINDOW for place in range(points)],
            series[policy][:points],
            **_style(policy),
        )
    panel.axvline(0, color="#444444", linewidth=0.8)
    _panel(panel, "the traffic shifts at 0")
    panel.set_xlabel("requests since the shift", fontsize=8)
    panel.set_ylabel("prompt tokens hit", fontsize=8)
    panel.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


# -- the command ------------------------------------------------------------------------------------------


@dataclass
class Report:
    """Everything that a run found."""

    setup: Setup
    results: Results
    taken: dict[str, list[float]]
    costs: dict[str, Result]

    def save(self, path: Path) -> None:
        setup = asdict(self.setup) | {"data": bool(self.setup.data)}
        rows = [result | asdict(cell) for cell, result in self.results.items()]
        found = {"setup": setup, "replays": rows, "one_shot_us": self.taken, "costs": self.costs}
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Report:
        found = json.loads(path.read_text("utf-8"))
        setup = Setup(**found["setup"] | {"data": "read" if found["setup"]["data"] else ""})
        names = ("trace", "seed", "policy", "share")
        results = {Cell(*(row[name] for name in names)): row for row in found["replays"]}
        return cls(setup, results, found["one_shot_us"], found["costs"])

    def section(self, name: str) -> str | None:
        """The text of a section; None where it was not run."""
        if name == "f":
            return cost_table(self.costs, self.setup) if self.costs else None
        cells = cells_of(name, self.setup)
        if not cells or not all(cell in self.results for cell in cells):
            return None
        results = {cell: self.results[cell] for cell in cells}
        match name:
            case "a":
                return mixed_tables(results, self.setup)
            case "b":
                return shift_table(results, self.setup)
            case "c":
                return recorded_tables(results, self.setup)
            case "d":
                return one_shot_table(results, self.taken, self.setup)
            case _:
                return ablation_table(results, self.setup)


def measure(sections: str, setup: Setup, jobs: int) -> Report:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    report = Report(setup, {}, {}, {})
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def tell(title: str) -> Callable[[int, int], None]:
            task = bar.add_task(title, total=None)
            return lambda done, total: bar.update(task, completed=done, total=total)

        cells = [cell for section in sections for cell in cells_of(section, setup)]
        if cells:
            report.results = run_all(cells, setup, jobs, tell("Replaying"))
        if "d" in sections:
            report.taken = time_requests(setup, tell("Timing requests"))
        if "f" in sections:
            report.costs = time_evictions(setup, tell("Timing evictions"))
    return report


def into_page(path: Path, section: str, text: str) -> None:
    """Replace what stands between the section's markers."""
    page = path.read_text("utf-8")
    begin, end = f"<!-- eviction {section}: begin -->", f"<!-- eviction {section}: end -->"
    head, tail = page.index(begin) + len(begin), page.index(end)
    path.write_text(f"{page[:head]}\n{text}\n{page[tail:]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of recorded traces")
    parser.add_argument("--requests", type=int, default=4000, help="of a workload")
    parser.add_argument("--limit", type=int, help="read only the first requests of recorded traces")
    parser.add_argument("--seeds", type=int, default=5, help="workloads of each kind, 1 to 30")
    parser.add_argument("--jobs", type=int, default=2, help="processes that replay at a time")
    parser.add_argument("--cost-blocks", type=int, default=100_000, help="blocks of the cache of section f")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, by commas")
    parser.add_argument("--from", type=Path, dest="source", help="a run's JSON: replay nothing")
    parser.add_argument("--json", type=Path, help="write every number here")
    parser.add_argument("--docs", type=Path, help="replace what stands between the markers of this page")
    parser.add_argument("--plot", type=Path, help="PNG; a second one gets -shift to its name")
    options = parser.parse_args()
    sections = "".join(dict.fromkeys(options.only.replace(",", "")))
    if set(sections) - set(SECTIONS):
        parser.error(f"--only: there are {', '.join(SECTIONS)}.")
    if not 1 <= options.seeds <= len(T975) + 1:
        parser.error(f"--seeds: 1 to {len(T975) + 1}.")
    if options.plot:
        pyplot()  # what is missing is said now
    if options.source:
        report = Report.read(options.source)
    else:
        data = str(options.data) if options.data.is_dir() else ""
        if not data:
            print("No folder of recorded traces (--data): left out: c, and the replay of f.", file=sys.stderr)
        setup = Setup(data, options.requests, options.limit, options.seeds, options.cost_blocks)
        report = measure(sections, setup, options.jobs)
    if options.json:
        report.save(options.json)
    for section in sections:
        text = report.section(section)
        if text is None:
            print(f"{section}: not run.", file=sys.stderr)
            continue
        print(f"\n## {section}\n\n{text}")
        if options.docs:
            into_page(options.docs, section, text)
    if options.plot:
        if report.section("a") is not None:
            plot_capacity(report.results, options.plot)
        if report.section("b") is not None:
            plot_shift(report.results, options.plot.with_stem(f"{options.plot.stem}-shift"))


if __name__ == "__main__":
    main()
