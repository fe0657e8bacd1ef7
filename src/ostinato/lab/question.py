"""What is asked in a measurement: passages, a question about them, and the answer that a person would give."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Question:
    """One question. `needle` is the string that a right answer holds; None if answers are free text."""

    id: str
    passages: tuple[str, ...]
    text: str
    answer: str
    needle: str | None = None


def pack(pieces: Iterable[str], count: CountTokens, limit: int, separator: str) -> list[list[int]]:
    """Consecutive pieces in groups of at most `limit` tokens, as numbers of pieces.

    A piece that is longer than that is a group of its own.
    """
    groups: list[list[int]] = []
    room = 0
    for number, piece in enumerate(pieces):
        size = count(piece + separator)
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(number)
        room -= size
    return groups


def cut(text: str, count: CountTokens, limit: int) -> list[str]:
    """The text in parts of about `limit` tokens, cut between words."""
    size = count(text)
    if size <= limit:
        return [text]
    words = text.split()
    step = max(1, len(words) * limit // size)
    return [" ".join(words[at : at + step]) for at in range(0, len(words), step)]
