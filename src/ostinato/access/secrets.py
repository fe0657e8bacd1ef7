"""The secrets of scopes, kept in the state so that KV on disk outlives the process, until it is forgotten.

Nobody makes the file grow without end: of what a client names (sessions, its own users, salts) an owner has a bounded
number of secrets, and what is registered has one for as long as it is registered.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from ostinato.access.resources import PREFIXES
from ostinato.access.scope import Level, Scope
from ostinato.access.state import State

NAMED = 4_096
"""Secrets of scopes that a client has named that are kept of one owner. KV under one that went is found by nobody."""

NAMED_IN_ALL = 131_072
"""Such secrets of all owners. Beyond that, whoever has most loses its oldest."""

AT_ONCE = 512
"""How many it then loses, so that not each new one has the owners counted."""

CACHED = 65_536
"""Secrets that a process has at hand."""

_REGISTERED = re.compile(f"(?:{'|'.join(PREFIXES.values())})[0-9a-f]{{32}}", re.ASCII)


class StoredSecrets:
    """`Secrets` on SQLite. A lookup costs a dictionary's; the file is asked for what the process has not seen yet.

    A secret that another process has replaced is noticed by `refresh`, which the server calls with each request.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._cached: dict[Scope, bytes] = {}
        self._prepared: dict[Scope, bytes] = {}
        self._seen = state.data_version()

    def secret(self, scope: Scope) -> bytes:
        """The secret of a scope, made when first asked for, by whichever process is the first.

        What is not registered any more has none: each call gives other bytes, under which nothing is found again.
        """
        cached = self._cached.get(scope)
        return self._stored(scope) if cached is None else cached

    @contextmanager
    def preparing(self, scope: Scope) -> Generator[None]:
        """Meanwhile the scope has a secret, though it is registered only at the end of it, or not at all."""
        self._prepared[scope] = os.urandom(32)
        try:
            yield
        finally:
            self._prepared.pop(scope, None)

    def replace(self, forgotten: Callable[[Scope], bool]) -> list[Scope]:
        """Destroy the secrets of all scopes that `forgotten` holds for, in the file and its log; return the scopes."""
        rows = self._state.rows("SELECT scope FROM secrets UNION ALL SELECT scope FROM named_secrets")
        # There may be many, and nobody is kept waiting while they are looked through.
        gone = [scope for (encoded,) in rows if forgotten(scope := decoded(encoded))]
        with self._state.transaction() as db:
            for table in ("secrets", "named_secrets"):
                db.executemany(f"DELETE FROM {table} WHERE scope = ?", [(scope.encoded(),) for scope in gone])
            # Those of a salt in everyone's scope are no rows of their own.
            for kept in (self._cached, self._prepared):
                for scope in [scope for scope in list(kept) if forgotten(scope)]:
                    kept.pop(scope, None)
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
        # Locked as a whole: nothing is cached that `replace` or `refresh` has just thrown out.
        with self._state.locked():
            new = self._prepared.get(scope, os.urandom(32))
            if _REGISTERED.fullmatch(scope.resource) and not self._is_registered(scope.resource):
                return new
            if scope.level == "public" and scope.salt and not scope.resource:
                secret = self._salted(scope)
            elif not scope.resource and (scope.session or scope.end_user or scope.salt):
                secret = self._named(scope, new)
            else:
                secret = self._kept(scope, new)
            if len(self._cached) >= CACHED:
                del self._cached[next(iter(self._cached))]
            self._cached[scope] = secret
            return secret

    def _is_registered(self, id: str) -> bool:
        return self._state.row("SELECT 1 FROM resources WHERE id = ?", id) is not None

    def _salted(self, scope: Scope) -> bytes:
        """A secret beneath everyone's, which nobody owns: were it a row, whoever makes many would push out others'."""
        return hmac.digest(self.secret(replace(scope, salt="")), scope.encoded(), hashlib.sha256)

    def _kept(self, scope: Scope, new: bytes) -> bytes:
        select, encoded = "SELECT secret FROM secrets WHERE scope = ?", scope.encoded()
        row = self._state.row(select, encoded)
        if row is None:
            with self._state.transaction() as db:
                db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (encoded, new))
                row = self._state.row(select, encoded)
        return row[0]

    def _named(self, scope: Scope, new: bytes) -> bytes:
        select, encoded = "SELECT secret FROM named_secrets WHERE scope = ?", scope.encoded()
        row = self._state.row(select, encoded)
        if row is None:
            with self._state.transaction() as db:
                db.execute(
                    "INSERT OR IGNORE INTO named_secrets (org, user, scope, secret) VALUES (?, ?, ?, ?)",
                    (scope.org, scope.user, encoded, new),
                )
                row = self._state.row(select, encoded)
                self._let_go(scope.org, scope.user, NAMED)
                most = self._state.row(
                    "SELECT org, user, count(*) FROM named_secrets WHERE (SELECT count(*) FROM named_secrets) > ? "
                    "GROUP BY org, user ORDER BY count(*) DESC, min(made) LIMIT 1",
                    NAMED_IN_ALL,
                )
                if most is not None:
                    self._let_go(most[0], most[1], max(most[2] // 2, most[2] - AT_ONCE))
        return row[0]

    def _let_go(self, org: str, user: str, room: int) -> None:
        """Keep the newest of an owner's, so many of them."""
        with self._state.transaction() as db:
            old = self._state.rows(
                "SELECT made, scope FROM named_secrets WHERE org = ? AND user = ? ORDER BY made DESC LIMIT -1 OFFSET ?",
                org,
                user,
                room,
            )
            db.executemany("DELETE FROM named_secrets WHERE made = ?", [(made,) for made, _ in old])
        for _, encoded in old:
            self._cached.pop(decoded(encoded), None)


def decoded(encoded: bytes) -> Scope:
    """The scope of canonical bytes: the inverse of `Scope.encoded`."""
    fields: list[str] = []
    while encoded:
        (size,) = struct.unpack_from("<Q", encoded)
        fields.append(encoded[8 : 8 + size].decode(errors="surrogatepass"))
        encoded = encoded[8 + size :]
    level, *names = fields
    return Scope(cast("Level", level), *names)
