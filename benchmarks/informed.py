"""A bound for what can be learned: a policy that is told how a made-up workload is made.

It knows which sessions are chats, agents or single requests, from their first turn on, how probable it is that they go
on, the distribution of the gaps, and whose replies are sent back. It does not know what will come, nor how popular a text
is: that it learns from how often the text was used, as `ostinato` does. No policy that learns all of it can know more.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.use import INSTRUCTIONS, Use
from ostinato.lab.trace import Trace
from ostinato.lab.workload import CALL_FOLLOWS, CHAT_GOES_ON, TASK_FOLLOWS, TOOL_GAP, USER_GAP

Array = NDArray[np.float64]
AGES: Array = np.concatenate([[0.0], np.geomspace(0.25, 4000, 400)])
_AGES: list[float] = AGES.tolist()
UNSEEN, PATIENCE = 0.5, 60.0
"""Uses of instructions that are expected before any was seen, and in how many seconds."""


def worth(returns: list[tuple[float, tuple[float, float]]]) -> list[float]:
    """Gittins index, at each of `AGES`, of waiting for a session that returns with these probabilities, each after a
    log-normal gap."""
    gone = np.zeros_like(AGES)
    for probability, (mean, deviation) in returns:
        scaled = [(math.log(max(age, 1e-9)) - mean) / deviation for age in _AGES]
        gone += probability * np.array([math.erfc(-each / math.sqrt(2)) / 2 for each in scaled])
    stays = 1 - gone
    held = np.concatenate([[0.0], np.cumsum((stays[1:] + stays[:-1]) / 2 * np.diff(AGES))])
    found = [
        float(((stays[at] - stays[at + 1 :]) / (held[at + 1 :] - held[at])).max())
        for at in range(len(AGES) - 1)
    ]
    return [*found, found[-1]]


CHAT = worth([(CHAT_GOES_ON, USER_GAP)])
AGENT = worth([(CALL_FOLLOWS, TOOL_GAP), ((1 - CALL_FOLLOWS) * TASK_FOLLOWS, USER_GAP)])


class Informed(Policy):
    """For a workload all of whose sessions are named."""

    def __init__(self, trace: Trace) -> None:
        asked = {key for request in trace.requests for key in request.keys}
        made, back = Counter[bytes](), Counter[bytes]()
        for request in trace.requests:
            made[request.keys[0]] += len(request.reply_keys)
            back[request.keys[0]] += sum(key in asked for key in request.reply_keys)
        self._drops = {start for start, count in made.items() if count > 20 and back[start] < 0.1 * count}
        """Beginnings of the prompts whose replies are not sent back as they are."""
        self._dropped = {
            key for request in trace.requests if request.keys[0] in self._drops for key in request.reply_keys
        }
        self._seen: dict[bytes, tuple[int, str, float]] = {}
        """Uses by other sessions than the one before, the session of the latest use, and the time of the first."""
        self._idle: set[Block] = set()
        self._now = self._ranked = -1.0
        self._heap: list[tuple[float, float, int, Block]] = []

    def arrive(self, use: Use) -> None:
        self._now = use.time

    def insert(self, block: Block) -> None:
        self._see(block, block.use)

    def hit(self, block: Block, use: Use) -> None:
        self._idle.discard(block)
        self._see(block, use)

    def release(self, block: Block) -> None:
        self._idle.add(block)

    def leaf(self, block: Block) -> None:
        if block in self._idle and self._ranked == self._now:
            heapq.heappush(self._heap, (self.value(block), block.use.time, id(block), block))

    def remove(self, block: Block, *, evicted: bool) -> None:  # noqa: ARG002
        self._idle.discard(block)

    def victim(self) -> Block | None:
        if self._ranked != self._now or not self._heap:
            leaves = [block for block in self._idle if not block.children]
            self._heap = [(self.value(block), block.use.time, id(block), block) for block in leaves]
            heapq.heapify(self._heap)
            self._ranked = self._now
        while self._heap:
            block = self._heap[0][-1]
            if block in self._idle and not block.children:
                return block
            heapq.heappop(self._heap)
        return None

    def value(self, block: Block) -> float:
        """Reuses per second that can be expected of it."""
        key, use = block.key or b"", block.use
        if key in self._dropped:
            return 0.0
        others, _, since = self._seen[key]
        expected = others + (UNSEEN if block.kind in INSTRUCTIONS else 0.0)
        rate = expected / (self._now - since + PATIENCE)
        if use.session.startswith("#"):  # a template or a single prompt
            return rate
        table = AGENT if use.agentic else CHAT
        return rate + table[bisect_right(_AGES, self._now - use.time) - 1]

    def _see(self, block: Block, use: Use) -> None:
        others, session, since = self._seen.get(block.key or b"", (0, use.session, use.time))
        self._seen[block.key or b""] = others + (session != use.session), use.session, since
