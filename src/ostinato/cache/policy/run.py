"""A run: a piece of a chain that a request used, all of one class of blocks."""

from __future__ import annotations

from collections import deque

from ostinato.cache.block import Block


class Run:
    """Blocks of equal worth, the leaf first and each of them the parent of the one before.

    So only the first can be a leaf of what is cached, and policies that rank runs need not look at single blocks.
    """

    __slots__ = (
        "bin", "blocks", "held", "known", "last", "listed", "number", "of", "others", "priority", "time", "worth",
    )  # fmt: skip

    def __init__(
        self, of: tuple[int, int], others: float, known: float, time: float, number: int, priority: float
    ) -> None:
        self.of = of
        """Classes of its blocks."""
        self.others, self.known = others, known
        """How often other sessions used them, in how many seconds."""
        self.time, self.number = time, number
        self.priority = priority
        """Of its first block, by GDSF."""
        self.blocks: deque[Block] = deque()
        """Those released into the run; of some it does not know yet that they have left it."""
        self.held = 0
        """How many have not."""
        self.last = b""
        """Key of the parent of the last block."""
        self.bin = 0
        """Of its age; negative once it is forgotten."""
        self.worth = 0.0
        self.listed = False
        """Its first block may be a leaf, so it stands in the order of victims."""
