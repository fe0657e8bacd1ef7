"""Ostinato's own recordings: JSON lines, the first of them {"ostinato_trace": 1, "block_size": N}.

Then one request a line. Blocks are numbered in the order in which they first come, so that a recording holds
neither text nor any hash of it; names of sessions and scopes stand in it as they were given.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

from ostinato.cache.use import TokenType
from ostinato.lab.trace import Trace, TraceError, TraceRequest
from ostinato.lab.traces.entries import fits, hash_ids, json_lines, key_of, number, reading, whole

VERSION = 1
KINDS = frozenset(get_args(TokenType))


class TraceWriter:
    """Writes requests as they come: after each, the file is a trace."""

    def __init__(self, path: Path, block_size: int) -> None:
        self._numbers: dict[bytes, int] = {}
        self._file = path.open("w", encoding="utf-8")
        self._line({"ostinato_trace": VERSION, "block_size": block_size})

    def write(self, request: TraceRequest) -> None:
        self._line(
            {
                "time": request.time,
                "tokens": request.tokens,
                "hash_ids": self._numbered(request.keys),
                "kinds": [[kind, len([*same])] for kind, same in groupby(request.kinds)],
                "reply_ids": self._numbered(request.reply_keys),
                "session": request.session,
                "agentic": request.agentic,
                "templated": request.templated,
                "scope": request.scope,
            }
        )

    def close(self) -> None:
        self._file.close()

    def _numbered(self, keys: tuple[bytes, ...]) -> list[int]:
        return [self._numbers.setdefault(key, len(self._numbers)) for key in keys]

    def _line(self, entry: dict[str, Any]) -> None:
        self._file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self._file.flush()


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace as a recording."""
    writer = TraceWriter(path, trace.block_size)
    try:
        for request in trace.requests:
            writer.write(request)
    finally:
        writer.close()


def read_recording(path: Path) -> Trace:
    lines = json_lines(path)
    where, head = next(lines)
    with reading(where):
        if head["ostinato_trace"] != VERSION:
            raise TraceError(
                f"{where}: this is a recording of version {head['ostinato_trace']}; 1 can be read."
            )
        block_size = whole(head, "block_size")
        if not block_size:
            raise ValueError("'block_size' must be 1 or more")
    requests: list[TraceRequest] = []
    for where, entry in lines:
        with reading(where):
            request = _request(entry)
            fits(request.tokens, len(request.keys), block_size)
        requests.append(request)
    return Trace(path.stem, block_size, tuple(sorted(requests, key=lambda request: request.time)))


def _request(entry: dict[str, Any]) -> TraceRequest:
    keys = tuple(map(key_of, hash_ids(entry)))
    kinds = tuple(kind for kind, blocks in entry.get("kinds", ()) for _ in range(blocks))
    if not KINDS.issuperset(kinds):
        raise ValueError(f"'kinds' has {min(set(kinds) - KINDS)!r}; there are {', '.join(sorted(KINDS))}")
    if kinds and len(kinds) != len(keys):
        raise ValueError(f"'kinds' has {len(kinds)} blocks, 'hash_ids' {len(keys)}")
    return TraceRequest(
        number(entry, "time"),
        keys,
        whole(entry, "tokens"),
        kinds,
        tuple(map(key_of, hash_ids(entry, "reply_ids"))) if "reply_ids" in entry else (),
        str(entry.get("session", "")),
        bool(entry.get("agentic", False)),
        bool(entry.get("templated", False)),
        str(entry.get("scope", "public")),
    )
