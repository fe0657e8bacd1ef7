"""The secrets of scopes, kept in the state so that KV on disk outlives the process, until it is forgotten."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import cast

from ostinato.access.scope import Level, Scope
from ostinato.access.state import State


class StoredSecrets:
    """`Secrets` on SQLite. A lookup costs a dictionary's; the file is asked for what the process has not seen yet.

    A secret that another process has replaced is noticed by `refresh`, which the server calls with each request.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._cached: dict[Scope, bytes] = {}
        self._seen = state.data_version()

    def secret(self, scope: Scope) -> bytes:
        """The secret of a scope, made when first asked for, by whichever process is the first."""
        cached = self._cached.get(scope)
        return self._stored(scope) if cached is None else cached

    def replace(self, forgotten: Callable[[Scope], bool]) -> list[Scope]:
        """Destroy the secrets of all scopes that `forgotten` holds for, in the file and its log; return the scopes."""
        with self._state.transaction() as db:
            scopes = [decoded(row[0]) for row in self._state.rows("SELECT scope FROM secrets")]
            gone = [scope for scope in scopes if forgotten(scope)]
            db.executemany("DELETE FROM secrets WHERE scope = ?", [(scope.encoded(),) for scope in gone])
            for scope in gone:
                self._cached.pop(scope, None)
            if gone:
                self._state.scrub()
        return gone

    def refresh(self) -> None:
        """Notice what other processes have replaced. Microseconds, unless they have written."""
        with self._state.locked():
            seen = self._state.data_version()
            if seen != self._seen:
                self._seen = seen
                self._cached.clear()

    def _stored(self, scope: Scope) -> bytes:
        encoded = scope.encoded()
        # Locked as a whole: nothing is cached that `replace` or `refresh` has just thrown out.
        with self._state.locked():
            row = self._state.row("SELECT secret FROM secrets WHERE scope = ?", encoded)
            if row is None:
                with self._state.transaction() as db:
                    db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (encoded, os.urandom(32)))
                    row = self._state.row("SELECT secret FROM secrets WHERE scope = ?", encoded)
            secret: bytes = row[0]
            self._cached[scope] = secret
            return secret


def decoded(encoded: bytes) -> Scope:
    """The scope of canonical bytes: the inverse of `Scope.encoded`."""
    fields: list[str] = []
    while encoded:
        (size,) = struct.unpack_from("<Q", encoded)
        fields.append(encoded[8 : 8 + size].decode(errors="surrogatepass"))
        encoded = encoded[8 + size :]
    level, org, user, session, resource = fields
    return Scope(cast("Level", level), org, user, session, resource)
