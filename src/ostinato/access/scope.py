"""Scopes: who may reuse the KV of a span."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from ostinato.cache.keys import encode_fields

Level = Literal["public", "org", "user", "session"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""From the widest to the narrowest."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Those who may reuse what is computed in it.

    `level` says how wide it is, the other fields whose it is: `org` alone for an organisation's, `org` and `user` for
    a user's, and so on. A registered document or schema has a scope of its own (`resource`) within its level, so that
    it can be forgotten alone, and be read by those only whom its grants name.
    """

    level: Level
    org: str = ""
    user: str = ""
    session: str = ""
    resource: str = ""
    end_user: str = ""
    """Of the caller's own users, which one, as `session_name` has it: a scope beneath the user's."""
    salt: str = ""
    """What the caller has salted its text with, as `session_name` has it: a scope beneath any."""

    def encoded(self) -> bytes:
        """Canonical bytes: no two scopes encode alike, whatever their names hold."""
        fields = [self.level, self.org, self.user, self.session, self.resource]
        if self.end_user or self.salt:
            fields += [self.end_user, self.salt]
        return encode_fields(field.encode(errors="surrogatepass") for field in fields)

    def beneath(self, *, end_user: str = "", salt: str = "") -> Scope:
        """The part of the scope that is an end user's (of a user's scope, or a session's), and that is salted so.

        What is registered is whose the server says it is, whoever asks about it.
        """
        if self.resource:
            return self
        own = self.level in ("user", "session")
        return replace(self, end_user=end_user if own else "", salt=salt)

    @property
    def private(self) -> bool:
        """Whether it is one user's alone, whoever else there is."""
        return self.level in ("user", "session") and not self.resource

    def within(self, other: Scope) -> bool:
        """Whether whoever may reuse what is in this scope may also reuse what is in the other."""
        if rank(other.level) > rank(self.level):
            return False
        if self.level == other.level == "user" and self.resource != other.resource:
            return False  # what is registered may have readers beside its owner
        pairs = (
            (self.org, other.org),
            (self.user, other.user),
            (self.session, other.session),
            (self.resource, other.resource),
            (self.end_user, other.end_user),
            (self.salt, other.salt),
        )
        return all(theirs in ("", ours) for ours, theirs in pairs)

    def __str__(self) -> str:
        names = "/".join(name for name in (self.org, self.user, self.session, self.resource) if name)
        narrowed = ("end-user", self.end_user), ("salt", self.salt)
        beneath = "".join(f"#{what}={name[:16]}" for what, name in narrowed if name)
        return (f"{self.level}:{names}" if names else self.level) + beneath


PUBLIC = Scope("public")


def session_name(name: str) -> str:
    """What a session is called inside, from the client's name for it: it can be read in no log, and no name that a
    client gives is that of a session without one."""
    return name and hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()


def rank(level: Level) -> int:
    """0 for the widest."""
    return LEVELS.index(level)


def narrower(a: Scope, b: Scope, *, asker: Scope) -> Scope:
    """The scope of what is computed from both: the narrower, or the asker's own where neither lies in the other."""
    if a is b or a.within(b):
        return a
    if b.within(a):
        return b
    low = max(a, b, key=lambda scope: rank(scope.level))
    if low.level == "session":
        return replace(low, resource="")  # what belongs to a session has no other readers than its user
    # What has no resource is the asker's own, or its organisation's.
    return asker if low.resource or a.level == b.level else low


class Secrets(Protocol):
    """The random 256-bit secret of each scope. Who has a scope's secret replaced can find none of its blocks again."""

    def secret(self, scope: Scope) -> bytes:
        """The secret of a scope, made when first asked for. Safe from any thread."""
        ...

    def replace(self, forgotten: Callable[[Scope], bool]) -> list[Scope]:
        """Destroy the secrets of all scopes that `forgotten` holds for; those scopes are returned."""
        ...


class MemorySecrets:
    """Secrets that end with the process, as its KV does."""

    def __init__(self) -> None:
        self._secrets: dict[Scope, bytes] = {}
        self._lock = threading.Lock()

    def secret(self, scope: Scope) -> bytes:
        with self._lock:
            return self._secrets.setdefault(scope, os.urandom(32))

    def replace(self, forgotten: Callable[[Scope], bool]) -> list[Scope]:
        with self._lock:
            gone = [scope for scope in self._secrets if forgotten(scope)]
            for scope in gone:
                del self._secrets[scope]
            return gone
