"""Entries of a trace file, and what is said of those that are malformed."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostinato.lab.trace import TraceError, TraceRequest


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object on each line that is not empty, and where it stands."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                raise TraceError(f"{where}: this is no JSON ({error.msg}, column {error.colno}).") from None
            if not isinstance(entry, dict):
                raise TraceError(f"{where}: an object is needed, {{…}}.")
            yield where, entry


def json_value(path: Path) -> Any:
    """The one JSON value of a file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} is no JSON: {error}.") from None


@contextmanager
def reading(where: str) -> Generator[None]:
    """Whatever is wrong with an entry is said with where it stands."""
    try:
        yield
    except KeyError as error:
        raise TraceError(f"{where}: there is no {error}.") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TraceError(f"{where}: {error}.") from None


def number(entry: dict[str, Any], name: str) -> float:
    """A field that must be a number, 0 or more."""
    value = entry[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"'{name}' must be a number, 0 or more, not {value!r}")
    return value


def whole(entry: dict[str, Any], name: str) -> int:
    """A field that must be a whole number, 0 or more."""
    value = number(entry, name)
    if value != int(value):
        raise ValueError(f"'{name}' must be a whole number, not {value!r}")
    return int(value)


def hash_ids(entry: dict[str, Any], name: str = "hash_ids") -> list[int]:
    """A field that must be a list of whole numbers."""
    value = entry[name]
    if not isinstance(value, list) or not all(isinstance(each, int) and each >= 0 for each in value):
        raise ValueError(f"'{name}' must be a list of whole numbers, 0 or more")
    return value


def fits(tokens: int, blocks: int, block_size: int) -> None:
    """Check that a prompt of so many tokens has so many blocks; the last, if partial, may have no hash."""
    if not tokens // block_size <= blocks <= -(-tokens // block_size):
        raise ValueError(f"{tokens} tokens do not make {blocks} blocks of {block_size}")


def key_of(number: int) -> bytes:
    return number.to_bytes(8, "little")


def prompt(entry: dict[str, Any], block_size: int) -> tuple[tuple[bytes, ...], int]:
    """The keys of `hash_ids` and the tokens of `input_length`, which must fit each other."""
    keys = tuple(map(key_of, hash_ids(entry)))
    tokens = whole(entry, "input_length")
    fits(tokens, len(keys), block_size)
    return keys, tokens


def with_templates(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Mark as templated whose first block others continue differently, where a trace has no types.

    A block that begins the prompts of different sessions is nobody's own text.
    """
    continued: dict[bytes, set[bytes | str]] = {}
    for request in requests:
        if len(request.keys) > 1:
            continued.setdefault(request.keys[0], set()).add(request.session or request.keys[1])
    shared = {key for key, by in continued.items() if len(by) > 1}
    return [replace(r, templated=bool(r.keys) and r.keys[0] in shared) for r in requests]
