"""Readers of request traces. Each turns one file format into a `Trace`."""

from __future__ import annotations

import json
from pathlib import Path

from ostinato.lab.trace import Trace, TraceRequest


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little")


def read_mooncake(path: Path) -> Trace:
    """Mooncake (FAST 2025): `timestamp` in ms, `input_length`, `hash_ids` of chained blocks of 512 tokens."""
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            keys = tuple(key_of(number) for number in entry["hash_ids"])
            requests.append(TraceRequest(entry["timestamp"] / 1000, keys, entry["input_length"]))
    return Trace(path.stem, 512, tuple(requests))
