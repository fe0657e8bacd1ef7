"""tau-bench trajectories: a JSON list of {task_id, trial, traj: [{role, content, tool_calls?}]}.

Each message of the assistant's is a request, whose prompt is all before it. The file has no times: those here are
made up. It has text, which is hashed in blocks of 16 tokens as `text` makes them, without a model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostinato.lab.chain import Chain
from ostinato.lab.trace import Trace, TraceError, TraceRequest, in_order
from ostinato.lab.traces.entries import json_value, reading
from ostinato.lab.traces.text import add_content, add_message, begin_message

BLOCK_SIZE = 16


def read_tau_bench(path: Path, *, gap: float = 10.0, seed: int = 0) -> Trace:
    """Sessions start as a Poisson process, `gap` seconds apart on average; gaps between turns are log-normal."""
    entries = json_value(path)
    if not isinstance(entries, list):
        raise TraceError(f"{path} is no list of trajectories.")
    times = random.Random(seed)
    start = 0.0
    requests: list[TraceRequest] = []
    for number, entry in enumerate(entries):
        with reading(f"{path}, trajectory {number}"):
            session = f"{entry.get('task_id', number)}/{entry.get('trial', 0)}"
            requests += _requests(entry["traj"], session, start, times)
        start += times.expovariate(1 / gap) if gap else 0.0
    return Trace(path.stem, BLOCK_SIZE, in_order(requests))


def _requests(
    messages: list[dict[str, Any]], session: str, time: float, times: random.Random
) -> Iterator[TraceRequest]:
    chain = Chain(BLOCK_SIZE)
    for message in messages:
        if message["role"] != "assistant":
            add_message(chain, message)
            # A user reads and types; a tool answers at once.
            slow = message["role"] == "user"
            time += times.lognormvariate(3.0, 0.8) if slow else times.lognormvariate(0.7, 0.6)
            continue
        begin_message(chain, "assistant")
        prompt = chain.copy()
        add_content(chain, message)
        yield TraceRequest(
            time,
            tuple(prompt.keys),
            prompt.tokens,
            tuple(prompt.kinds),
            chain.behind(prompt),
            session,
            agentic=True,
            templated=prompt.templated,
        )
