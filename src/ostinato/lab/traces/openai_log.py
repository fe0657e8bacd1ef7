"""Logs of OpenAI chat requests: JSON lines with `timestamp` or `created`, and the request.

The request stands at the top, or under `request` or `body`; an answer under `response`, if there is one. Text is
hashed in blocks of 16 tokens as `text` makes them, without a model.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ostinato.lab.chain import Chain
from ostinato.lab.trace import Trace, TraceRequest, in_order
from ostinato.lab.traces.entries import json_lines, number, reading
from ostinato.lab.traces.text import add_content, add_message, add_tools, begin_message

BLOCK_SIZE = 16
MILLISECONDS = 1e11
"""Times from here on are in ms: in seconds they would be 3,000 years hence."""


def read_openai_log(path: Path) -> Trace:
    """Types are by role. Sessions are named by `metadata.session_id`, or else by `prompt_cache_key`."""
    requests: list[TraceRequest] = []
    for where, entry in json_lines(path):
        with reading(where):
            requests.append(_request(entry))
    return Trace(path.stem, BLOCK_SIZE, in_order(requests))


def _request(entry: dict[str, Any]) -> TraceRequest:
    body: dict[str, Any] = entry.get("request") or entry.get("body") or entry
    messages, tools = body["messages"], body.get("tools")
    prompt = Chain(BLOCK_SIZE)
    if tools:
        add_tools(prompt, tools)
    for message in messages:
        add_message(prompt, message)
    begin_message(prompt, "assistant")
    replied = prompt.copy()
    choices = (entry.get("response") or {}).get("choices") or ()
    if choices:
        add_content(replied, {"role": "assistant", **choices[0]["message"]})
    session = (body.get("metadata") or {}).get("session_id") or body.get("prompt_cache_key") or ""
    return TraceRequest(
        _time(entry if "timestamp" in entry or "created" in entry else body),
        tuple(prompt.keys),
        prompt.tokens,
        tuple(prompt.kinds),
        replied.behind(prompt),
        str(session),
        agentic=bool(tools) or any(message["role"] in ("tool", "function") for message in messages),
        templated=prompt.templated,
    )


def _time(entry: dict[str, Any]) -> float:
    """Seconds, from a number of seconds or milliseconds, or an ISO 8601 date."""
    name = "timestamp" if "timestamp" in entry else "created"
    value = entry[name]
    if isinstance(value, str):
        date = datetime.fromisoformat(value)
        return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    seconds = number(entry, name)
    return seconds / 1000 if seconds >= MILLISECONDS else seconds
