"""Reuse: what is learned of when blocks of a class are asked for again, and what keeping them is worth.

For every class it is learned online how reuse is spread over the time since the last use: hazard rates as in survival
analysis (Kaplan and Meier 1958), so that reuse that has not come yet counts as what it is, and evicted keys go on
being watched. The worth of a block is the Gittins index of keeping it: the best rate of reuse per second of stay over
all times to stay from now on (Gittins 1979; LHD, NSDI 2018, ranks by a similar rate).
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.use import TokenType

BINS = 40
"""Ages fall into bins half an octave wide, from zero on."""
WATCHED = 1 << 15
"""Uses of blocks that are watched at a time."""
COVER = 24
"""Turnovers of the cache that the window covers at least: it watches a share of the keys where it would not."""
PRIOR = 4.0
"""How many requests a class must have seen to count as much as what similar classes say."""
WEAK = 4.0
"""How many requests that reused a feature's value count as much as no effect of it."""
WEAKER = 40.0
"""How many requests of a stratum count as much as what all blocks say."""
STEPS = 2
"""Steps in which worth is compared, per octave."""

Array = NDArray[np.float64]
_EDGES: Array = 2.0 ** (np.arange(BINS + 1) / 2) - 1
_WIDTHS: Array = np.diff(_EDGES)
ENDS: list[float] = _EDGES[1:].tolist()
"""Age at which each bin ends."""
_KERNEL: Array = np.array([0.25, 0.5, 0.25])


def age_bin(age: float) -> int:
    return min(BINS - 1, bisect_right(ENDS, age))


class Traits(NamedTuple):
    """What blocks of one class have in common."""

    kind: TokenType
    agentic: bool
    begins: TokenType
    turn: int
    named: bool
    """The client named the session."""
    returns: int
    """Quarter of the predicted probability that the session comes back; -1 where nothing predicts it."""
    uses: int
    sessions: int
    """Octave of how many sessions used it, one after the other."""
    partial: bool
    """Holds fewer tokens than a block can: the end of a prompt, which seldom comes back as it is."""


class Reuse:
    """The latest uses of a sample of keys, each with the time to the next one if that has come, for a cache of
    `blocks` blocks; and what follows from them."""

    def __init__(self, blocks: int) -> None:
        self.classes: dict[Traits, int] = {}
        self.worth: Array = np.zeros((0, BINS))
        """Steps of the Gittins index (reuses per second) of every class at every age bin, [classes, BINS]."""
        self.fits = 0
        self.inserted = 0
        """Blocks that were new to the cache."""
        self._turnovers = COVER * blocks
        self._stride = 1
        self._start = array("d", [0.0]) * WATCHED  # arrays, which a fit reads without copies
        self._gap = array("d", [math.inf]) * WATCHED
        self._class = array("q", [0]) * WATCHED
        self._key: list[bytes] = [b""] * WATCHED
        self._latest: dict[bytes, int] = {}
        self._count = 0
        self._filled = 0
        """`inserted` when the window was begun."""

    def number(self, traits: Traits) -> int:
        """The class of these traits."""
        return self.classes.setdefault(traits, len(self.classes))

    def add(self, key: bytes, of: int, time: float) -> None:
        """A block of class `of` was used."""
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
        if self._count >= WATCHED and self._latest.get(self._key[at]) == at:
            del self._latest[self._key[at]]
        self._start[at], self._gap[at], self._class[at], self._key[at] = time, math.inf, of, key
        self._latest[key] = at
        self._count += 1

    def _thin(self) -> None:
        """Watch half as many keys from now on. The window has just been filled, the oldest use first."""
        self._stride *= 2
        kept = [at for at, key in enumerate(self._key) if not crc32(key) % self._stride]
        place = {at: number for number, at in enumerate(kept)}
        self._start[: len(kept)] = array("d", [self._start[at] for at in kept])
        self._gap[: len(kept)] = array("d", [self._gap[at] for at in kept])
        self._class[: len(kept)] = array("q", [self._class[at] for at in kept])
        self._key[: len(kept)] = [self._key[at] for at in kept]
        self._latest = {key: place[at] for key, at in self._latest.items() if at in place}
        self._count = len(kept)

    def fit(self, now: float) -> None:
        """Renew `worth`."""
        count = min(self._count, WATCHED)
        names = list(self.classes)
        gap: Array = np.frombuffer(self._gap)[:count]
        start: Array = np.frombuffer(self._start)[:count]
        of: NDArray[np.int64] = np.frombuffer(self._class, np.int64)[:count]
        reused = np.isfinite(gap)
        age = np.maximum(np.where(reused, gap, now - start), 0)
        bins = np.minimum(BINS - 1, (2 * np.log2(1 + age)).astype(np.int64))
        cell = of * BINS + bins
        size = len(names) * BINS
        events = np.bincount(cell, reused, size).reshape(-1, BINS).astype(np.float64)
        pending = np.bincount(cell, ~reused, size).reshape(-1, BINS).astype(np.float64)
        # A use that is pending in a bin is at risk for half of it, on the average.
        risk: Array = np.cumsum((events + pending)[:, ::-1], axis=1)[:, ::-1] - pending / 2
        events, risk = _smooth(events), _smooth(risk)
        self.worth = _gittins(_hazards(events, risk, names, _cluster(start, of)))
        self.fits += 1


def _cluster(start: Array, of: NDArray[np.int64]) -> float:
    """How many uses count as one: blocks of a request and a class come back together or not at all (Kish 1965)."""
    if not len(start):
        return 1.0
    ends = np.flatnonzero(np.append((np.diff(start) != 0) | (np.diff(of) != 0), True))
    sizes = np.diff(ends, prepend=-1)
    return float((sizes**2).sum() / sizes.sum())


def _smooth(rows: Array) -> Array:
    half = len(_KERNEL) // 2
    padded = np.pad(rows, ((0, 0), (half, half)), mode="edge")
    smooth = np.zeros_like(rows)
    for at, weight in enumerate(_KERNEL):
        smooth += weight * padded[:, at : at + BINS]
    return smooth


def _hazards(events: Array, risk: Array, names: list[Traits], cluster: float) -> Array:
    """Probability of reuse in each bin of those that reach it, [classes, BINS].

    A class with few uses takes after its like: hazards proportional to those of all, by a factor for each feature
    (fitted by iterative scaling, as in log-linear models). `cluster` uses count as one.
    """
    prior, weak, weaker = PRIOR * cluster, WEAK * cluster, WEAKER * cluster
    overall = events.sum(0) / np.maximum(risk.sum(0), 1)
    strata = np.unique([hash((name.agentic, min(name.uses, 3))) for name in names], return_inverse=True)[1]
    member = np.zeros((strata.max() + 1, len(names)))
    member[strata, np.arange(len(names))] = 1
    shape = ((member @ events + weaker * overall) / (member @ risk + weaker))[strata]
    expected = (risk * shape).sum(1)
    seen = events.sum(1)
    factor = np.ones(len(names))
    features = list(zip(*names, strict=True))
    levels = [np.unique([hash(value) for value in values], return_inverse=True)[1] for values in features]
    for _ in range(4):
        for level in levels:
            ratio = (np.bincount(level, seen) + weak) / (np.bincount(level, factor * expected) + weak)
            factor *= ratio[level]
    similar = np.minimum(shape * factor[:, None], 0.99)
    return np.minimum((events + prior * similar) / (risk + prior), 0.999)


def _gittins(hazards: Array) -> Array:
    start = np.zeros((len(hazards), 1))
    stay = np.concatenate([start + 1, np.cumprod(1 - hazards, axis=1)], axis=1)
    held = np.concatenate([start, np.cumsum((stay[:, :-1] + stay[:, 1:]) / 2 * _WIDTHS, axis=1)], axis=1)
    worth = np.empty_like(hazards)
    for b in range(BINS):
        gained = stay[:, b, None] - stay[:, b + 1 :]
        worth[:, b] = (gained / np.maximum(held[:, b + 1 :] - held[:, b, None], 1e-12)).max(axis=1)
    # Smaller differences are noise: among about equals the oldest goes.
    return np.round(STEPS * np.log2(np.maximum(worth, 1e-12))).astype(np.float64)
