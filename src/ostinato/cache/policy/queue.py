"""A queue of blocks, the next victim first, for policies that rank by order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ostinato.cache.block import Block


class Queue:
    """Blocks in order. All calls are O(1), amortised.

    A block that cannot go (in use, or with cached children) steps aside when its turn comes, and is first again
    as soon as it can: a queue is never searched twice past the same block.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Block, None] = OrderedDict()
        self._aside: set[Block] = set()

    def __len__(self) -> int:
        return len(self._order) + len(self._aside)

    def __contains__(self, block: Block) -> bool:
        return block in self._order or block in self._aside

    def append(self, block: Block) -> None:
        """Put `block`, new to the queue, last."""
        self._order[block] = None

    def extend(self, blocks: Iterable[Block]) -> None:
        """Put `blocks`, new to the queue, last."""
        self._order.update(dict.fromkeys(blocks))

    def remove(self, block: Block) -> bool:
        """Take `block` out; False if it was not in."""
        if block in self._order:
            del self._order[block]
            return True
        if block in self._aside:
            self._aside.remove(block)
            return True
        return False

    def oldest(self) -> Block | None:
        """The block at the front, without those aside, whether it can go or not."""
        return next(iter(self._order), None)

    def take_unused_since(self, time: float) -> list[Block]:
        """Take out the blocks at the front, without those aside, that were last used at `time` or before."""
        taken: list[Block] = []
        for block in self._order:
            if block.use.time > time:
                break
            taken.append(block)
        for block in taken:
            del self._order[block]
        return taken

    def first(self) -> Block | None:
        """The first block that can go."""
        while self._order:
            block = next(iter(self._order))
            if not block.users and not block.children:
                return block
            del self._order[block]
            self._aside.add(block)
        return None

    def ready(self, block: Block) -> None:
        """`block` may have become able to go: if it stepped aside, it is first again."""
        if block in self._aside:
            self._aside.remove(block)
            self._order[block] = None
            self._order.move_to_end(block, last=False)
