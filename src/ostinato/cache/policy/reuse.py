"""Reuse: what is learned of who asks for blocks again, and when.

A block is reused by its own session, whose next turn is due some time after the last, or by others. These are two
causes, as in competing risks, and are learned apart: of the first, hazard rates for each class of blocks (see
`survival`); of the second, a rate for each block, from how often others have used it so far.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

import numpy as np

from ostinato.cache.policy.run import Run
from ostinato.cache.policy.survival import Array, cluster, gittins, hazards, numbered, ratios
from ostinato.cache.policy.window import Window
from ostinato.cache.use import TokenType, Use

LATE = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)
"""Beginnings of parts of a wait for others, as multiples of the time in which their uses so far were counted."""
PARTS = len(LATE)
_ENDS: Array = np.array([*LATE[1:], 2 * LATE[-1]])
_GROWN: Array = np.log1p(np.array(LATE))
UNSEEN = 0.5
"""Uses by others that every block is credited with (Jeffreys' prior of a rate)."""
PATIENCE = 4
"""Turnovers of the cache in which that half use would have come."""
RECENT = 16
"""Of more uses by others than this the older half is forgotten."""
APPLICATIONS = 64
KNOWN = 4
"""Sessions after which what they begin with counts as an application."""
STARTERS = 1024
"""Beginnings whose sessions are counted at a time."""


class Returning(NamedTuple):
    """What tells whether, and how soon, a block is asked for by the session that used it last."""

    kind: TokenType
    agentic: bool
    first: bool
    """It is the session's first request: of that the next three say more than of a later one."""
    begins: TokenType | None
    """Of a first request: what its prompt begins with."""
    named: bool
    """Of a first request: whether the client named the session."""
    returns: int
    """Quarter of the predicted probability that the session comes back; -1 where nothing predicts it."""
    application: int
    """Of a reply: whose it is. Whether replies are sent back, and thoughts with them, is up to the application."""
    partial: bool
    """It holds fewer tokens than a block can: the end of a prompt, which seldom comes back as it is."""


class Sharing(NamedTuple):
    """What tells whether a block is asked for by other sessions than the one that used it last."""

    kind: TokenType
    first: bool
    begins: TokenType
    others: int
    """How often others did so far: not yet, once, more often."""


class Past:
    """Who has used a block's key so far, in the cache or before it was evicted."""

    __slots__ = ("latest", "others", "since")

    def __init__(self, use: Use) -> None:
        self.latest = use
        self.others = 0.0
        """How often a session used it that was not the one before."""
        self.since = use.time
        """When the counting of `others` began."""

    def add(self, use: Use) -> None:
        if use.session != self.latest.session:
            self.others += 1
            if self.others > RECENT:
                self.others /= 2
                self.since += (use.time - self.since) / 2
        self.latest = use

    @property
    def known(self) -> float:
        """Seconds in which `others` were counted, up to the latest use."""
        return max(0.0, self.latest.time - self.since)  # who arrived first may be served last


class Reuse:
    """What a cache of `blocks` blocks learns."""

    def __init__(self, blocks: int) -> None:
        self.window = Window(blocks)
        self.worth: list[list[float]] = []
        """Gittins index (reuses per second) of the own session's return, of every class at every age bin."""
        self.ratio: list[list[float]] = []
        """Uses by others that come for each that the past lets expect, of every class, by how late it is."""
        self.fits = 0
        self._blocks = blocks
        self.returning: dict[Returning, int] = {}
        self.sharing: dict[Sharing, int] = {}
        self._patience = 1.0
        """Seconds of `PATIENCE` turnovers."""
        self._fitted = (0.0, 0)
        """Time and inserted blocks at the last fit."""
        self._sessions: OrderedDict[bytes, int] = OrderedDict()
        self._applications: OrderedDict[bytes, int] = OrderedDict()

    def arrive(self, use: Use) -> None:
        """Note what application a request is of."""
        if use.starts in self._applications:
            self._applications.move_to_end(use.starts)
        elif use.starts and use.turn == 1:
            count = self._sessions[use.starts] = self._sessions.pop(use.starts, 0) + 1
            if count >= KNOWN:
                del self._sessions[use.starts]
                full = len(self._applications) >= APPLICATIONS
                number = self._applications.popitem(last=False)[1] if full else len(self._applications) + 1
                self._applications[use.starts] = number
            elif len(self._sessions) > STARTERS:
                self._sessions.popitem(last=False)

    def classes(self, kind: TokenType, use: Use, others: float, *, partial: bool) -> tuple[int, int]:
        """The two classes of a block by its kind and use, as numbers."""
        first = use.turn == 1
        returning = Returning(
            kind,
            use.agentic,
            first,
            use.begins if first else None,
            first and not use.session.startswith("#"),
            -1 if use.returns is None else int(use.returns * 4),
            self._applications.get(use.starts, 0) if kind == "decode" else 0,
            partial,
        )
        sharing = Sharing(kind, first, use.begins, 0 if others == 0 else 1 if others < 2 else 2)
        return (
            self.returning.setdefault(returning, len(self.returning)),
            self.sharing.setdefault(sharing, len(self.sharing)),
        )

    def add(self, key: bytes, past: Past, returning: int, sharing: int) -> None:
        """A block of these two classes was used."""
        use = past.latest
        self.window.add(key, use.time, use.session, returning, sharing, past.others + UNSEEN, past.known)

    def fit(self, now: float) -> None:
        """Learn from what the window has seen."""
        seen = self.window.watched()
        reused = np.isfinite(seen.gap)
        age: Array = np.maximum(np.where(reused, seen.gap, now - seen.start), 0)
        one = cluster(seen.start, seen.returning)
        classes = list(self.returning)
        strata = numbered([each.agentic for each in classes])
        self.worth = gittins(hazards(seen.returning, age, reused & seen.same, classes, strata, one)).tolist()
        self._pace(now)
        # While no use comes the rate falls, and its integral is the logarithm of how late that makes it.
        late = age / (seen.known + self._patience)
        classes = [(*each, part) for each in self.sharing for part in range(PARTS)]
        of = seen.sharing * PARTS + np.searchsorted(LATE, late, side="right") - 1
        grown = np.log1p(late)
        expected = np.zeros(len(classes))
        for part, end in enumerate([*_GROWN[1:], math.inf]):
            passed = np.clip(grown, _GROWN[part], end) - _GROWN[part]
            expected[part::PARTS] = np.bincount(seen.sharing, seen.odds * passed, len(self.sharing))
        came = np.bincount(of, reused & ~seen.same, len(classes)).astype(np.float64)
        self.ratio = _best(ratios(came, expected, classes, one).reshape(-1, PARTS)).tolist()
        self.fits += 1

    def value(self, run: Run, now: float) -> float:
        """Reuses per second that each block of `run` is worth."""
        returning, sharing = run.of
        if returning >= len(self.worth) or sharing >= len(self.ratio):
            return math.inf  # nothing is known of it yet
        known = run.known + self._patience
        ratio = self.ratio[sharing][bisect_right(LATE, (now - run.time) / known) - 1]
        return self.worth[returning][run.bin] + ratio * (run.others + UNSEEN) / known

    def _pace(self, now: float) -> None:
        """Learn how long a turnover takes."""
        time, inserted = self._fitted
        new = self.window.inserted - inserted
        if new and now > time:
            patience = PATIENCE * self._blocks * (now - time) / new
            self._patience += (patience - self._patience) / (4 if self.fits else 1)
            self._fitted = now, self.window.inserted


def _best(ratio: Array) -> Array:
    """From each part of a wait on, the most uses there are for its length, over all times to wait, [classes, PARTS]."""
    gain = ratio * (np.log1p(_ENDS) - _GROWN)
    length = _ENDS - np.array(LATE)
    best = np.empty_like(ratio)
    for part in range(PARTS):
        best[:, part] = (np.cumsum(gain[:, part:], axis=1) / np.cumsum(length[part:])).max(axis=1)
    return best
