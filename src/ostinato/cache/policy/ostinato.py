"""The policy of our own: evict the block whose stay is worth least.

Blocks fall into classes by what is known of them. For every class the policy learns online how reuse is spread over
the time since the last use: hazard rates as in survival analysis (Kaplan and Meier 1958), so that reuse that has not
come yet counts as what it is, and evicted keys go on being watched. The worth of a block is the Gittins index of
keeping it: the best rate of reuse per second of stay over all times to stay from now on (Gittins 1979; LHD, NSDI
2018, ranks by a similar rate). A session's block that is not due yet is worth less than one that is.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import TokenType, Use

BINS = 40
"""Ages fall into bins half an octave wide, from zero on."""
WATCHED = 1 << 15
"""Uses of blocks that are watched at a time."""
COVER = 32
"""Where a cache is large, a share of its keys is watched, such that this many times its blocks are covered."""
PRIOR = 30.0
"""How many uses of a class count as much as what similar classes say."""
WEAK = 30.0
"""How many reuses of a feature's value count as much as no effect of it."""
WEAKER = 300.0
"""How many uses of a stratum count as much as what all blocks say."""
STEPS = 2
"""Steps in which worth is compared, per octave."""
FIT_EVERY = 2048
"""Releases between two fits."""
SORT_EVERY = 64
"""Releases between two looks at the ages of the oldest blocks."""

Array = NDArray[np.float64]
_EDGES: Array = 2.0 ** (np.arange(BINS + 1) / 2) - 1
_WIDTHS: Array = np.diff(_EDGES)
_ENDS: list[float] = _EDGES[1:].tolist()
_KERNEL: Array = np.array([0.25, 0.5, 0.25])


def age_bin(age: float) -> int:
    return min(BINS - 1, bisect_right(_ENDS, age))


class Traits(NamedTuple):
    """What blocks of one class have in common."""

    kind: TokenType
    agentic: bool
    begins: TokenType
    turn: int
    named: bool
    """The client named the session."""
    uses: int
    partial: bool
    """Holds fewer tokens than a block can: the end of a prompt, which seldom comes back as it is."""
    returns: int
    """Quarter of the predicted probability that the session comes back; -1 where nothing predicts it."""


class Place:
    """Blocks of one class and one bin of ages, in LRU order."""

    __slots__ = ("bin", "group", "queue", "worth")

    def __init__(self, group: int, at: int) -> None:
        self.group, self.bin = group, at
        self.queue = Queue()
        self.worth = 0.0


class Ostinato(Policy):
    """The policy for a cache of `blocks` blocks."""

    def __init__(self, blocks: int) -> None:
        self._now = 0.0
        self._uses = Uses(max(1, COVER * blocks // WATCHED))
        self._worth: Array = np.zeros((0, BINS))
        self._groups: dict[Traits, int] = {}
        self._places: dict[tuple[int, int], Place] = {}
        self._ranked: list[Place] = []
        self._of: dict[Block, Place] = {}
        self._largest = 1
        self._releases = 0
        self._sorted = 0.0

    def arrive(self, use: Use) -> None:
        self._now = max(self._now, use.time)

    def insert(self, block: Block) -> None:
        self._largest = max(self._largest, block.size)

    def hit(self, block: Block, use: Use) -> None:
        self._take(block)

    def release(self, block: Block) -> None:
        group = self._group(block)
        assert block.key is not None
        self._uses.add(block.key, group, block.use.time)
        self._put(block, group)
        self._releases += 1
        if self._releases % FIT_EVERY == 0 or self._releases == FIT_EVERY // 8:
            self._worth = self._uses.worth(list(self._groups), self._now)
            self._sort()
        elif self._releases % SORT_EVERY == 0 and self._sorted < self._now:
            self._sort()

    def leaf(self, block: Block) -> None:
        place = self._of.get(block)
        if place is not None:
            place.queue.ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._take(block)

    def victim(self) -> Block | None:
        for place in self._ranked:
            block = place.queue.first()
            if block is not None:
                return block
        return None

    # -- classes ----------------------------------------------------------------------------------------

    def _group(self, block: Block) -> int:
        use = block.use
        name = Traits(
            block.kind,
            use.agentic,
            use.begins,
            min(use.turn, 3),
            not use.session.startswith("#"),
            min(block.uses, 5),
            block.size < self._largest,
            -1 if use.returns is None else int(use.returns * 4),
        )
        number = self._groups.get(name)
        if number is None:
            number = self._groups[name] = len(self._groups)
        return number

    # -- order ------------------------------------------------------------------------------------------

    def _put(self, block: Block, group: int) -> None:
        place = self._place(group, age_bin(self._now - block.use.time))
        place.queue.append(block)
        self._of[block] = place

    def _place(self, group: int, at: int) -> Place:
        place = self._places.get((group, at))
        if place is None:
            place = self._places[group, at] = Place(group, at)
            self._rank(place)
            insort(self._ranked, place, key=_worth_then_age)
        return place

    def _take(self, block: Block) -> None:
        place = self._of.pop(block, None)
        if place is not None:
            place.queue.remove(block)

    def _rank(self, place: Place) -> None:
        known = place.group < len(self._worth)
        place.worth = float(self._worth[place.group, place.bin]) if known else math.inf

    def _sort(self) -> None:
        """Move blocks on to the bin of their age, and rank the places anew."""
        self._sorted = self._now
        for place in list(self._places.values()):
            if place.bin == BINS - 1:
                continue
            older = place.queue.take_unused_since(self._now - _ENDS[place.bin])
            # Millions of moves in a long trace: at once for all blocks of a request.
            for time, blocks in groupby(older, key=_time):
                moved = list(blocks)
                target = self._place(place.group, age_bin(self._now - time))
                target.queue.extend(moved)
                self._of.update(dict.fromkeys(moved, target))
        for key in [key for key, place in self._places.items() if not len(place.queue)]:
            del self._places[key]
        for place in self._places.values():
            self._rank(place)
        self._ranked = sorted(self._places.values(), key=_worth_then_age)


def _time(block: Block) -> float:
    return block.use.time


def _worth_then_age(place: Place) -> tuple[float, int]:
    return place.worth, -place.bin


class Uses:
    """The latest uses of a sample of keys, each with the time to the next one, if that has come."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._start = [0.0] * WATCHED
        self._gap = [math.inf] * WATCHED
        self._group = [0] * WATCHED
        self._key: list[bytes] = [b""] * WATCHED
        self._latest: dict[bytes, int] = {}
        self._count = 0

    def add(self, key: bytes, group: int, time: float) -> None:
        if self._stride > 1 and crc32(key) % self._stride:
            return
        before = self._latest.get(key)
        if before is not None:
            self._gap[before] = time - self._start[before]
        at = self._count % WATCHED
        if self._count >= WATCHED and self._latest.get(self._key[at]) == at:
            del self._latest[self._key[at]]
        self._start[at], self._gap[at], self._group[at], self._key[at] = time, math.inf, group, key
        self._latest[key] = at
        self._count += 1

    def worth(self, names: list[Traits], now: float) -> Array:
        """Steps of the Gittins index (reuses per second) of every class at every age bin, [classes, BINS]."""
        count = min(self._count, WATCHED)
        gap, start = np.array(self._gap[:count]), np.array(self._start[:count])
        reused = np.isfinite(gap)
        age = np.maximum(np.where(reused, gap, now - start), 0)
        bins = np.minimum(BINS - 1, (2 * np.log2(1 + age)).astype(np.int64))
        cell = np.array(self._group[:count]) * BINS + bins
        size = len(names) * BINS
        events = np.bincount(cell, reused, size).reshape(-1, BINS).astype(np.float64)
        pending = np.bincount(cell, ~reused, size).reshape(-1, BINS).astype(np.float64)
        # A use that is pending in a bin is at risk for half of it, on the average.
        risk: Array = np.cumsum((events + pending)[:, ::-1], axis=1)[:, ::-1] - pending / 2
        events, risk = _smooth(events), _smooth(risk)
        return _gittins(_hazards(events, risk, names))


def _smooth(rows: Array) -> Array:
    half = len(_KERNEL) // 2
    padded = np.pad(rows, ((0, 0), (half, half)), mode="edge")
    smooth = np.zeros_like(rows)
    for at, weight in enumerate(_KERNEL):
        smooth += weight * padded[:, at : at + BINS]
    return smooth


def _hazards(events: Array, risk: Array, names: list[Traits]) -> Array:
    """Probability of reuse in each bin of those that reach it, [classes, BINS].

    A class with few uses takes after its like: hazards proportional to those of all, by a factor for each feature
    (fitted by iterative scaling, as in log-linear models).
    """
    overall = events.sum(0) / np.maximum(risk.sum(0), 1)
    strata = np.unique([hash((name.agentic, min(name.uses, 3))) for name in names], return_inverse=True)[1]
    member = np.zeros((strata.max() + 1, len(names)))
    member[strata, np.arange(len(names))] = 1
    shape = ((member @ events + WEAKER * overall) / (member @ risk + WEAKER))[strata]
    expected = (risk * shape).sum(1)
    seen = events.sum(1)
    factor = np.ones(len(names))
    features = list(zip(*names, strict=True))
    levels = [np.unique([hash(value) for value in values], return_inverse=True)[1] for values in features]
    for _ in range(4):
        for level in levels:
            ratio = (np.bincount(level, seen) + WEAK) / (np.bincount(level, factor * expected) + WEAK)
            factor *= ratio[level]
    similar = np.minimum(shape * factor[:, None], 0.99)
    return np.minimum((events + PRIOR * similar) / (risk + PRIOR), 0.999)


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
