"""The lab's commands. What needs PyTorch is imported where it is needed."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ostinato.errors import InvalidRequestError
from ostinato.terminal import err

if TYPE_CHECKING:
    from ostinato.lab.predictor import Report as PredictorReport
    from ostinato.lab.trace import Trace

DEFAULT_POLICIES = ("lru", "arc", "saecache", "opt")

CLASSICAL = frozenset({"lru", "lfu", "fifo", "s3fifo", "sieve", "arc", "lecar", "gdsf"})
"""Policies that know nothing of language models."""

LEGEND = """\
gap: how far the policy gets from LRU's tokens hit to those of opt; µs: time of an eviction, on average.
Bold: the best of the policies that know nothing of language models."""

EXAMPLES = """Examples:

ostinato replay conversation.jsonl --policy lru,arc,opt --capacity 5%,10% --plot replay.png

ostinato replay 'workload:chat?seed=1&requests=4000' recording.jsonl --json

A trace is a file (an Ostinato recording, a Mooncake, Bailian, tau-bench or kv-cache-tester trace, a log of \
OpenAI requests), a folder of kv-cache-tester sessions, or a made-up workload: workload:balanced, workload:rag, \
workload:polluted, workload:chat, workload:agentic, workload:templated, workload:one-shot or workload:shift, with the \
options seed, requests, rate and named."""


def replay(
    trace: Annotated[
        list[str],
        typer.Argument(help="Files, folders, or workload:NAME?seed=1&requests=4000.", show_default=False),
    ],
    policy: Annotated[
        str | None,
        typer.Option(help="Policies, by commas; opt knows the future.", show_default="lru,arc,saecache,opt"),
    ] = None,
    capacity: Annotated[
        str, typer.Option(help="Cache sizes, by commas: shares of the trace's different blocks, or blocks.")
    ] = "2%,5%,10%,25%",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, writable=True, help="Write the JSON there as well.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Draw hit rates there (needs matplotlib)."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes that replay at a time; 0: one for each processor.")
    ] = 0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Replay only the first requests.", show_default="all")
    ] = None,
) -> None:
    """Replay traces of requests through eviction policies, and compare their hit rates."""
    from ostinato.cache.policy import POLICIES
    from ostinato.lab import replay as lab
    from ostinato.lab import replay_plot
    from ostinato.lab.traces import load

    for file in (out, plot):
        if file is not None and not file.absolute().parent.is_dir():
            raise InvalidRequestError(f"There is no folder {file.parent} to write {file.name} to.")
    if plot is not None:
        replay_plot.pyplot()  # what is missing is said now, not once all is replayed
    default = [name for name in DEFAULT_POLICIES if name in POLICIES or name == lab.OPTIMUM]
    policies = default if policy is None else _names(policy, "--policy")
    capacities = _names(capacity, "--capacity")
    lab.check_policies(policies)
    for each in capacities:
        lab.parse_capacity(each)
    specs = list(dict.fromkeys(trace))
    with err.status("Reading …"):
        traces = _told_apart([load(spec) for spec in specs], specs)
    if limit is not None:
        traces = [replace(each, requests=each.requests[:limit]) for each in traces]
    results = _replay(traces, policies, capacities, jobs or os.cpu_count() or 1)
    rows = lab.rows(results)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(rows))
    else:
        for each in traces:
            _print(each, [row for row in rows if row["trace"] == each.name])
        err.print(LEGEND, style="dim", highlight=False)
    if plot is not None:
        replay_plot.plot(results, plot)


def _names(text: str, option: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidRequestError(f"{option} names nothing.")
    return names


def _told_apart(traces: list[Trace], specs: list[str]) -> list[Trace]:
    """Traces of the same name are called what they were asked for as."""
    names = [each.name for each in traces]
    return [
        each if names.count(each.name) == 1 else replace(each, name=spec)
        for each, spec in zip(traces, specs, strict=True)
    ]


def _replay(traces: list[Trace], policies: list[str], capacities: list[str], jobs: int) -> list[Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ostinato.lab.replay import replay_many

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("Replaying", total=None)
        return replay_many(
            traces,
            policies,
            capacities,
            jobs,
            lambda done, total: bar.update(task, completed=done, total=total),
        )


def _print(trace: Trace, rows: list[dict[str, Any]]) -> None:
    headings = ("tokens hit", "blocks hit", "gap", "evictions", "µs")
    columns = [Column(name, justify="right", no_wrap=True) for name in headings]
    table = Table(Column("capacity", no_wrap=True), Column("policy", no_wrap=True), *columns, box=SIMPLE)
    tokens = rows[0]["prompt_tokens"]
    table.title = f"{escape(trace.name)}: {len(trace.requests):,} requests, {tokens:,} tokens"
    for blocks in dict.fromkeys(row["capacity_blocks"] for row in rows):
        same = [row for row in rows if row["capacity_blocks"] == blocks]
        best = max((row["token_hit_rate"] for row in same if row["policy"] in CLASSICAL), default=None)
        for row in same:
            first = row is same[0]
            share = "" if row["capacity_share"] is None else f" ({100 * row['capacity_share']:.3g}%)"
            micro = row["microseconds_per_eviction"]
            table.add_row(
                f"{blocks:,}{share}" if first else "",
                row["policy"],
                f"{row['token_hit_rate']:.1%}",
                f"{row['block_hit_rate']:.1%}",
                "" if row["gap_closed"] is None else f"{row['gap_closed']:.0%}",
                f"{row['evictions']:,}",
                "" if micro is None else f"{micro:.1f}",
                style="bold" if row["policy"] in CLASSICAL and row["token_hit_rate"] == best else None,
                end_section=row is same[-1],
            )
    Console().print(table)


def train_predictor(
    model: Annotated[
        str, typer.Argument(help="A name from `ostinato models`, a Hugging Face folder, or a .gguf file.")
    ],
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...", help="Logs of chat requests (.jsonl), or tau-bench trajectories (.json)."
        ),
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="The file to write, for `serve --predictor`.")],
    epochs: Annotated[int, typer.Option(min=1, help="Times to go through the examples.")] = 20,
    seed: Annotated[int, typer.Option(help="Splits the sessions and begins the network.")] = 0,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32: as the server's.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a predictor of which sessions come back, on logs of what sessions did."""
    from rich.progress import MofNCompleteColumn, Progress

    from ostinato.lab.predictor_logs import read_logs
    from ostinato.terminal import open_engine

    if not out.absolute().parent.is_dir():
        raise InvalidRequestError(f"There is no folder {out.parent} to write {out.name} to.")
    sessions = read_logs(logs)  # before the model loads: what is wrong with them is known in no time
    with open_engine(model, dtype=dtype) as engine:
        from ostinato.lab import predictor as lab

        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
            reading, training = (
                bar.add_task("Reading", total=len(sessions)),
                bar.add_task("Training", total=epochs),
            )
            examples = lab.read(
                engine, sessions, lambda done, total: bar.update(reading, completed=done, total=total)
            )
            predictor, report = lab.train(
                examples,
                fingerprint=engine.fingerprint,
                model=engine.model_name,
                epochs=epochs,
                seed=seed,
                progress=lambda done, total: bar.update(training, completed=done, total=total),
            )
    predictor.save(out)
    if as_json:
        print(json.dumps(report.to_json()))
    else:
        _print_predictor(report)
    if not predictor.trained:
        err.print(
            "[yellow]warning:[/] it does not do better than the base rate beyond doubt: a server that loads it "
            "predicts nothing until it has learned more."
        )


def _print_predictor(report: PredictorReport) -> None:
    held = report.held_out
    table = Table("examples", "held out", "come back", "log loss", "base rate's", "AUC", box=SIMPLE)
    table.add_row(
        f"{report.examples:,}",
        f"{held.examples:,}",
        f"{held.base_rate:.1%}",
        f"{held.loss:.3f}",
        f"{held.base_loss:.3f}",
        "-" if report.auc is None else f"{report.auc:.3f}",
    )
    Console().print(table)
    bins = Table("predicted", "came back", "sessions", box=SIMPLE)
    for each in report.calibration:
        bins.add_row(f"{each.predicted:.1%}", f"{each.returned:.1%}", f"{each.examples:,}")
    Console().print(bins)
    if report.left_out:
        err.print(f"Left out: {report.left_out:,} (prompts too long for the model).")
