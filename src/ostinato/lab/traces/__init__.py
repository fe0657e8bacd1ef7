"""Readers of request traces, one file for each format. Which one fits is seen from the file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.lab.trace import Trace, TraceError
from ostinato.lab.traces.agent import START_GAP, read_agents
from ostinato.lab.traces.bailian import read_bailian
from ostinato.lab.traces.entries import key_of
from ostinato.lab.traces.mooncake import read_mooncake
from ostinato.lab.traces.openai_log import read_openai_log
from ostinato.lab.traces.recording import TraceWriter, read_recording, write_trace
from ostinato.lab.traces.tau_bench import read_tau_bench
from ostinato.lab.workload import MIXES, mixed

__all__ = [
    "TraceWriter",
    "key_of",
    "load",
    "read_agents",
    "read_bailian",
    "read_mooncake",
    "read_openai_log",
    "read_recording",
    "read_tau_bench",
    "read_trace",
    "write_trace",
]

GENERATED = "workload:"

FORMATS = """\
an Ostinato recording (JSON lines, the first of them {"ostinato_trace": 1, …}),
Mooncake (JSON lines with timestamp, input_length, hash_ids),
Bailian (JSON lines with chat_id, parent_chat_id, timestamp, hash_ids),
an OpenAI request log (JSON lines with timestamp or created, and messages),
kv-cache-tester sessions (JSON with tool_tokens, system_tokens, requests; a file or a folder of them),
tau-bench trajectories (a JSON list of objects with traj)"""


def read_trace(path: Path, *, gap: float | None = None, seed: int = 0) -> Trace:
    """Read the trace in a file or folder.

    `gap` and `seed` set the mean seconds between, and the random, starts of sessions whose file does not say when they
    started.
    """
    if not path.exists():
        raise TraceError(
            f"There is no file or folder {path}. Workloads are made up by workload:{next(iter(MIXES))} and others."
        )
    if path.is_dir():
        return read_agents(path, gap=START_GAP if gap is None else gap, seed=seed)
    try:
        with path.open(encoding="utf-8") as lines:
            first = next((line for line in lines if line.strip()), "")
        entry = _parsed(first)
        if entry is None:  # no JSON lines: one JSON value of many lines
            entry = _parsed(path.read_text("utf-8"))
    except UnicodeDecodeError:
        raise TraceError(f"{path} is no trace: it is not UTF-8 text.") from None
    match entry:
        case {"ostinato_trace": _}:
            return read_recording(path)
        case {"chat_id": _, "hash_ids": _}:
            return read_bailian(path)
        case {"timestamp": _, "hash_ids": _}:
            return read_mooncake(path)
        case {"requests": [*_]}:
            return read_agents(path, gap=START_GAP if gap is None else gap, seed=seed)
        case {"messages": _} | {"request": {"messages": _}} | {"body": {"messages": _}}:
            return read_openai_log(path)
        case [{"traj": _}, *_]:
            return read_tau_bench(path, gap=10.0 if gap is None else gap, seed=seed)
        case _:
            raise TraceError(f"{path} is no trace that can be read. These can:\n{FORMATS}")


def load(spec: str) -> Trace:
    """A trace by name: a path, or `workload:` and a mix; with options behind a question mark.

    Options of workloads: seed, requests, rate, named. Of files whose sessions have no start: gap, seed.
    """
    head, _, tail = spec.partition("?")
    if Path(spec).exists():
        head, tail = spec, ""
    if head.startswith(GENERATED):
        options = _options(spec, tail, {"seed": int, "requests": int, "rate": float, "named": float})
        return replace(mixed(mix=head.removeprefix(GENERATED), **options), name=spec)
    return read_trace(Path(head), **_options(spec, tail, {"gap": float, "seed": int}))


def _options(spec: str, text: str, types: dict[str, type[int] | type[float]]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in filter(None, text.split("&")):
        name, _, value = part.partition("=")
        try:
            options[name] = types[name](value)
            if options[name] < 0:
                raise ValueError
        except KeyError:
            raise TraceError(f"{spec}: there is no option '{name}'. There are: {', '.join(types)}.") from None
        except ValueError:
            raise TraceError(f"{spec}: '{name}' must be a number, 0 or more, not '{value}'.") from None
    return options


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None
