"""Ghosts: keys of blocks that are not cached any more, for policies that learn from asking for them again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Ghosts(Generic[V]):
    """The latest `limit` keys, each with what is remembered of it."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._notes: OrderedDict[bytes, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def add(self, key: bytes, note: V) -> None:
        """Remember `key` as the latest."""
        self._notes[key] = note
        self._notes.move_to_end(key)
        if len(self._notes) > self.limit:
            self.drop()

    def take(self, key: bytes) -> V | None:
        """Forget `key`; what was remembered of it, None if it was not."""
        return self._notes.pop(key, None)

    def drop(self) -> None:
        """Forget the oldest."""
        self._notes.popitem(last=False)
