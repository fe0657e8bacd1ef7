"""The policy of our own: evict the block that is least likely to be asked for while it could stay.

Blocks fall into classes by what is known of them (token type, how often they were used, kind of session). For every
class the policy learns online how reuse is spread over the age of a block since its last use: hazard rates, estimated
as in survival analysis (Kaplan and Meier 1958), so that uses which have not come yet count as what they are, and keys
that were evicted go on being watched. A block's rank is the probability of reuse within the time that blocks stay
cached. LHD (NSDI 2018) ranks by such rates in a classless cache; here the classes carry most of the information.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import Use

BINS = 40
"""Ages fall into bins half an octave wide, from a second on."""
WATCHED = 1 << 15
PRIOR = 20.0
MONO = 0
WEAK = 30
SMOOTH: tuple[float, ...] = ()


def age_bin(age: float) -> int:
    return min(BINS - 1, int(2 * math.log2(1 + age)))


EDGES = [2 ** (b / 2) - 1 for b in range(BINS + 1)]


class Ostinato(Policy):
    def __init__(self, blocks: int) -> None:
        self._now = 0.0
        self._classes: dict[Hashable, int] = {}
        self._queues: dict[tuple[int, int], Queue] = {}
        self._place: dict[Block, tuple[int, int]] = {}
        self._order: list[tuple[float, int, tuple[int, int]]] = []
        self._stride = max(1, 8 * blocks // WATCHED)
        self._start = np.zeros(WATCHED)
        self._age = np.full(WATCHED, np.inf)
        self._class = np.zeros(WATCHED, dtype=np.int64)
        self._key: list[bytes | None] = [None] * WATCHED
        self._watched: dict[bytes, int] = {}
        self._next = 0
        self._seen = 0
        self._life = 0.0
        self._accesses = 0
        self._every = max(256, min(4096, blocks // 4))
        self._scores = np.full((1, BINS), 0.5)

    # what is learnt

    def _class_of(self, block: Block) -> int:
        use = block.use
        name = (block.kind, min(block.uses, 5), block.size & -block.size == block.size, use.agentic, use.templated, min(use.turn, 4))
        number = self._classes.get(name)
        if number is None:
            number = self._classes[name] = len(self._classes)
        return number

    def _watch(self, key: bytes, block_class: int) -> None:
        if self._stride > 1 and hash(key) % self._stride:
            return
        old = self._watched.get(key)
        if old is not None and math.isinf(self._age[old]):
            self._age[old] = self._now - self._start[old]
        at = self._next
        self._next = (at + 1) % WATCHED
        self._seen = min(self._seen + 1, WATCHED)
        gone = self._key[at]
        if gone is not None and self._watched.get(gone) == at:
            del self._watched[gone]
        self._start[at], self._age[at], self._class[at], self._key[at] = self._now, np.inf, block_class, key
        self._watched[key] = at

    def _learn(self) -> None:
        n, count = self._seen, len(self._classes)
        reused = np.isfinite(self._age[:n])
        age = np.where(reused, self._age[:n], self._now - self._start[:n])
        bins = np.minimum(BINS - 1, (2 * np.log2(1 + np.maximum(age, 0))).astype(np.int64))
        at = self._class[:n] * BINS + bins
        events = np.bincount(at, reused, count * BINS).reshape(count, BINS)
        lost = np.bincount(at, ~reused, count * BINS).reshape(count, BINS)
        risk = np.cumsum((events + lost)[:, ::-1], axis=1)[:, ::-1] - lost / 2
        if SMOOTH:
            kernel = np.array(SMOOTH)
            events = np.apply_along_axis(lambda r: np.convolve(r, kernel, "same"), 1, events)
            risk = np.apply_along_axis(lambda r: np.convolve(r, kernel, "same"), 1, risk)
        base = events.sum(0) / np.maximum(risk.sum(0), 1)
        names = list(self._classes)
        levels = [np.unique([hash(n[f]) for n in names], return_inverse=True)[1] for f in range(len(names[0]))]
        factor = np.ones(count)
        got = events.sum(1)
        for _ in range(5):
            for level in levels:
                expected = factor * (risk @ base)
                k = level.max() + 1
                m = (np.bincount(level, got, k) + WEAK) / (np.bincount(level, expected, k) + WEAK)
                factor *= m[level]
        hazard = (events + PRIOR * np.minimum(base * factor[:, None], 1)) / (risk + PRIOR)
        # Gittins index: the best rate of reuse per second of stay, over all times to stay from now on.
        edges = np.array(EDGES)
        width = np.diff(edges)
        stay = np.concatenate([np.ones((count, 1)), np.cumprod(1 - np.minimum(hazard, 0.9999), axis=1)], axis=1)
        held = np.concatenate([np.zeros((count, 1)), np.cumsum((stay[:, :-1] + stay[:, 1:]) / 2 * width, axis=1)], axis=1)
        scores = np.empty((count, BINS))
        for b in range(BINS):
            rate = (stay[:, b, None] - stay[:, b + 1 :]) / np.maximum(held[:, b + 1 :] - held[:, b, None], 1e-12)
            scores[:, b] = rate.max(axis=1)
        if MONO:
            scores = np.minimum.accumulate(scores, axis=1) if MONO == 1 else np.maximum.accumulate(scores[:, ::-1], axis=1)[:, ::-1]
        self._scores = scores
        for place in list(self._queues):
            self._age_queue(place)
        self._order = sorted((self._score(p), -p[1], p) for p, q in self._queues.items() if len(q))
        for p in [p for p, q in self._queues.items() if not len(q)]:
            del self._queues[p]

    def _score(self, place: tuple[int, int]) -> float:
        c, b = place
        return float(self._scores[c, b]) if c < len(self._scores) else 0.5

    def _age_queue(self, place: tuple[int, int]) -> None:
        queue = self._queues[place]
        for block in queue.oldest():
            b = age_bin(self._now - block.use.time)
            if b <= place[1]:
                break
            queue.remove(block)
            self._put(block, (place[0], b))

    def _put(self, block: Block, place: tuple[int, int]) -> None:
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = Queue()
            self._order.append((self._score(place), -place[1], place))
            self._order.sort()
        queue.append(block)
        self._place[block] = place

    # events

    def arrive(self, use: Use) -> None:
        self._now = max(self._now, use.time)
        if self._accesses >= self._every:
            self._accesses = 0
            self._learn()

    def release(self, block: Block) -> None:
        self._accesses += 1
        c = self._class_of(block)
        assert block.key is not None
        self._watch(block.key, c)
        self._put(block, (c, age_bin(self._now - block.use.time)))

    def hit(self, block: Block, use: Use) -> None:
        self._take(block)

    def leaf(self, block: Block) -> None:
        place = self._place.get(block)
        if place is not None:
            self._queues[place].ready(block)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._take(block)
        if evicted:
            self._life += (self._now - block.use.time - self._life) / 256

    def _take(self, block: Block) -> None:
        place = self._place.pop(block, None)
        if place is not None:
            self._queues[place].remove(block)

    def victim(self) -> Block | None:
        for _, _, place in self._order:
            queue = self._queues.get(place)
            if queue is None:
                continue
            block = queue.first()
            if block is not None:
                return block
        return None
