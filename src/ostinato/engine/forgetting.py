"""Forgetting: what of a user, a session, a document or a request is taken away, and of requests in preparation."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ostinato.access.grants import manages
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope
from ostinato.cache.block import Block, Lineage
from ostinato.engine.sequence import Sequence, request_tag

KEPT = 1_024
"""The latest acts of forgetting that are compared with requests in preparation, which takes milliseconds."""


@dataclass(frozen=True)
class Forgotten:
    """What was taken away of the asker's own."""

    blocks: int
    tokens: int


@dataclass(frozen=True)
class Forgetting:
    """What a principal has forgotten: all of some scopes, or one of its requests."""

    scopes: Callable[[Scope], bool]
    request_id: str
    principal: Principal

    @cached_property
    def user(self) -> Scope:
        """Who forgets."""
        return self.principal.scope("user")

    @cached_property
    def request(self) -> str:
        """The request as lineages and claims have it; empty if it is not one that is forgotten."""
        return self.request_id and request_tag(self.user, self.request_id)

    def covers(self, lineage: Lineage) -> bool:
        """Whether what has this lineage is forgotten."""
        return any(self.scopes(each) if isinstance(each, Scope) else each == self.request for each in lineage)

    def counts(self, block: Block, now: float) -> bool:
        """Whether the principal may know that a block was there: it has sent the text, or rules the scope."""
        ruled = self.scopes(block.scope) and manages(self.principal, block.scope.org)
        return ruled or block.sent_by(self.user, now)


class Forgettings:
    """The latest acts of forgetting, by their number. Safe from any thread."""

    def __init__(self) -> None:
        self.epoch = 0
        self._latest: deque[tuple[int, Forgetting]] = deque(maxlen=KEPT)
        self._lock = threading.Lock()

    def add(self, forgetting: Forgetting) -> None:
        """From now on, text that was read before is compared with it when it comes to be computed."""
        with self._lock:
            self.epoch += 1
            self._latest.append((self.epoch, forgetting))

    def concern(self, sequence: Sequence) -> bool:
        """Whether something that a sequence has to do with was forgotten after the first of its text was read."""
        with self._lock:
            since = [forgetting for epoch, forgetting in self._latest if epoch > sequence.epoch]
            if self.epoch - sequence.epoch > len(since):
                return True  # too long ago to tell
        return any(forgetting.covers(sequence.lineage) for forgetting in since)
