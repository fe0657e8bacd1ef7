"""SIEVE: FIFO order, and a hand that takes what was not used since it last came by (Zhang et al., "SIEVE is Simpler
than LRU", NSDI 2024, section 3).

The hand goes from the oldest block to the newest and over again. Where it finds a block that was used it clears the
mark and goes on, leaving the block in its place: new blocks come behind, and the unused ones among them go fast.
"""

from __future__ import annotations

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.use import Use


class _Node:
    """A place in the ring. One out of the ring has itself for neighbours."""

    __slots__ = ("block", "newer", "older", "used")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.used = False
        self.newer = self.older = self

    def put_before(self, node: _Node) -> None:
        """Into the ring as the next older than `node`."""
        self.newer, self.older = node, node.older
        self.older.newer = node.older = self

    def take_out(self) -> None:
        self.older.newer, self.newer.older = self.newer, self.older
        self.newer = self.older = self


class Sieve(Policy):
    """The paper's algorithm 1. A block that cannot go leaves the ring when the hand wants it, and comes back
    under the hand as soon as it can."""

    def __init__(self) -> None:
        self._nodes: dict[Block, _Node] = {}
        self._end = _Node(Block(-1))  # between the newest and the oldest
        self._hand = self._end
        self._aside: set[Block] = set()

    def insert(self, block: Block) -> None:
        self._nodes[block] = _Node(block)

    def hit(self, block: Block, use: Use) -> None:
        self._nodes[block].used = True

    def release(self, block: Block) -> None:
        node = self._nodes[block]
        if block in self._aside:
            self._return(node)
        elif node.newer is node:
            node.put_before(self._end)

    def leaf(self, block: Block) -> None:
        if block in self._aside:
            self._return(self._nodes[block])

    def remove(self, block: Block, *, evicted: bool) -> None:
        node = self._nodes.pop(block)
        self._aside.discard(block)
        self._take_out(node)
        del node.newer, node.older  # themselves: free without the garbage collector

    def victim(self) -> Block | None:
        while self._end.newer is not self._end:
            node = self._hand
            if node is self._end:
                self._hand = node.newer
            elif node.used:
                node.used = False
                self._hand = node.newer
            elif node.block.users or node.block.children:
                self._take_out(node)
                self._aside.add(node.block)
            else:
                return node.block
        return None

    def _take_out(self, node: _Node) -> None:
        if self._hand is node:
            self._hand = node.newer
        node.take_out()

    def _return(self, node: _Node) -> None:
        self._aside.remove(node.block)
        node.put_before(self._hand)
        self._hand = node
