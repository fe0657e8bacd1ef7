"""Gittins: evict the block whose stay is worth least, by what is learned of the reuse of blocks.

A session's block that is not due yet is worth less than one that is, whichever is the older.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Literal

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.reuse import Past, Reuse
from ostinato.cache.policy.run import Run
from ostinato.cache.policy.survival import BINS, ENDS, age_bin
from ostinato.cache.use import NOBODY, TokenType, Use

REMEMBERED = 4
"""How many times its blocks a cache remembers of those that went."""
FIT_EVERY = 2048
"""Releases between two fits."""
SORT_EVERY = 64
"""Releases between two looks at the ages of the oldest blocks."""
STEPS = 2
"""Steps in which worth is compared, per octave."""
LEAST = 1e-12
"""Reuses per second that count as none."""

Rule = Literal["learned", "recency", "gdsf"]


class Gittins(Policy):
    """The policy for a cache of `blocks` blocks. One that is given `reuse` uses what another learns."""

    def __init__(self, blocks: int, reuse: Reuse | None = None) -> None:
        self.reuse = reuse or Reuse(blocks)
        self._teaches = reuse is None
        self._fits = 0
        self._now = 0.0
        self.rule: Rule = "learned"
        """What it evicts by."""
        self._level = 0.0
        """Priority, by GDSF, of what was evicted last."""
        self._ages: list[deque[Run]] = [deque() for _ in range(BINS)]
        """Runs by their age, the oldest first."""
        self._heap: list[tuple[float, float, int, Run]] = []
        """What goes first: worth, time and number of runs. Entries are current while they have the run's worth."""
        self._past: dict[Block, Past] = {}
        self._runs: dict[Block, Run] = {}
        """Where blocks stand that nobody uses."""
        self._gone: Ghosts[Past] = Ghosts(REMEMBERED * blocks)
        self._largest = 1
        """Tokens of a full block."""
        self._releases = 0
        self._next_fit = FIT_EVERY // 8
        self._sorted = 0.0
        self._made = 0
        self._use = NOBODY
        self._run = Run((0, 0), 0.0, 0.0, 0.0, 0, 0.0)
        """The run that was released into last."""
        self._classes: dict[tuple[TokenType, float, bool], tuple[int, int]] = {}
        """Classes of blocks that `_use` used last."""

    def go_by(self, rule: Rule) -> None:
        """Rank by `rule` from now on."""
        if rule != self.rule:
            self.rule = rule
            self._rank()

    def arrive(self, use: Use) -> None:
        self._now = max(self._now, use.time)
        if self._teaches:
            self.reuse.arrive(use)

    def insert(self, block: Block) -> None:
        assert block.key is not None
        if block.size > self._largest:
            self._largest = block.size
        past = self._gone.take(block.key)
        if past is None:
            past = Past(block.use)
        else:
            past.add(block.use)
        self._past[block] = past
        if self._teaches:
            self.reuse.window.inserted += 1

    def hit(self, block: Block, use: Use) -> None:
        run = self._runs.pop(block, None)
        if run is not None:
            run.held -= 1
        self._past[block].add(use)

    def release(self, block: Block) -> None:
        assert block.key is not None
        past, use, run = self._past[block], block.use, self._run
        of = self._class(block, past.others)
        joins = run.last == block.key and run.of == of and run.time == use.time and run.bin >= 0
        if not (joins and run.others == past.others and run.known == past.known):
            run = self._begin(of, past, block)
        run.blocks.append(block)
        run.held += 1
        run.last = block.parent
        self._runs[block] = run
        if not run.listed and not block.children:
            self._list(run)
        if self._teaches:
            self.reuse.add(block.key, past, *of)
        self._releases += 1
        if self._teaches and self._releases >= self._next_fit:
            self._next_fit += min(self._releases, FIT_EVERY)
            self.reuse.fit(self._now)
        if self._fits != self.reuse.fits:
            self._fits = self.reuse.fits
            self._sort()
            self._rank()
        elif self._releases % SORT_EVERY == 0 and self._sorted < self._now:
            self._sort()

    def leaf(self, block: Block) -> None:
        run = self._runs.get(block)
        if run is not None and not run.listed:
            self._list(run)

    def remove(self, block: Block, *, evicted: bool) -> None:
        past = self._past.pop(block)
        run = self._runs.pop(block, None)
        if run is not None:
            run.held -= 1
            if evicted and run.priority > self._level:
                self._level = run.priority
        if evicted:
            assert block.key is not None
            self._gone.add(block.key, past)

    def victim(self) -> Block | None:
        heap = self._heap
        while heap:
            worth, _, _, run = heap[0]
            if run.listed and run.worth == worth:
                block = self._first(run)
                if block is not None and not block.children:
                    return block
                run.listed = False
            heapq.heappop(heap)
        return None

    # -- classes ----------------------------------------------------------------------------------------

    def _class(self, block: Block, others: float) -> tuple[int, int]:
        if block.use is not self._use:  # most blocks of a request are of a few classes
            self._use = block.use
            self._classes = {}
        short = (block.kind, others, block.size < self._largest)
        numbers = self._classes.get(short)
        if numbers is None:
            numbers = self.reuse.classes(block.kind, block.use, others, partial=short[-1])
            self._classes[short] = numbers
        return numbers

    # -- order ------------------------------------------------------------------------------------------

    def _begin(self, of: tuple[int, int], past: Past, leaf: Block) -> Run:
        self._made += 1
        priority = self._level + leaf.uses * leaf.cost / max(leaf.size, 1)
        run = self._run = Run(of, past.others, past.known, leaf.use.time, self._made, priority)
        self._age(run)
        return run

    def _first(self, run: Run) -> Block | None:
        """The first block that is still in the run."""
        blocks, runs = run.blocks, self._runs
        while blocks:
            block = blocks[0]
            if runs.get(block) is run:
                return block
            blocks.popleft()
        return None

    def _list(self, run: Run) -> None:
        run.listed = True
        heapq.heappush(self._heap, (run.worth, run.time, run.number, run))

    def _age(self, run: Run) -> None:
        """Put `run` where those of its age are."""
        run.bin = age_bin(self._now - run.time)
        self._ages[run.bin].append(run)
        worth = self._value(run)
        if worth != run.worth:
            run.worth = worth
            if run.listed:
                self._list(run)

    def _value(self, run: Run) -> float:
        if self.rule == "recency":
            return 0.0
        if self.rule == "gdsf":
            return run.priority
        value = self.reuse.value(run, self._now)
        # Smaller differences are noise: among about equals the oldest goes.
        return round(STEPS * math.log2(max(value, LEAST))) if value < math.inf else value

    def _sort(self) -> None:
        """Move runs on to the bin of their age."""
        now = self._sorted = self._now
        for at in range(BINS - 2, -1, -1):  # in this order older runs stay before younger ones
            runs, end = self._ages[at], ENDS[at]
            while runs and now - runs[0].time >= end:
                run = runs.popleft()
                if not run.held:
                    run.bin = -1
                else:
                    self._age(run)

    def _rank(self) -> None:
        """Order the runs by what they are worth now."""
        self._heap.clear()
        for age, runs in enumerate(self._ages):
            kept: deque[Run] = deque()
            for run in runs:
                if not run.held:
                    run.bin = -1
                    continue
                kept.append(run)
                run.worth = self._value(run)
                if run.listed:
                    self._heap.append((run.worth, run.time, run.number, run))
            self._ages[age] = kept
        heapq.heapify(self._heap)
