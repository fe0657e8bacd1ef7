"""API keys: `ost_`, an id of 16 hex digits, `_` and 256 random bits. The server keeps a hash of them.

SHA-256 without salt or stretching is enough: those slow down guessing of what people choose, and nobody guesses 256
random bits.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ostinato.access.audit import Audit
from ostinato.access.errors import NotFoundError
from ostinato.access.groups import Groups
from ostinato.access.names import check_name, shown
from ostinato.access.permissions import parse_permissions, stored_permissions
from ostinato.access.principal import LOCAL, Permission, Principal
from ostinato.access.state import State
from ostinato.errors import InvalidRequestError

PREFIX = "ost_"

_KEY = re.compile(r"(ost_[0-9a-f]{16})_[0-9a-f]{64}", re.ASCII)
_NO_HASH = bytes(32)
_COLUMNS = "id, org, user, permissions, created, expires, revoked"


@dataclass(frozen=True)
class KeyInfo:
    """All that is known of a key once it has been shown. Times are seconds since 1970."""

    id: str
    org: str
    user: str
    permissions: frozenset[Permission]
    created: float
    expires: float | None = None
    revoked: float | None = None


class ApiKeys:
    """The keys of a state. They are asked of the file each time: a revoked one is refused at the next request."""

    def __init__(self, state: State, audit: Audit, groups: Groups) -> None:
        self._state = state
        self._audit = audit
        self._groups = groups

    def create(
        self,
        org: str,
        user: str,
        groups: Iterable[str] = (),
        permissions: Iterable[str] = (),
        *,
        expires: float | None = None,
        by: Principal = LOCAL,
    ) -> tuple[KeyInfo, str]:
        """A new key and the secret that is shown this once. The groups are the user's from now on, with any key.

        Args:
            org: the organisation; it need not exist before.
            user: the user: keys of the same organisation and user are one principal.
            groups: groups to put the user into.
            permissions: what the key may do beyond asking.
            expires: when it ends, in seconds since 1970; None: never.
            by: who makes it, for the audit log.
        """
        now = self._state.now()
        if expires is not None and expires <= now:
            raise InvalidRequestError("The key would have expired already.", param="expires")
        info = KeyInfo(
            PREFIX + secrets.token_hex(8),
            check_name(org, "organisation", "org"),
            check_name(user, "user", "user"),
            parse_permissions(permissions),
            created=now,
            expires=expires,
        )
        secret = f"{info.id}_{secrets.token_hex(32)}"
        with self._state.transaction() as db:
            db.execute(
                f"INSERT INTO api_keys ({_COLUMNS}, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    info.id,
                    info.org,
                    info.user,
                    json.dumps(sorted(info.permissions)),
                    info.created,
                    info.expires,
                    info.revoked,
                    _hash(secret),
                ),
            )
            for group in groups:
                self._groups.add(org, user, group, by=by)
            self._audit.record(
                by,
                "key.create",
                info.id,
                org=org,
                detail={"user": user, "permissions": sorted(info.permissions), "expires": _utc(expires)},
            )
        return info, secret

    def authenticate(self, token: str) -> Principal | None:
        """Who holds the key; None if it is unknown, revoked or expired."""
        match = _KEY.fullmatch(token)
        if match is None:
            return None
        row = self._state.row(f"SELECT {_COLUMNS}, hash FROM api_keys WHERE id = ?", match[1])
        # The id is public; what takes a time that tells is the secret. An unknown id costs a comparison as well.
        same = hmac.compare_digest(_NO_HASH if row is None else row[7], _hash(token))
        if row is None or not same:
            return None
        info = _info(row)
        if info.revoked is not None or (info.expires is not None and info.expires <= self._state.now()):
            return None
        return Principal(
            info.org,
            info.user,
            groups=self._groups.of(info.org, info.user),
            permissions=info.permissions,
            credential=info.id,
        )

    def all(self, org: str | None = None) -> list[KeyInfo]:
        """All keys, or those of an organisation, the revoked among them; the oldest first."""
        rows = self._state.rows(
            f"SELECT {_COLUMNS} FROM api_keys WHERE ?1 IS NULL OR org = ?1 ORDER BY created, id", org
        )
        return [_info(row) for row in rows]

    def revoke(self, key_id: str, *, by: Principal = LOCAL) -> KeyInfo:
        """End a key. One that has ended stays as it is."""
        with self._state.transaction() as db:
            ended = db.execute(
                "UPDATE api_keys SET revoked = ? WHERE id = ? AND revoked IS NULL",
                (self._state.now(), key_id),
            ).rowcount
            row = self._state.row(f"SELECT {_COLUMNS} FROM api_keys WHERE id = ?", key_id)
            if row is None:
                raise NotFoundError(f"There is no key {shown(key_id)}. `ostinato keys list` shows them.")
            info = _info(row)
            if ended:
                self._audit.record(by, "key.revoke", key_id, org=info.org, detail={"user": info.user})
        return info

    def ever_made(self) -> bool:
        """Whether a key was ever made, be it revoked."""
        return self._state.row("SELECT 1 FROM api_keys LIMIT 1") is not None


def public_id(token: str) -> str:
    """The part of a token that may stand in a log; empty if it is not of a key's shape."""
    match = _KEY.fullmatch(token)
    return match[1] if match else ""


def _utc(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _info(row: Any) -> KeyInfo:
    id, org, user, permissions, created, expires, revoked = row[:7]
    return KeyInfo(id, org, user, stored_permissions(permissions), created, expires, revoked)
