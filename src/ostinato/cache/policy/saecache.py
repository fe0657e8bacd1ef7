"""SAECache: eviction that knows what a block is ("Not All Tokens Are Worth Caching", arXiv 2605.18825).

Blocks go to four queues by what their request is. The priority of a block is

    P(b) = alpha_q * w_type(b) * p_q(b) / (time since its last use)

and the lowest goes first. Within a queue, a token type and a range of offsets, P falls with the time since the last
use, so only the heads of a few queues in LRU order can be the lowest. All factors are learned online.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.ghosts import Ghosts
from ostinato.cache.policy.queue import Queue
from ostinato.cache.policy.turn_gaps import TurnGaps
from ostinato.cache.use import TokenType, Use

Role = Literal["evict-first", "structural", "chat", "agentic"]
ROLES: tuple[Role, ...] = ("evict-first", "structural", "chat", "agentic")
Part = Literal["weights", "timing", "position", "queues"]
PARTS: frozenset[Part] = frozenset(("weights", "timing", "position", "queues"))
SHORTEST = 1e-3
"""Times since the last use count as at least this, in seconds."""
SCARCE = 0.05
"""Share of blocks found below which types and timing have nothing to say, and the oldest block goes."""


@dataclass
class TypeStatistics:
    """What became of the blocks of one token type since the weights were last set."""

    weight: float = 1.0
    found: int = 0
    made: int = 0
    evicted: int = 0
    missed: int = 0
    """Evicted blocks that were asked for later."""


@dataclass
class QueueStatistics:
    """What one of the four queues holds and what that yields."""

    alpha: float = 1.0
    blocks: int = 0
    hit_tokens: int = 0
    block_seconds: float = 0.0
    counted: float = 0.0
    """Time up to which `block_seconds` is counted."""
    found: int = 0
    made: int = 0


@dataclass
class PositionStatistics:
    """Moments of the offsets of structural blocks, of all that were looked up and of those found, decaying."""

    looked: float = 0.0
    looked_sum: float = 0.0
    found: float = 0.0
    found_sum: float = 0.0
    longest: float = 1.0
    gamma: float = 1.0

    def add(self, offset: int, found: bool) -> None:
        self.longest = max(self.longest, offset)
        self.looked += 1
        self.looked_sum += offset
        if found:
            self.found += 1
            self.found_sum += offset

    def learn(self) -> None:
        """Set gamma so that 1 - (o / longest)^gamma has the correlation of offset and hit that was seen.

        Over offsets that are spread evenly such a decay puts the mean offset of a hit at (g + 1) / (2 (g + 2)) of
        the whole; the mean that the correlation implies is the observed mean, taken relative to even spread.
        """
        if self.found < 64:
            return
        mean = self.looked_sum / self.looked
        relative = 0.5 * (self.found_sum / self.found) / mean if mean else 0.5
        gamma = (4 * relative - 1) / (1 - 2 * relative) if relative < 0.49 else 8.0
        self.gamma += 0.3 * (min(max(gamma, 0.1), 8.0) - self.gamma)
        for name in ("looked", "looked_sum", "found", "found_sum"):
            setattr(self, name, getattr(self, name) / 2)


@dataclass(slots=True, eq=False)
class Place:
    """One LRU queue: blocks of one of the four queues, one token type and, if structural, one octave of offsets."""

    role: Role
    kind: TokenType
    queue: Queue = field(default_factory=Queue)
    known: float = math.inf
    """Priority of its first block as it stands in the heap; infinite if it is not there."""


class SAECache(Policy):
    """The policy for a cache of `blocks` blocks. What is not in `learn` keeps its initial value."""

    def __init__(self, blocks: int, learn: frozenset[Part] = PARTS, use: frozenset[Part] = PARTS) -> None:
        self.gaps: dict[Role, TurnGaps] = {
            "chat": TurnGaps(math.log(60), 1.0),
            "agentic": TurnGaps(math.log(10), 1.0),
        }
        self.types: dict[TokenType, TypeStatistics] = {}
        self.queues: dict[Role, QueueStatistics] = {role: QueueStatistics() for role in ROLES}
        self.position = PositionStatistics()
        self.temperature = 0.2
        self.found_share = 1.0
        self._learn, self._use = learn, use
        self._ghosts: Ghosts[TokenType] = Ghosts(2 * blocks)
        self._places: dict[tuple[Role, TokenType, int], Place] = {}
        self._of: dict[Block, Place] = {}
        self._heap: list[tuple[float, int, Place]] = []
        self._pushed = 0
        self._stale = True
        self._now = 0.0
        self._evicted = 0
        self._window = max(64, blocks // 8)
        # First requests whose session came back, and all of them, by what can be told of them.
        self._firsts: dict[Hashable, list[float]] = {}

    # -- routing ----------------------------------------------------------------------------------------

    def role(self, block: Block) -> Role:
        use = block.use
        if block.kind == "decode":
            return "evict-first"
        if use.turn > 1 or self._will_return(use):
            return "agentic" if use.agentic else "chat"
        return "structural" if use.templated else "evict-first"

    def _will_return(self, use: Use) -> bool:
        """Whether a first request's session is expected back: by the predictor, else by how such went before."""
        if use.returns is not None:
            return use.returns >= 0.5
        came, all_of_them = self._firsts.get(_first(use), (0.0, 0.0))
        return all_of_them >= 32 and came / all_of_them >= 0.5

    # -- what happens -----------------------------------------------------------------------------------

    def arrive(self, use: Use) -> None:
        self._now = max(self._now, use.time)
        self._stale = True
        counts = self._firsts.setdefault(_first(use), [0.0, 0.0])
        if use.turn == 1:
            counts[1] += 1
        elif use.turn == 2:
            counts[0] += 1
        if "timing" in self._learn and use.session:
            self.gaps["agentic" if use.agentic else "chat"].turn(use.session, use.time)

    def miss(self, key: bytes, use: Use) -> None:
        kind = self._ghosts.take(key)
        if kind is not None:
            self._type(kind).missed += 1

    def insert(self, block: Block) -> None:
        self._type(block.kind).made += 1
        role = self.role(block)
        self.queues[role].made += 1
        self.found_share += (0 - self.found_share) / 4096
        if role == "structural":
            self.position.add(block.offset, found=False)

    def hit(self, block: Block, use: Use) -> None:
        place = self._of.pop(block, None)
        self._type(block.kind).found += 1
        self.found_share += (1 - self.found_share) / 4096
        role = place.role if place else self.role(block)
        statistics = self.queues[role]
        statistics.found += 1
        statistics.hit_tokens += block.size
        if role == "structural":
            self.position.add(block.offset, found=True)
        if place:
            self._leave(block, place)

    def release(self, block: Block) -> None:
        role = self.role(block)
        offsets = block.offset.bit_length() if role == "structural" else 0
        place = self._places.get((role, block.kind, offsets))
        if place is None:
            place = self._places[role, block.kind, offsets] = Place(role, block.kind)
        self._count(role, 1)
        self._of[block] = place
        place.queue.append(block)
        if len(place.queue) == 1:
            self._push(place)

    def leaf(self, block: Block) -> None:
        place = self._of.get(block)
        if place is not None:
            place.queue.ready(block)
            self._push(place)

    def remove(self, block: Block, *, evicted: bool) -> None:
        place = self._of.pop(block, None)
        if place is not None:
            self._leave(block, place)
        if evicted:
            assert block.key is not None
            self._type(block.kind).evicted += 1
            self._ghosts.add(block.key, block.kind)
            self._evicted += 1
            if self._evicted % self._window == 0:
                self._adapt()

    def _leave(self, block: Block, place: Place) -> None:
        place.queue.remove(block)
        self._count(place.role, -1)

    def _count(self, role: Role, change: int) -> None:
        statistics = self.queues[role]
        statistics.block_seconds += statistics.blocks * (self._now - statistics.counted)
        statistics.counted = self._now
        statistics.blocks += change

    def _type(self, kind: TokenType) -> TypeStatistics:
        statistics = self.types.get(kind)
        if statistics is None:
            statistics = self.types[kind] = TypeStatistics()
        return statistics

    # -- choice -----------------------------------------------------------------------------------------

    def priority(self, block: Block, place: Place) -> float:
        idle = max(self._now - block.use.time, SHORTEST)
        if self._learn and self.found_share < SCARCE:
            return 1 / idle
        queue = self.queues[place.role]
        p = 1.0
        if place.role == "evict-first":
            p = (queue.found + 1) / (queue.found + queue.made + 1)
        elif place.role == "structural":
            if "position" in self._use:
                p = 1 - min(block.offset / self.position.longest, 1.0) ** self.position.gamma
        elif "timing" in self._use:
            p = self.gaps[place.role].survival(idle)
        weight = self._type(place.kind).weight if "weights" in self._use else 1.0
        alpha = queue.alpha if "queues" in self._use else 1.0
        return alpha * weight * max(p, 1e-6) / idle

    def victim(self) -> Block | None:
        if self._stale:
            self._stale = False
            self._heap.clear()
            for place in self._places.values():
                place.known = math.inf
                self._push(place)
        heap = self._heap
        while heap:
            known, _, place = heap[0]
            if known != place.known:  # pushed anew since
                heapq.heappop(heap)
                continue
            block = place.queue.first()
            if block is None:
                place.known = math.inf
                heapq.heappop(heap)
                continue
            now = self.priority(block, place)
            if now <= known * (1 + 1e-9):
                return block
            place.known = now  # another block heads this queue by now
            heapq.heapreplace(heap, (now, self._next(), place))
        return None

    def _push(self, place: Place) -> None:
        if self._stale:
            return  # all are pushed before the next choice
        block = place.queue.first()
        if block is None:
            return
        now = self.priority(block, place)
        if now < place.known:
            place.known = now
            heapq.heappush(self._heap, (now, self._next(), place))

    def _next(self) -> int:
        self._pushed += 1
        return self._pushed

    # -- learning ---------------------------------------------------------------------------------------

    def _adapt(self) -> None:
        if "weights" in self._learn:
            self._adapt_weights()
        if "position" in self._learn:
            self.position.learn()
        if "queues" in self._learn:
            self._adapt_queues()
        for counts in self._firsts.values():
            if counts[1] > 1024:
                counts[0], counts[1] = counts[0] / 2, counts[1] / 2
        self._stale = True

    def _adapt_weights(self) -> None:
        for each in self.types.values():
            looked = each.found + each.made
            if looked + each.evicted < 16:
                continue
            missed = min(each.missed / max(each.evicted, 1), 1.0)
            target = 1 + 5 * missed + 2 * each.found / max(looked, 1)
            each.weight += 0.2 * (min(max(target, 0.1), 5.0) - each.weight)
            each.found, each.made = each.found // 2, each.made // 2
            each.evicted, each.missed = each.evicted // 2, each.missed // 2

    def _adapt_queues(self) -> None:
        yields: dict[Role, float] = {}
        for role, each in self.queues.items():
            self._count(role, 0)
            if each.block_seconds > 1e-6:
                yields[role] = each.hit_tokens / each.block_seconds
        mean = sum(yields.values()) / len(yields) if yields else 0.0
        if mean > 0:
            for role, value in yields.items():
                each = self.queues[role]
                target = min(max((value / mean) ** (1 / self.temperature), 0.1), 3.0)
                each.alpha += 0.3 * (target - each.alpha)
        for each in self.queues.values():
            each.hit_tokens //= 2
            each.block_seconds /= 2
            each.found, each.made = each.found // 2, each.made // 2


def _first(use: Use) -> Hashable:
    return use.agentic, use.begins, not use.session.startswith("#")
