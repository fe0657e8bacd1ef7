"""Sessions: which requests belong together, told by the client or seen from what they continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

REMEMBERED = 65_536

K = TypeVar("K")
V = TypeVar("V")


class Sessions:
    """Numbers the turns of sessions.

    Without a name from the client, a request that extends another's whole prompt continues its session. Where two
    extend the same one, it is shared text (a system prompt), and whoever extends it begins a session of its own.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._tips: OrderedDict[bytes, str] = OrderedDict()
        """Key of a prompt's last full block -> its session; empty once a second request has continued it."""
        self._count = 0

    def turn(self, keys: Sequence[bytes], name: str) -> tuple[str, int]:
        """The session, and the number of its turn, of a request.

        `keys` are those of its prompt's full blocks, in order, without the ones at the beginning that are not of
        one conversation alone. `name` is the client's, empty if it gave none.
        """
        session = name or self._continued(keys)
        if not session:
            self._count += 1
            session = f"#{self._count}"
        turn = self._turns.pop(session, 0) + 1
        _remember(self._turns, session, turn)
        if not name and keys:
            # Known already: the same prompt again, or shared text. Shared stays shared.
            _remember(self._tips, keys[-1], "" if self._tips.get(keys[-1]) == "" else session)
        return session, turn

    def _continued(self, keys: Sequence[bytes]) -> str:
        for key in reversed(keys):
            session = self._tips.get(key)
            if session is not None:
                if session:
                    self._tips[key] = ""
                return session
        return ""


def _remember(table: OrderedDict[K, V], key: K, value: V) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > REMEMBERED:
        table.popitem(last=False)
