"""What every dialect's answers have in common: whole, or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ostinato.engine.request import Chunk, Reply
from ostinato.prompt.resolve import Placement
from ostinato.server.errors import ErrorAnswer

Json = dict[str, Any]


class Answer(ABC):
    """The answer to one request, in the words of its API. An index says which of its choices is meant."""

    placements: tuple[Placement, ...] | None = None
    """Where the parts of the prompt stand, if that is over a schema. Set once the prompt is laid out."""
    explain: Callable[[], Json | None] | None = None
    """Explains what was cached of the prompt, if that is asked for."""

    id: str

    @abstractmethod
    def whole(self, replies: Sequence[Reply]) -> Json:
        """The body of a response that is not streamed."""

    @abstractmethod
    def events(self, index: int, chunk: Chunk, *, last: bool) -> Iterator[str]:
        """The events that bring one piece of a choice; `last` is the very last of all."""

    @abstractmethod
    def end(self) -> Iterator[str]:
        """The events that end a stream in which nothing went wrong."""

    @abstractmethod
    def failed(self, error: ErrorAnswer) -> str:
        """The event that ends a stream in which something did."""

    def report(self) -> Json:
        """What only this server tells, once an answer."""
        told: Json = {}
        if self.placements is not None:
            told["placements"] = [asdict(placement) for placement in self.placements]
        if self.explain is not None:
            told["cache"] = self.explain()
        return {"ostinato": told} if told else {}


def event(data: Json, name: str | None = None) -> str:
    """A server-sent event."""
    # ASCII only: some clients split lines at U+2028 and the like, which JSON may hold unescaped.
    text = f"data: {json.dumps(data, separators=(',', ':'))}\n\n"
    return text if name is None else f"event: {name}\n{text}"
