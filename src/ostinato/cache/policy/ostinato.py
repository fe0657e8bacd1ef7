"""The policy of our own: evict the block whose stay is worth least.

Blocks fall into classes by what is known of them. For every class the policy learns online how reuse is spread over
the time since the last use: hazard rates as in survival analysis (Kaplan and Meier 1958), so that reuse that has not
come yet counts as what it is, and evicted keys go on being watched. The worth of a block is the Gittins index of
keeping it: the best rate of reuse per second of stay over all times to stay from now on (Gittins 1979; LHD, NSDI
2018, ranks by a similar rate). A session's block that is not due yet is worth less than one that is.
"""

from __future__ import annotations

import math
import os
import heapq
from bisect import bisect_right
from itertools import groupby
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.use import TokenType, Use

BINS = 40
"""Ages fall into bins half an octave wide, from zero on."""
WATCHED = 1 << int(os.environ.get("W","15"))
"""Uses of blocks that are watched at a time."""
COVER = float(os.environ.get("COVER","16"))
"""Where a cache is large, a share of its keys is watched, such that this many times its blocks are covered."""
PRIOR = float(os.environ.get("PRIOR","30"))
"""How many uses of a class count as much as what similar classes say."""
WEAK = 30.0
"""How many reuses of a feature's value count as much as no effect of it."""
WEAKER = 300.0
"""How many uses of a stratum count as much as what all blocks say."""
STEPS = float(os.environ.get("STEPS","2"))
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


C = float(os.environ.get("C","1"))

ON = set(os.environ.get("ON", "left,sessions,gap,tokens").split(","))

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
    returns: int
    sessions: int
    gap: int
    tokens: int
    left: bool


class Past(NamedTuple):
    sessions: int
    uses: int
    gap: int
    time: float
    session: str


class Place:
    """Blocks of one class and one bin of ages, in LRU order."""

    __slots__ = ("bin", "group", "queue", "worth", "listed", "due", "number")

    def __init__(self, group: int, at: int, number: int) -> None:
        self.group, self.bin = group, at
        self.number = number
        self.queue = Queue()
        self.worth = 0.0
        self.listed = math.inf
        self.due = math.inf


class Gittins(Policy):
    """The policy for a cache of `blocks` blocks."""

    def __init__(self, blocks: int, teacher: "Gittins | None" = None) -> None:
        self._now = 0.0
        self._teacher = teacher
        self._fits = 0
        self._uses = Uses(blocks) if teacher is None else None
        self._worth: Array = np.zeros((0, BINS))
        self._groups: dict[Traits, int] = {} if teacher is None else teacher._groups
        self._names: list[Traits] = [] if teacher is None else teacher._names
        self._places: dict[tuple[int, int], Place] = {}
        self._heap: list[tuple[float, int, int, Place]] = []
        self._of: dict[Block, Place] = {}
        self._past: dict[Block, Past] = {}
        self._gone: Ghosts[Past] = Ghosts(4 * blocks)
        self._mine: dict[str, dict[Block, None]] = {}
        self._largest = 1
        self._releases = 0
        self._sorted = 0.0
        self._number = 0
        self._use: Use | None = None

    def arrive(self, use: Use) -> None:
        self._settle()
        self._now = max(self._now, use.time)

    def insert(self, block: Block) -> None:
        if self._uses: self._uses.inserted += 1
        self._largest = max(self._largest, block.size)
        before = self._gone.take(block.key)
        self._past[block] = Past(1, 1, 0, block.use.time, block.use.session) if before is None else self._next(before, block.use)

    def _next(self, before: Past, use: Use) -> Past:
        return Past(before.sessions + (use.session != before.session), before.uses + 1, 1 + int(math.log2(1 + max(0.0, use.time - before.time))) // 2, use.time, use.session)

    def hit(self, block: Block, use: Use) -> None:
        self._take(block)
        before = self._past[block]
        if (use.session, use.time) != (before.session, before.time):
            self._past[block] = self._next(before, use)

    def release(self, block: Block) -> None:
        if block.use is not self._use:
            self._settle()
            self._use = block.use
        group = self._group(self._traits(block))
        assert block.key is not None
        if self._uses: self._uses.add(block.key, group, block.use.time, block.use.session)
        self._put(block, group)
        self._mine.setdefault(block.use.session, {})[block] = None
        self._releases += 1
        if self._teacher:
            if self._fits != self._teacher._fits:
                self._fits = self._teacher._fits
                self._worth = self._teacher._worth
                self._sort()
                self._rank_all()
            elif self._sorted < self._now:
                self._sort()
        elif self._releases % FIT_EVERY == 0 or self._releases == FIT_EVERY // 8:
            self._fits += 1
            self._worth = self._uses.worth(self._names, self._now)
            self._sort()
            self._rank_all()
        elif self._releases % SORT_EVERY == 0 and self._sorted < self._now:
            self._sort()

    def leaf(self, block: Block) -> None:
        place = self._of.get(block)
        if place is not None:
            place.queue.ready(block)
            place.due = min(place.due, block.use.time + _ENDS[place.bin])
            self._list(place, block.use.time)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._take(block)
        past = self._past.pop(block)
        if evicted:
            self._gone.add(block.key, past)

    def victim(self) -> Block | None:
        heap = self._heap
        while heap:
            _, time, _, place = heap[0]
            block = place.queue.first()
            if time != place.listed or block is None:
                heapq.heappop(heap)
                if time == place.listed:
                    place.listed = math.inf
                continue
            if block.use.time <= time:
                return block
            place.listed = block.use.time
            heapq.heapreplace(heap, (place.worth, place.listed, place.number, place))
        return None

    # -- sessions

    def _settle(self) -> None:
        use, self._use = self._use, None
        if use is None or "left" not in ON or not use.session or use.turn < 2:
            return
        mine = self._mine.get(use.session)
        if self._uses: self._uses.leave(use, self._left)
        if not mine:
            return
        for block in [block for block in mine if block.use.time < use.time]:
            del mine[block]
            place = self._of[block]
            place.queue.remove(block)
            self._put(block, self._left(place.group))

    def _left(self, group: int) -> int:
        return self._group(self._names[group]._replace(left=True))

    # -- classes ----------------------------------------------------------------------------------------

    def _traits(self, block: Block) -> Traits:
        use = block.use
        past = self._past[block]
        return Traits(
            block.kind,
            use.agentic,
            use.begins,
            min(use.turn, 3),
            not use.session.startswith("#"),
            min(past.uses, 5) if "uses" in ON else min(block.uses, 5),
            block.size < self._largest,
            -1 if use.returns is None else int(use.returns * 4),
            min(past.sessions.bit_length(), 5) if "sessions" in ON else 0,
            min(past.gap, 6) if "gap" in ON else 0,
            max(0, use.tokens.bit_length() - 7) // 2 if "tokens" in ON else 0,
            False,
        )

    def _group(self, name: Traits) -> int:
        number = self._groups.get(name)
        if number is None:
            number = self._groups[name] = len(self._groups)
            self._names.append(name)
        return number

    # -- order ------------------------------------------------------------------------------------------

    def _put(self, block: Block, group: int) -> None:
        place = self._place(group, age_bin(self._now - block.use.time))
        place.queue.append(block)
        place.due = min(place.due, block.use.time + _ENDS[place.bin])
        self._list(place, block.use.time)
        self._of[block] = place

    def _place(self, group: int, at: int) -> Place:
        place = self._places.get((group, at))
        if place is None:
            self._number += 1
            place = self._places[group, at] = Place(group, at, self._number)
            self._rank(place)
        return place

    def _list(self, place: Place, time: float) -> None:
        if time < place.listed:
            place.listed = time
            heapq.heappush(self._heap, (place.worth, time, place.number, place))

    def _take(self, block: Block) -> None:
        place = self._of.pop(block, None)
        if place is not None:
            place.queue.remove(block)
            mine = self._mine.get(block.use.session)
            if mine is not None:
                mine.pop(block, None)
                if not mine:
                    del self._mine[block.use.session]

    def _rank(self, place: Place) -> None:
        known = place.group < len(self._worth)
        place.worth = float(self._worth[place.group, place.bin]) if known else math.inf

    def _sort(self) -> None:
        """Move blocks on to the bin of their age."""
        self._sorted = now = self._now
        for place in [place for place in self._places.values() if place.due <= now]:
            if place.bin == BINS - 1:
                place.due = math.inf
                continue
            queue = place.queue
            older = queue.take_unused_since(now - _ENDS[place.bin])
            first = next(iter(queue._order), None)
            place.due = math.inf if first is None else first.use.time + _ENDS[place.bin]
            # Millions of moves in a long trace: at once for all blocks of a request.
            for time, blocks in groupby(older, key=_time):
                moved = list(blocks)
                target = self._place(place.group, age_bin(now - time))
                target.queue.extend(moved)
                target.due = min(target.due, time + _ENDS[target.bin])
                self._list(target, time)
                self._of.update(dict.fromkeys(moved, target))

    def _rank_all(self) -> None:
        for key in [key for key, place in self._places.items() if not len(place.queue)]:
            del self._places[key]
        for place in self._places.values():
            self._rank(place)
            place.listed = -math.inf
        self._heap = [(place.worth, place.listed, place.number, place) for place in self._places.values()]
        heapq.heapify(self._heap)


def _time(block: Block) -> float:
    return block.use.time


class Shadow:
    def __init__(self, policy: Policy, capacity: int) -> None:
        from ostinato.cache.store import Store
        self.store = Store(policy)
        self.capacity = capacity
        self.score = 0.0

    def ask(self, use: Use, chain: list[tuple[Block, bool]]) -> int:
        store = self.store
        known = store.blocks
        store.policy.arrive(use)
        blocks: list[Block] = []
        hit = 0
        finding = True
        parent = b""
        for like, looked in chain:
            key = like.key
            block = known.get(key)
            if block is not None:
                if finding and looked:
                    hit += block.size
                store.acquire(block, use)
                blocks.append(block)
                parent = key
                continue
            if finding:
                finding = False
                for each, _ in chain[len(blocks):]:
                    if each.key not in known:
                        store.policy.miss(each.key, use)
            if len(known) >= self.capacity:
                victim = store.victim()
                if victim is None:
                    break
                store.remove(victim, evicted=True)
            block = Block(0, key=key, parent=parent, kind=like.kind, size=like.size, offset=like.offset, depth=like.depth, cost=like.cost)
            store.insert(block, use)
            blocks.append(block)
            parent = key
        for block in reversed(blocks):
            store.release(block, use)
        return hit


TARGET = int(os.environ.get("TARGET", "512"))
HORIZON = float(os.environ.get("HORIZON", "8"))
MARGIN = float(os.environ.get("MARGIN", "0.0"))
CAND = os.environ.get("CAND", "gittins,lru,gdsf,arc").split(",")

class Ostinato(Policy):
    def __init__(self, blocks: int) -> None:
        from ostinato.cache.policy.lru import LRU
        from ostinato.cache.policy.arc import ARC
        from ostinato.cache.policy.gdsf import GDSF
        self._gittins = Gittins(blocks)
        make = {"gittins": lambda n, shadow: Gittins(n, self._gittins) if shadow else self._gittins, "lru": lambda n, _: LRU(), "arc": lambda n, _: ARC(n), "gdsf": lambda n, _: GDSF()}
        self.candidates = [make[name](blocks, False) for name in CAND]
        self._stride = max(1, blocks // TARGET)
        n = max(1, blocks // self._stride)
        self.shadows = [Shadow(make[name](n, True), n) for name in CAND]
        self._horizon = HORIZON * n
        self.best = 0
        self.time_of = [0] * len(CAND)
        self._open: dict[int, tuple[Use, list]] = {}
        self._lookups = 0.0

    def arrive(self, use):
        for each in self.candidates: each.arrive(use)
    def miss(self, key, use):
        for each in self.candidates: each.miss(key, use)
    def insert(self, block):
        for each in self.candidates: each.insert(block)
        self._note(block, block.use, block.kind != "decode")
    def hit(self, block, use):
        for each in self.candidates: each.hit(block, use)
        self._note(block, use, True)
    def _note(self, block, use, looked):
        if self._stride > 1 and crc32(block.key) % self._stride: return
        entry = self._open.get(id(use))
        if entry is None:
            entry = self._open[id(use)] = (use, [])
        entry[1].append((block, looked))
    def release(self, block):
        for each in self.candidates: each.release(block)
        entry = self._open.pop(id(block.use), None)
        if entry is not None: self._compare(*entry)
    def _compare(self, use, chain):
        looked = sum(looked for _, looked in chain)
        keep = math.exp(-looked / self._horizon)
        for each in self.shadows:
            each.score = each.score * keep + each.ask(use, chain)
        self._lookups = self._lookups * keep + sum(b.size for b, l in chain if l)
        top = max(range(len(self.shadows)), key=lambda i: self.shadows[i].score)
        if self.shadows[top].score > self.shadows[self.best].score + MARGIN * self._lookups:
            self.best = top
        self.time_of[self.best] += 1
    def leaf(self, block):
        for each in self.candidates: each.leaf(block)
    def remove(self, block, *, evicted):
        for each in self.candidates: each.remove(block, evicted=evicted)
    def victim(self):
        return self.candidates[self.best].victim()

class Uses:
    """The latest uses of a sample of keys, each with the time to the next one, if that has come."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._stride = 1
        self.inserted = 0
        self._start = [0.0] * WATCHED
        self._entry = [0.0] * WATCHED
        self._age = [math.inf] * WATCHED
        self._used = [False] * WATCHED
        self._group = [0] * WATCHED
        self._key: list[bytes] = [b""] * WATCHED
        self._born = [0] * WATCHED
        self._latest: dict[bytes, int] = {}
        self._sessions: dict[str, list[int]] = {}
        self._count = 0

    def add(self, key: bytes, group: int, time: float, session: str = "") -> None:
        if self._stride > 1 and crc32(key) % self._stride:
            return
        before = self._latest.get(key)
        if before is not None:
            self._age[before] = time - self._start[before]
            self._used[before] = True
        at = self._new(key, group, time, 0.0)
        self._sessions.setdefault(session, []).append(at)

    def _new(self, key: bytes, group: int, start: float, entry: float) -> int:
        if self._count >= WATCHED and self._count % WATCHED == 0:
            if self.inserted - self._born[0] < COVER * self._blocks:
                self._thin()
        at = self._count % WATCHED
        if self._count >= WATCHED and self._latest.get(self._key[at]) == at:
            del self._latest[self._key[at]]
        self._start[at], self._entry[at], self._age[at], self._group[at], self._key[at] = start, entry, math.inf, group, key
        self._used[at] = False
        self._born[at] = self.inserted
        self._latest[key] = at
        self._count += 1
        return at

    def _thin(self) -> None:
        self._stride *= 2
        keep = [at for at in range(WATCHED) if crc32(self._key[at]) % self._stride == 0]
        new = {}
        for name in ("_start", "_entry", "_age", "_group", "_key", "_used", "_born"):
            values = getattr(self, name)
            values[: len(keep)] = [values[at] for at in keep]
        new = {old: at for at, old in enumerate(keep)}
        self._latest = {key: new[at] for key, at in self._latest.items() if at in new}
        self._sessions = {s: [new[at] for at in ats if at in new] for s, ats in self._sessions.items()}
        self._count = len(keep)

    def leave(self, use: Use, left) -> None:
        ats = self._sessions.get(use.session)
        if not ats:
            return
        stay = []
        for at in ats:
            if self._latest.get(self._key[at]) != at:
                continue
            if self._start[at] >= use.time:
                stay.append(at)
                continue
            self._age[at] = age = use.time - self._start[at]
            key, start, group = self._key[at], self._start[at], left(self._group[at])
            self._new(key, group, start, age)
        if stay:
            self._sessions[use.session] = stay
        else:
            del self._sessions[use.session]

    def worth(self, names: list[Traits], now: float) -> Array:
        """Steps of the Gittins index (reuses per second) of every class at every age bin, [classes, BINS]."""
        count = min(self._count, WATCHED)
        age, start = np.array(self._age[:count]), np.array(self._start[:count])
        used = np.array(self._used[:count])
        entry = np.array(self._entry[:count])
        age = np.maximum(np.where(np.isfinite(age), age, now - start), 0)
        bins = np.minimum(BINS - 1, (2 * np.log2(1 + age)).astype(np.int64))
        begin = np.minimum(BINS - 1, (2 * np.log2(1 + entry)).astype(np.int64))
        group = np.array(self._group[:count]) * BINS
        cell = group + bins
        size = len(names) * BINS
        events = np.bincount(cell, used, size).reshape(-1, BINS).astype(np.float64)
        pending = np.bincount(cell, ~used, size).reshape(-1, BINS).astype(np.float64)
        late = np.bincount((group + begin)[entry > 0], minlength=size).reshape(-1, BINS).astype(np.float64)
        # A use that is pending in a bin is at risk for half of it, on the average.
        ends = np.cumsum((events + pending)[:, ::-1], axis=1)[:, ::-1] - pending / 2
        starts = np.cumsum(late[:, ::-1], axis=1)[:, ::-1] - late / 2
        risk: Array = np.maximum(ends - starts, 0)
        events, risk = _smooth(events), _smooth(risk)
        runs = np.flatnonzero(np.diff(self._start[:count]) != 0 if "bytime" in ON else (np.diff(self._start[:count]) != 0) | (np.diff(self._group[:count]) != 0))
        lengths = np.diff(np.concatenate([[-1], runs, [count - 1]]))
        mean = float((lengths**2).sum() / count)
        if "dbg" in ON: print(f"{now:.0f} stride {self._stride} classes {len(names)} cluster {mean:.0f}")
        return _gittins(_hazards(events, risk, names, mean))


def _smooth(rows: Array) -> Array:
    half = len(_KERNEL) // 2
    padded = np.pad(rows, ((0, 0), (half, half)), mode="edge")
    smooth = np.zeros_like(rows)
    for at, weight in enumerate(_KERNEL):
        smooth += weight * padded[:, at : at + BINS]
    return smooth


def _hazards(events: Array, risk: Array, names: list[Traits], m: float) -> Array:
    """Probability of reuse in each bin of those that reach it, [classes, BINS].

    A class with few uses takes after its like: hazards proportional to those of all, by a factor for each feature
    (fitted by iterative scaling, as in log-linear models).
    """
    overall = events.sum(0) / np.maximum(risk.sum(0), 1)
    strata = np.unique([hash((name.agentic, min(name.uses, 3))) for name in names], return_inverse=True)[1]
    member = np.zeros((strata.max() + 1, len(names)))
    member[strata, np.arange(len(names))] = 1
    shape = ((member @ events + 10*C*m * overall) / (member @ risk + 10*C*m))[strata]
    expected = (risk * shape).sum(1)
    seen = events.sum(1)
    factor = np.ones(len(names))
    features = list(zip(*names, strict=True))
    levels = [np.unique([hash(value) for value in values], return_inverse=True)[1] for values in features]
    for _ in range(4):
        for level in levels:
            ratio = (np.bincount(level, seen) + C*m) / (np.bincount(level, factor * expected) + C*m)
            factor *= ratio[level]
    similar = np.minimum(shape * factor[:, None], 0.99)
    return np.minimum((events + C*m * similar) / (risk + C*m), 0.999)


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
