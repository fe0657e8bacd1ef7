"""A bounded store whose room is shared by the owners of what is in it: who fills it pushes out its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Owner = TypeVar("Owner", bound=Hashable)


class Owned(Generic[Owner, K, V]):
    """Values by owner and key, at most `room` of them; where that is exceeded, whoever has most loses its oldest."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._count = 0
        self._of: dict[Owner, OrderedDict[K, V]] = {}

    def __len__(self) -> int:
        return self._count

    def get(self, owner: Owner, key: K) -> V | None:
        """The owner's value of a key, which counts as its newest from now on; nobody else's is found."""
        own = self._of.get(owner)
        if own is None or key not in own:
            return None
        own.move_to_end(key)
        return own[key]

    def put(self, owner: Owner, key: K, value: V) -> None:
        """Keep a value, in place of what the owner has of that key."""
        own = self._of.setdefault(owner, OrderedDict())
        self._count += key not in own
        own[key] = value
        own.move_to_end(key)
        if self._count > self._room:
            most = max(self._of, key=lambda each: len(self._of[each]))
            self.drop(most, next(iter(self._of[most])))

    def drop(self, owner: Owner, key: K) -> None:
        """Keep it no more, if it is there."""
        own = self._of.get(owner)
        if own is None or key not in own:
            return
        del own[key]
        self._count -= 1
        if not own:
            del self._of[owner]

    def forget(self, forgotten: Callable[[Owner, V], bool]) -> None:
        """Drop all that `forgotten` holds for."""
        for owner, key, value in list(self):
            if forgotten(owner, value):
                self.drop(owner, key)

    def __iter__(self) -> Iterator[tuple[Owner, K, V]]:
        for owner, own in self._of.items():
            for key, value in own.items():
                yield owner, key, value
