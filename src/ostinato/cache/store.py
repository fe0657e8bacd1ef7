"""The store: which blocks are cached, how they hang together, who uses them, and which goes next.

It knows neither tokens nor memory: the engine's index and a trace replay keep their blocks in the same store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ostinato.cache.block import Block
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.queue import Queue
from ostinato.cache.session import Sessions
from ostinato.cache.use import TokenType, Use


class Store:
    """Cached blocks by key. `idle` counts those that no request uses."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.blocks: dict[bytes, Block] = {}
        self.idle = 0
        self._now = 0.0
        self._sessions = Sessions()
        self._retired = Queue()

    def begin(
        self,
        time: float,
        keys: Sequence[bytes],
        *,
        session: str = "",
        tokens: int = 0,
        agentic: bool = False,
        begins: TokenType = "text",
        starts: bytes = b"",
        templated: bool = False,
        scope: str = "public",
    ) -> Use:
        """A request comes in. Returns what its blocks are used for.

        `keys` are of its prompt's full blocks but for those at the beginning that are not of one conversation alone,
        `session` is the client's name for the session, empty if it gave none, `starts` the key of the last
        full block of the instructions that the prompt begins with.
        """
        self._now = max(self._now, time)
        session, turn = self._sessions.turn(keys, session)
        use = Use(self._now, session, turn, tokens, agentic, begins, starts, templated, scope=scope)
        self.policy.arrive(use)
        return use

    def insert(self, block: Block, use: Use) -> None:
        """Cache a written block with a key of its own; its one user is `use`."""
        assert block.key is not None
        block.use = use
        self.blocks[block.key] = block
        parent = self.blocks.get(block.parent)
        if parent is not None:
            parent.children += 1
        self.policy.insert(block)

    def acquire(self, block: Block, use: Use) -> None:
        """Use a cached block: it stays until it is released as often as acquired."""
        if not block.users:
            self.idle -= 1
        block.users += 1
        if use.session != block.use.session or use.turn != block.use.turn:
            block.uses += 1  # not so for a request that was preempted and comes back
        if block.retired:  # somebody asks for it after all
            block.retired = False
            self._retired.remove(block)
            block.use = use
            self.policy.insert(block)
            return
        self.policy.hit(block, use)
        block.use = use

    def release(self, block: Block, use: Use) -> None:
        """Stop using a block. The blocks of a chain are released leaf first."""
        if use.time >= block.use.time:
            block.use = use  # what is known of the request by now
        block.users -= 1
        if block.users:
            return
        self.idle += 1
        if block.retired:
            self._retired.ready(block)
        else:
            self.policy.release(block)

    def retire(self, keys: Iterable[bytes]) -> None:
        """Evict the blocks of these keys before all others: what they belong to is gone."""
        for block in reversed([block for key in keys if (block := self.blocks.get(key)) is not None]):
            if not block.retired:
                self.policy.remove(block, evicted=False)
                block.retired = True
                self._retired.append(block)

    def victim(self) -> Block | None:
        """The block to evict next, a leaf that nobody uses; None if there is none."""
        return self._retired.first() or self.policy.victim()

    def remove(self, block: Block, *, evicted: bool) -> None:
        """Forget a block that has no children. `evicted`: for want of room, which takes one that nobody uses."""
        assert block.key is not None
        assert not (evicted and block.users)
        assert not block.children
        del self.blocks[block.key]
        self.idle -= not block.users
        if not (block.retired and self._retired.remove(block)):
            self.policy.remove(block, evicted=evicted)
        parent = self.blocks.get(block.parent)
        if parent is None:
            return
        parent.children -= 1
        if not parent.children:
            (self._retired.ready if parent.retired else self.policy.leaf)(parent)

    def lookup(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest cached beginning of a chain."""
        found: list[Block] = []
        for key in keys:
            block = self.blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found
