"""First requests of sessions, read with their text from logs, and whether a second one followed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ostinato.engine.predictor import DEFAULT_HORIZON, ENOUGH_GAPS, QUANTILE
from ostinato.errors import OstinatoError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Session:
    """A session's first request. Those of one `group` are alike: all of them are learned from, or none."""

    messages: Messages
    returned: bool
    group: str


def read_logs(paths: Sequence[Path]) -> list[Session]:
    """The sessions of JSONL logs of chat requests, and of JSON files of tau-bench trajectories."""
    sessions: list[Session] = []
    for path in paths:
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OstinatoError(f"{path} cannot be read: {error}.") from error
        found = _trajectories(text) if text.lstrip().startswith("[") else _requests(path, text)
        if not found:
            raise OstinatoError(
                f"{path} holds no session whose outcome it tells: give a log of chat requests, one JSON object with "
                "`messages` a line, or tau-bench trajectories."
            )
        sessions += found
    return sessions


def _trajectories(text: str) -> list[Session]:
    """A JSON list of {"traj": [{"role", "content"}]}. Each assistant message answers one request."""
    sessions: list[Session] = []
    try:
        for entry in json.loads(text):
            messages: Messages = entry["traj"]
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            if answers and answers[0] > 0:
                first = messages[: answers[0]]
                sessions.append(Session(first, len(answers) > 1, _digest(first)))
    except (ValueError, KeyError, TypeError) as error:
        raise OstinatoError(
            f"These are no tau-bench trajectories, a list of {{traj: [{{role, content}}]}}: {error!r}."
        ) from error
    return sessions


def _requests(path: Path, text: str) -> list[Session]:
    """Requests in order of time, one a line: an OpenAI request's body, or an object that has it as `body`."""
    first: dict[str, tuple[float | None, Messages]] = {}
    gaps: dict[str, float] = {}
    returned: set[str] = set()
    tips: dict[str, str] = {}
    latest = 0.0
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            body = next(
                (entry[key] for key in ("body", "request") if isinstance(entry.get(key), dict)), entry
            )
            messages: Messages = body["messages"]
            roles = [message["role"] for message in messages]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OstinatoError(
                f"{path}, line {number}: no chat request, a JSON object with `messages`."
            ) from error
        if not roles:
            continue
        time = _time(entry, body)
        latest = max(latest, time or 0.0)
        name = _name(entry, body) or _continued(messages, tips) or f"#{number}"
        tips[_digest(messages)] = name
        if name not in first:
            first[name] = (time, messages)
            continue
        begun = first[name][0]
        if name not in returned and time is not None and begun is not None:
            gaps[name] = time - begun
        returned.add(name)
    known = sorted(gaps.values())
    horizon = known[int(QUANTILE * len(known))] if len(known) >= ENOUGH_GAPS else DEFAULT_HORIZON
    # Of sessions that began shortly before the log ends, only those that came back at once would be known.
    return [
        Session(messages, name in returned, _digest(messages))
        for name, (time, messages) in first.items()
        if time is None or latest - time > horizon
    ]


def _name(entry: dict[str, Any], body: dict[str, Any]) -> str:
    for place in (body.get("metadata"), entry.get("metadata"), body, entry):
        if isinstance(place, dict) and isinstance(place.get("session_id"), str):
            return place["session_id"]
    named = body.get("prompt_cache_key") or body.get("user")
    return named if isinstance(named, str) else ""


def _continued(messages: Messages, tips: dict[str, str]) -> str:
    """The session of the longest earlier request that these messages continue."""
    for end in range(len(messages) - 1, 0, -1):
        if messages[end]["role"] == "assistant" and (name := tips.get(_digest(messages[:end]))):
            return name
    return ""


def _time(entry: dict[str, Any], body: dict[str, Any]) -> float | None:
    for place in (entry, body):
        for key in ("timestamp", "time", "created", "created_at"):
            value = place.get(key)
            if isinstance(value, int | float):
                return value / 1000 if value > 1e11 else float(value)  # milliseconds since 1970
            if isinstance(value, str):
                try:
                    return datetime.fromisoformat(value).timestamp()
                except ValueError:
                    continue
    return None


def _digest(messages: Messages) -> str:
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()
