"""kv-cache-tester sessions: coding agents, one JSON file each, with `hash_ids` of chained blocks of 64 tokens.

Hash ids are local to a session. What is shared in life is shared here: sessions whose first prompts are of the same
model and have as many tokens of tools and of system prompt begin with the same text.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ostinato.cache.use import TokenType
from ostinato.lab.trace import Trace, TraceError, TraceRequest, in_order
from ostinato.lab.traces.entries import fits, hash_ids, json_value, number, reading, whole

START_GAP = 120.0
"""Mean seconds between the starts of sessions, whose files all begin at 0: a dozen are under way at a time."""


def read_agents(path: Path, *, gap: float = START_GAP, seed: int = 0) -> Trace:
    """The session of a file, or all of a folder; these start as a Poisson process."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path} has no .json files of sessions.")
    starts = random.Random(seed)
    start = 0.0
    requests: list[TraceRequest] = []
    sizes: dict[int, Path] = {}
    for file in files:
        session = json_value(file)
        with reading(str(file)):
            if not isinstance(session, dict) or "requests" not in session:
                raise ValueError("this is no session of an agent; those have 'requests'")
            size = whole(session, "block_size")
            if not size or (sizes.setdefault(size, file) is not file and len(sizes) > 1):
                raise ValueError(f"blocks of {size} tokens, others have {min(sizes)}")
        requests += _session(file, session, start)
        start += starts.expovariate(1 / gap) if gap else 0.0
    return Trace(path.stem, min(sizes), in_order(requests))


class _Blocks:
    """Keys and types of a session's blocks, by hash id."""

    def __init__(self, session: dict[str, Any]) -> None:
        self.name = str(session["id"])
        self.size = whole(session, "block_size")
        self.tools = whole(session, "tool_tokens")
        self.front = self.tools + whole(session, "system_tokens")
        self._known: dict[int, tuple[bytes, TokenType]] = {}

    def share(self, model: str, ids: list[int]) -> None:
        """The session's first prompt: its whole blocks of tools and system prompt are others' as well."""
        for place, each in enumerate(ids[: self.front // self.size]):
            tools = min(self.size, max(0, self.tools - place * self.size))
            kind = "tools" if 2 * tools >= self.size else "system"
            self._known[each] = _key(model, self.tools, self.front, place), kind

    def read(self, ids: list[int], replied: int, others: TokenType) -> Iterator[tuple[bytes, TokenType]]:
        """The key and type of each block. New ones are the reply to the prompt before, up to token `replied`."""
        for place, each in enumerate(ids):
            if each not in self._known:
                kind = "assistant" if (place + 0.5) * self.size < replied else others
                self._known[each] = _key(self.name, each), kind
            yield self._known[each]


def _session(file: Path, session: dict[str, Any], start: float) -> Iterator[TraceRequest]:
    with reading(str(file)):
        blocks = _Blocks(session)
        entries: list[Any] = session["requests"]
        agents = [(blocks.name, entries)]
    for name, entries in agents:  # agents that an agent started are found on the way
        before: list[int] = []
        replied = 0
        for place, entry in enumerate(entries, 1):
            with reading(f"{file}, request {place} of {name}"):
                if "requests" in entry:
                    agents.append((f"{name}/{len(agents)}", entry["requests"]))
                    continue
                ids, tokens = hash_ids(entry), whole(entry, "in")
                fits(tokens, len(ids), blocks.size)
                if not before:
                    blocks.share(str(entry["model"]), ids)
                continues = ids[: len(before)] == before
                keys = [*blocks.read(ids, replied if continues else 0, _new(entry, continues))]
                before, replied = ids, tokens + whole(entry, "out")
                yield TraceRequest(
                    start + number(entry, "t"),
                    tuple(key for key, _ in keys),
                    tokens,
                    tuple(kind for _, kind in keys),
                    session=name,
                    agentic=True,
                    templated=True,
                )


def _new(entry: dict[str, Any], continues: bool) -> TokenType:
    """The type of what a prompt adds. One that does not continue another is rewritten, and of all types."""
    types = entry.get("input_types", ())
    if "tool_result" in types and len(types) == 1:
        return "tool"
    return "user" if continues or list(types) == ["text"] else "text"


def _key(*parts: str | int) -> bytes:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
