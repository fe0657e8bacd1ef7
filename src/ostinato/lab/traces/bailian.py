"""Bailian (Alibaba, 2025): JSON lines of chats' turns, with `hash_ids` of chained blocks of 16 tokens."""

from __future__ import annotations

from pathlib import Path

from ostinato.lab.trace import Trace, TraceRequest, in_order
from ostinato.lab.traces.entries import json_lines, number, prompt, reading, with_templates

BLOCK_SIZE = 16


def read_bailian(path: Path) -> Trace:
    """A session is all turns that lead back to the same first one. There are no types."""
    requests: list[TraceRequest] = []
    roots: dict[int, int] = {}
    for where, entry in json_lines(path):
        with reading(where):
            chat, parent = int(entry["chat_id"]), int(entry["parent_chat_id"])
            # A parent from before the trace began is a root itself.
            root = roots[chat] = chat if parent < 0 else roots.get(parent, parent)
            keys, tokens = prompt(entry, BLOCK_SIZE)
            requests.append(TraceRequest(number(entry, "timestamp"), keys, tokens, session=str(root)))
    return Trace(path.stem, BLOCK_SIZE, in_order(with_templates(requests)))
