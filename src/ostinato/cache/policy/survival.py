"""Survival: how likely blocks of a class are to be reused at each age, and what that makes keeping them worth.

Hazard rates as in survival analysis (Kaplan and Meier 1958), so that a reuse that has not come yet counts as what it
is. The worth of a block is the Gittins index of keeping it: the best rate of reuse per second of stay over all times
to stay from now on (Gittins 1979; LHD, NSDI 2018, ranks by a similar rate).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

BINS = 40
"""Ages fall into bins half an octave wide, from zero on."""
PRIOR = 4.0
"""How many requests a class must have seen to count as much as what similar classes say."""
WEAK = 4.0
"""How many requests that reused a feature's value count as much as no effect of it."""
WEAKER = 40.0
"""How many requests of a stratum count as much as what all blocks say."""

Array = NDArray[np.float64]
Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]
_EDGES: Array = 2.0 ** (np.arange(BINS + 1) / 2) - 1
_WIDTHS: Array = np.diff(_EDGES)
ENDS: list[float] = _EDGES[1:].tolist()
"""Age at which each bin ends."""
_KERNEL: Array = np.array([0.25, 0.5, 0.25])


def age_bin(age: float) -> int:
    return min(BINS - 1, bisect_right(ENDS, age))


def hazards(
    of: Numbers,
    age: Array,
    reused: Flags,
    classes: Sequence[tuple[Hashable, ...]],
    strata: Numbers,
    cluster: float,
) -> Array:
    """Probability of reuse in each age bin of the blocks that reach it, [classes, BINS].

    A class with few uses takes after its like: hazards proportional to those of its stratum, by a factor for each
    feature.

    Args:
        of: class of each use, [uses].
        age: seconds to the next use where one came, else up to now, [uses].
        reused: whether one came, [uses].
        classes: the features of each class.
        strata: number of each class's stratum, [classes].
        cluster: so many uses count as one.
    """
    bins = np.minimum(BINS - 1, (2 * np.log2(1 + age)).astype(np.int64))
    cell, size = of * BINS + bins, len(classes) * BINS
    events = np.bincount(cell, reused, size).reshape(-1, BINS).astype(np.float64)
    pending = np.bincount(cell, ~reused, size).reshape(-1, BINS).astype(np.float64)
    # A use that is pending in a bin is at risk for half of it, on the average.
    risk: Array = np.cumsum((events + pending)[:, ::-1], axis=1)[:, ::-1] - pending / 2
    events, risk = _smooth(events), _smooth(risk)
    prior, weaker = PRIOR * cluster, WEAKER * cluster
    overall = events.sum(0) / np.maximum(risk.sum(0), 1)
    member = np.zeros((strata.max() + 1, len(classes)))
    member[strata, np.arange(len(classes))] = 1
    shape = ((member @ events + weaker * overall) / (member @ risk + weaker))[strata]
    factor = factors(events.sum(1), (risk * shape).sum(1), classes, cluster)
    similar = np.minimum(shape * factor[:, None], 0.99)
    return np.minimum((events + prior * similar) / (risk + prior), 0.999)


def ratios(seen: Array, expected: Array, classes: Sequence[tuple[Hashable, ...]], cluster: float) -> Array:
    """How many reuses of each class came for each that was expected, [classes]; of a class with few, from its like."""
    prior = PRIOR * cluster
    overall = float(seen.sum() / max(expected.sum(), 1e-9))
    similar = overall * factors(seen, overall * expected, classes, cluster)
    return (seen + prior * similar) / (expected + prior)


def factors(seen: Array, expected: Array, classes: Sequence[tuple[Hashable, ...]], cluster: float) -> Array:
    """By what `expected` is to be multiplied to give `seen`: the product of a factor for each feature, [classes].

    Fitted by iterative scaling, as in log-linear models (Darroch and Ratcliff 1972).
    """
    weak = WEAK * cluster
    factor = np.ones(len(classes))
    levels = [numbered(values) for values in zip(*classes, strict=True)]
    for _ in range(4):
        for level in levels:
            ratio = (np.bincount(level, seen) + weak) / (np.bincount(level, factor * expected) + weak)
            factor *= ratio[level]
    return factor


def numbered(values: Sequence[Hashable]) -> Numbers:
    """Each value's number, equal ones having the same."""
    numbers = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values])


def gittins(hazards: Array) -> Array:
    """The best rate of reuse per second of stay from each age bin on, [classes, BINS]."""
    start = np.zeros((len(hazards), 1))
    stay = np.concatenate([start + 1, np.cumprod(1 - hazards, axis=1)], axis=1)
    held = np.concatenate([start, np.cumsum((stay[:, :-1] + stay[:, 1:]) / 2 * _WIDTHS, axis=1)], axis=1)
    worth = np.empty_like(hazards)
    for b in range(BINS):
        gained = stay[:, b, None] - stay[:, b + 1 :]
        worth[:, b] = (gained / np.maximum(held[:, b + 1 :] - held[:, b, None], 1e-12)).max(axis=1)
    return worth


def _smooth(rows: Array) -> Array:
    half = len(_KERNEL) // 2
    padded = np.pad(rows, ((0, 0), (half, half)), mode="edge")
    smooth = np.zeros_like(rows)
    for at, weight in enumerate(_KERNEL):
        smooth += weight * padded[:, at : at + BINS]
    return smooth


def cluster(start: Array, of: Numbers) -> float:
    """How many uses count as one: blocks of a request and a class come back together or not at all (Kish 1965)."""
    if not len(start):
        return 1.0
    ends = np.flatnonzero(np.append((np.diff(start) != 0) | (np.diff(of) != 0), True))
    sizes = np.diff(ends, prepend=-1)
    return float((sizes**2).sum() / sizes.sum())
