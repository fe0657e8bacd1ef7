"""Mooncake (FAST 2025): JSON lines of `timestamp` in ms, `input_length`, `hash_ids` of chained blocks of 512 tokens."""

from __future__ import annotations

from pathlib import Path

from ostinato.lab.trace import Trace, TraceRequest, in_order
from ostinato.lab.traces.entries import json_lines, number, prompt, reading, with_templates

BLOCK_SIZE = 512


def read_mooncake(path: Path) -> Trace:
    """Neither types nor sessions are in the file."""
    requests: list[TraceRequest] = []
    for where, entry in json_lines(path):
        with reading(where):
            keys, tokens = prompt(entry, BLOCK_SIZE)
            requests.append(TraceRequest(number(entry, "timestamp") / 1000, keys, tokens))
    return Trace(path.stem, BLOCK_SIZE, in_order(with_templates(requests)))
