"""A window of the latest uses of blocks, each with the time to the next use of its key if that has come."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from zlib import crc32

import numpy as np

from ostinato.cache.policy.survival import Array, Flags, Numbers

WATCHED = 1 << 15
"""Uses that are watched at a time."""
COVER = 24
"""Turnovers of the cache that the window covers at least: it watches a share of the keys where it would not."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is known of each use in the window, [uses]."""

    start: Array
    """When it was."""
    gap: Array
    """Seconds to the next one; infinite while none came."""
    same: Flags
    """Whether that was of the same session."""
    returning: Numbers
    sharing: Numbers
    """Its two classes."""
    odds: Array
    """Uses by other sessions, and half a one, until then."""
    known: Array
    """Seconds in which those came."""


class Window:
    """The window for a cache of `blocks` blocks. Keys that are evicted go on being watched."""

    def __init__(self, blocks: int) -> None:
        self.inserted = 0
        """Blocks that were new to the cache."""
        self._turnovers = COVER * blocks
        self._stride = 1
        self._start = array("d", bytes(8 * WATCHED))  # arrays, which a fit reads without copies
        self._gap = array("d", [math.inf]) * WATCHED
        self._same = array("b", bytes(WATCHED))
        self._returning = array("q", bytes(8 * WATCHED))
        self._sharing = array("q", bytes(8 * WATCHED))
        self._odds = array("d", bytes(8 * WATCHED))
        self._known = array("d", bytes(8 * WATCHED))
        self._key: list[bytes] = [b""] * WATCHED
        self._session: list[str] = [""] * WATCHED
        self._latest: dict[bytes, int] = {}
        self._count = 0
        self._filled = 0
        """`inserted` when the window was begun."""

    def add(
        self, key: bytes, time: float, session: str, returning: int, sharing: int, odds: float, known: float
    ) -> None:
        """A block of these two classes was used."""
        if self._stride > 1 and crc32(key) % self._stride:
            return
        at = self._count % WATCHED
        if not at and self._count:
            if self.inserted - self._filled < self._turnovers:
                self._thin()
                at = self._count
            self._filled = self.inserted
        before = self._latest.get(key)
        if before is not None:
            self._gap[before] = time - self._start[before]
            self._same[before] = self._session[before] == session
        if self._count >= WATCHED and self._latest.get(self._key[at]) == at:
            del self._latest[self._key[at]]
        self._start[at], self._gap[at], self._key[at], self._session[at] = time, math.inf, key, session
        self._returning[at], self._sharing[at] = returning, sharing
        self._odds[at], self._known[at] = odds, known
        self._latest[key] = at
        self._count += 1

    def watched(self) -> Watched:
        """Views of the window, in no order."""
        count = min(self._count, WATCHED)
        return Watched(
            np.frombuffer(self._start)[:count],
            np.frombuffer(self._gap)[:count],
            np.frombuffer(self._same, np.bool_)[:count],
            np.frombuffer(self._returning, np.int64)[:count],
            np.frombuffer(self._sharing, np.int64)[:count],
            np.frombuffer(self._odds)[:count],
            np.frombuffer(self._known)[:count],
        )

    def _thin(self) -> None:
        """Watch half as many keys from now on. The window has just been filled, the oldest use first."""
        self._stride *= 2
        kept = [at for at, key in enumerate(self._key) if not crc32(key) % self._stride]
        place = {at: number for number, at in enumerate(kept)}
        for column in (self._start, self._gap, self._odds, self._known):
            column[: len(kept)] = array("d", [column[at] for at in kept])
        for column in (self._same, self._returning, self._sharing):
            column[: len(kept)] = array(column.typecode, [column[at] for at in kept])
        self._key[: len(kept)] = [self._key[at] for at in kept]
        self._session[: len(kept)] = [self._session[at] for at in kept]
        self._latest = {key: place[at] for key, at in self._latest.items() if at in place}
        self._count = len(kept)
