"""Gittins: evict the block whose stay is worth least, by what is learned of the reuse of its class.

A session's block that is not due yet is worth less than one that is, whichever is the older.
"""

from __future__ import annotations

import heapq
import math
from itertools import groupby

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.policy.reuse import BINS, ENDS, Reuse, Traits, age_bin
from ostinato.cache.use import NOBODY, TokenType, Use

REMEMBERED = 4
"""How many times its blocks a cache remembers of those that went."""
FIT_EVERY = 2048
"""Releases between two fits."""
SORT_EVERY = 64
"""Releases between two looks at the ages of the oldest blocks."""


class Past:
    """Who has used a key so far, in the cache or before it was evicted."""

    __slots__ = ("latest", "sessions", "uses")

    def __init__(self, use: Use) -> None:
        self.latest = use
        self.uses = self.sessions = 1

    def add(self, use: Use) -> None:
        if use is self.latest:
            return
        if use.session != self.latest.session:
            self.uses += 1
            self.sessions += 1
        elif use.turn != self.latest.turn:  # not so for a request that was preempted and comes back
            self.uses += 1
        self.latest = use


class Place:
    """Blocks of one class and one bin of ages, in LRU order."""

    __slots__ = ("bin", "due", "listed", "number", "of", "queue", "worth")

    def __init__(self, of: int, at: int, number: int) -> None:
        self.of, self.bin, self.number = of, at, number
        self.queue = Queue()
        self.worth = 0.0
        self.listed = math.inf
        """Time of its first block as the place stands in the heap; infinite if it does not."""
        self.due = math.inf
        """When its first block is too old for its bin, or before."""


class Gittins(Policy):
    """The policy for a cache of `blocks` blocks. One that is given `reuse` uses what another learns."""

    def __init__(self, blocks: int, reuse: Reuse | None = None) -> None:
        self.reuse = reuse or Reuse(blocks)
        self._teaches = reuse is None
        self._fits = 0
        self._now = 0.0
        self._places: dict[tuple[int, int], Place] = {}
        self._heap: list[tuple[float, float, int, Place]] = []
        self._of: dict[Block, Place] = {}
        self._past: dict[Block, Past] = {}
        self._gone: Ghosts[Past] = Ghosts(REMEMBERED * blocks)
        self._largest = 1
        self._releases = 0
        self._sorted = 0.0
        self._made = 0
        self._use = NOBODY
        self._classes: dict[tuple[TokenType, int, int, bool], int] = {}
        """Classes of blocks that `_use` used last."""

    def arrive(self, use: Use) -> None:
        self._now = max(self._now, use.time)

    def insert(self, block: Block) -> None:
        assert block.key is not None
        self._largest = max(self._largest, block.size)
        past = self._gone.take(block.key)
        if past is None:
            past = Past(block.use)
        else:
            past.add(block.use)
        self._past[block] = past
        if self._teaches:
            self.reuse.inserted += 1

    def hit(self, block: Block, use: Use) -> None:
        self._take(block)
        self._past[block].add(use)

    def release(self, block: Block) -> None:
        assert block.key is not None
        of = self._class(block)
        if self._teaches:
            self.reuse.add(block.key, of, block.use.time)
        self._put(block, of)
        self._releases += 1
        if self._teaches and (self._releases % FIT_EVERY == 0 or self._releases == FIT_EVERY // 8):
            self.reuse.fit(self._now)
        if self._fits != self.reuse.fits:
            self._fits = self.reuse.fits
            self._sort()
            self._rank()
        elif self._releases % SORT_EVERY == 0 and self._sorted < self._now:
            self._sort()

    def leaf(self, block: Block) -> None:
        place = self._of.get(block)
        if place is not None:
            place.queue.ready(block)
            self._list(place, block.use.time)

    def remove(self, block: Block, *, evicted: bool) -> None:
        self._take(block)
        past = self._past.pop(block)
        if evicted:
            assert block.key is not None
            self._gone.add(block.key, past)

    def victim(self) -> Block | None:
        heap = self._heap
        while heap:
            _, time, _, place = heap[0]
            block = place.queue.first() if time == place.listed else None
            if block is None:
                heapq.heappop(heap)
                if time == place.listed:
                    place.listed = math.inf
            elif block.use.time <= time:
                return block
            else:  # its first block is a younger one by now
                place.listed = block.use.time
                heapq.heapreplace(heap, (place.worth, place.listed, place.number, place))
        return None

    # -- classes ----------------------------------------------------------------------------------------

    def _class(self, block: Block) -> int:
        use, past = block.use, self._past[block]
        if use is not self._use:  # what the blocks of a request have in common is looked at once
            self._use = use
            self._classes = {}
        uses, sessions = min(past.uses, 5), min(past.sessions.bit_length(), 5)
        short = (block.kind, uses, sessions, block.size < self._largest)
        number = self._classes.get(short)
        if number is None:
            traits = Traits(
                block.kind,
                use.agentic,
                use.begins,
                min(use.turn, 3),
                not use.session.startswith("#"),
                -1 if use.returns is None else int(use.returns * 4),
                uses,
                sessions,
                block.size < self._largest,
            )
            number = self._classes[short] = self.reuse.number(traits)
        return number

    # -- order ------------------------------------------------------------------------------------------

    def _put(self, block: Block, of: int) -> None:
        time = block.use.time
        place = self._place(of, 0 if time == self._now else age_bin(self._now - time))
        place.queue.append(block)
        self._of[block] = place
        self._list(place, time)

    def _place(self, of: int, at: int) -> Place:
        place = self._places.get((of, at))
        if place is None:
            self._made += 1
            place = self._places[of, at] = Place(of, at, self._made)
            self._value(place)
        return place

    def _take(self, block: Block) -> None:
        place = self._of.pop(block, None)
        if place is not None:
            place.queue.remove(block)

    def _list(self, place: Place, time: float) -> None:
        """A block last used at `time` may be the first of `place`."""
        if time < place.listed:
            place.listed = time
            heapq.heappush(self._heap, (place.worth, time, place.number, place))
        due = time + ENDS[place.bin]
        if due < place.due:
            place.due = due

    def _value(self, place: Place) -> None:
        worth = self.reuse.worth
        place.worth = float(worth[place.of, place.bin]) if place.of < len(worth) else math.inf

    def _sort(self) -> None:
        """Move blocks on to the bin of their age."""
        now = self._sorted = self._now
        for place in [place for place in self._places.values() if place.due <= now]:
            place.due = math.inf
            if place.bin == BINS - 1:
                continue
            older = place.queue.take_unused_since(now - ENDS[place.bin])
            oldest = place.queue.oldest()
            if oldest is not None:
                place.due = oldest.use.time + ENDS[place.bin]
            if not older:
                continue
            # Millions of moves in a long trace: at once where all go to the same bin.
            times = [block.use.time for block in older]
            first, last = min(times), max(times)
            if age_bin(now - first) == age_bin(now - last):
                self._move(older, place.of, first)
            else:
                for time, blocks in groupby(older, key=_time):
                    self._move(list(blocks), place.of, time)

    def _move(self, blocks: list[Block], of: int, time: float) -> None:
        """Put `blocks` of class `of`, the oldest last used at `time`, where those of their age are."""
        place = self._place(of, age_bin(self._now - time))
        place.queue.extend(blocks)
        self._of.update(dict.fromkeys(blocks, place))
        self._list(place, time)

    def _rank(self) -> None:
        """Order the places by what they are worth now."""
        for key in [key for key, place in self._places.items() if not len(place.queue)]:
            del self._places[key]
        for place in self._places.values():
            self._value(place)
            place.listed = -math.inf
        self._heap = [(place.worth, place.listed, place.number, place) for place in self._places.values()]
        heapq.heapify(self._heap)


def _time(block: Block) -> float:
    return block.use.time
