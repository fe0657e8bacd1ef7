"""How long sessions pause between turns: a log-normal distribution, fitted online to gaps of which many are not over."""

from __future__ import annotations

import math
from collections import OrderedDict

import numpy as np

KEPT = 8192
REFIT = 256
SQRT2 = math.sqrt(2)
_GRID = np.linspace(-8, 8, 1025)


def tail(z: float) -> float:
    """P(Z > z) for a standard normal Z."""
    return 0.5 * math.erfc(z / SQRT2)


_TAILS = np.array([tail(z) for z in _GRID])


class TurnGaps:
    """Maximum likelihood for the last `KEPT` gaps, by expectation maximisation.

    A session that has not come back may still do so, or never: its gap so far counts as a lower bound, with the
    probability that it is not the session's end (the cure model of Boag 1949). Leaving such gaps out takes the long
    ones out of the sample, and sigma comes out too small.
    """

    def __init__(self, mu: float, sigma: float) -> None:
        self.mu, self.sigma = mu, sigma
        self.returning = 0.5
        """Share of turns that another one follows."""
        self._gaps: OrderedDict[int, tuple[float, str]] = OrderedDict()
        """Start (and session) of each gap that is kept; the length of those that are over stands in `_over`."""
        self._started: dict[str, int] = {}
        self._over: dict[int, float] = {}
        self._count = 0
        self._since = 0

    def turn(self, session: str, time: float) -> bool:
        """A turn of `session` comes in. True if the fit was renewed."""
        number = self._started.get(session)
        if number is not None:
            self._over[number] = max(time - self._gaps[number][0], 1e-3)
        self._count += 1
        self._gaps[self._count] = (time, session)
        self._started[session] = self._count
        if len(self._gaps) > KEPT:
            oldest, (_, gone) = self._gaps.popitem(last=False)
            self._over.pop(oldest, None)
            if self._started.get(gone) == oldest:
                del self._started[gone]
        self._since += 1
        if self._since < min(REFIT, self._count // 4) or len(self._over) < 8:
            return False
        self._since = 0
        self._fit(time)
        return True

    def survival(self, elapsed: float) -> float:
        """P(gap > elapsed) of a gap that ends."""
        return tail((math.log(max(elapsed, 1e-3)) - self.mu) / self.sigma)

    def _fit(self, now: float) -> None:
        over = np.log(np.array(list(self._over.values())))
        pending = np.array([now - at for n, (at, _) in self._gaps.items() if n not in self._over])
        pending = np.log(np.maximum(pending, 1e-3))
        mu, sigma, returning = self.mu, self.sigma, self.returning
        for _ in range(20):
            z = (pending - mu) / sigma
            beyond = np.maximum(np.interp(z, _GRID, _TAILS), 1e-12)
            # Probability that an open gap will end, then moments of a normal cut off below at z.
            ending = returning * beyond / (returning * beyond + 1 - returning)
            ratio = np.exp(-z * z / 2) / math.sqrt(2 * math.pi) / beyond
            ratio = np.where(z > 6, z + 1 / np.maximum(z, 1), ratio)  # where the quotient is no longer exact
            mean = mu + sigma * ratio
            square = sigma**2 * (1 + z * ratio) + mu * (2 * mean - mu)
            total = len(over) + ending.sum()
            returning = min(float(total / (len(over) + len(pending))), 0.999)
            mu = float((over.sum() + (ending * mean).sum()) / total)
            variance = float(((over**2).sum() + (ending * square).sum()) / total - mu * mu)
            sigma = math.sqrt(min(max(variance, 0.01), 9.0))
        self.mu, self.sigma, self.returning = mu, sigma, returning
