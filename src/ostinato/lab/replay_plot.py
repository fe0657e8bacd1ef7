"""Plots of replays: hit rate by capacity, hit rate over time, and which tokens were hit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from ostinato.cache.use import TokenType
from ostinato.errors import OstinatoError
from ostinato.lab.replay import OPTIMUM, Replay

WINDOWS = 40
"""A point of the curves over time stands for the requests of one of so many parts of the trace."""

KIND_COLOURS: tuple[tuple[TokenType, str], ...] = (
    ("tools", "#4e79a7"),
    ("system", "#76b7b2"),
    ("template", "#59a14f"),
    ("document", "#8cd17d"),
    ("user", "#f28e2b"),
    ("tool", "#edc948"),
    ("assistant", "#b07aa1"),
    ("reasoning", "#d4a6c8"),
    ("decode", "#e15759"),
    ("text", "#bab0ac"),
)


def pyplot() -> Any:
    """matplotlib, which draws to files only."""
    try:
        import matplotlib
    except ImportError:
        raise OstinatoError("A plot needs matplotlib: pip install 'ostinato[lab]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(replays: Sequence[Replay], path: Path) -> None:
    """A row of three panels for each trace."""
    names = list(dict.fromkeys(each.trace for each in replays))
    policies = list(dict.fromkeys(each.policy for each in replays))
    colours = {name: "black" if name == OPTIMUM else f"C{place % 10}" for place, name in enumerate(policies)}
    figure, panels = pyplot().subplots(
        len(names), 3, figsize=(14, 3.7 * len(names)), squeeze=False, layout="constrained"
    )
    for name, (by_capacity, over_time, by_kind) in zip(names, panels, strict=True):
        same = [each for each in replays if each.trace == name]
        capacities = sorted({each.capacity for each in same})
        shown = capacities[(len(capacities) - 1) // 2]
        at_shown = [each for each in same if each.capacity == shown]
        _by_capacity(by_capacity, same, colours)
        _over_time(over_time, at_shown, colours)
        _by_kind(by_kind, at_shown)
        by_capacity.set_title(name, fontsize=10, loc="left")
        share = f" ({shown / same[0].unique_blocks:.1%})" if same[0].unique_blocks else ""
        for panel in (over_time, by_kind):
            panel.set_title(f"{shown:,} blocks{share}", fontsize=10, loc="left")
        for panel in (by_capacity, over_time, by_kind):
            panel.spines[["top", "right"]].set_visible(False)
            panel.yaxis.set_major_formatter(_percent)
            panel.tick_params(labelsize=8)
    figure.savefig(path, dpi=110)
    pyplot().close(figure)


def _percent(value: float, _place: int) -> str:
    return f"{100 * value:g} %"


def _style(policy: str, colours: dict[str, str]) -> dict[str, Any]:
    return {
        "label": policy,
        "color": colours[policy],
        "linestyle": "--" if policy == OPTIMUM else "-",
        "linewidth": 1.6,
    }


def _by_capacity(panel: Any, replays: Sequence[Replay], colours: dict[str, str]) -> None:
    for policy in dict.fromkeys(each.policy for each in replays):
        points = sorted((each.capacity, each.token_hit_rate) for each in replays if each.policy == policy)
        panel.plot(*zip(*points, strict=True), marker="o", markersize=4, **_style(policy, colours))
    ticks = sorted({each.capacity for each in replays})
    unique = replays[0].unique_blocks
    panel.set_xscale("log")
    panel.set_xticks(ticks, [f"{100 * size / max(1, unique):.2g} %" for size in ticks])
    panel.minorticks_off()
    panel.set_ylim(bottom=0)
    panel.set_xlabel("capacity, of the trace's different blocks", fontsize=8)
    panel.set_ylabel("prompt tokens hit", fontsize=8)
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8, frameon=False)


def _over_time(panel: Any, replays: Sequence[Replay], colours: dict[str, str]) -> None:
    for each in replays:
        width = max(1, len(each.series) // WINDOWS)
        prompts = [0, *accumulate(tokens for tokens, _ in each.series)]
        hits = [0, *accumulate(hit for _, hit in each.series)]
        ends = range(width, len(each.series) + 1, width)
        rates = [
            (hits[end] - hits[end - width]) / max(1, prompts[end] - prompts[end - width]) for end in ends
        ]
        panel.plot(list(ends), rates, **_style(each.policy, colours))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("requests", fontsize=8)
    panel.grid(alpha=0.25)


def _by_kind(panel: Any, replays: Sequence[Replay]) -> None:
    names = [each.policy for each in replays]
    below = [0.0] * len(replays)
    for kind, colour in KIND_COLOURS:
        if not any(each.hits_by_kind.get(kind) for each in replays):
            continue
        shares = [each.hits_by_kind.get(kind, 0) / max(1, each.prompt_tokens) for each in replays]
        panel.bar(names, shares, bottom=below, label=kind, color=colour, width=0.65)
        below = [low + share for low, share in zip(below, shares, strict=True)]
    panel.tick_params(axis="x", rotation=25 if len(names) > 4 else 0)
    handles, labels = panel.get_legend_handles_labels()
    panel.legend(
        handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1, 1)
    )
