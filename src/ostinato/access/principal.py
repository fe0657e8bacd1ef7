"""Principals: who asks, as the server has authenticated them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from ostinato.access.scope import PUBLIC, Level, Scope

Permission = Literal["publish:public", "publish:org", "admin:org", "admin", "metrics"]
"""What a principal may do beyond asking: share text with everyone or with its organisation; read the audit log,
manage grants and forget, of its organisation or of all; read `/metrics`, as a scraper does."""

PERMISSIONS: tuple[Permission, ...] = get_args(Permission)


@dataclass(frozen=True)
class Principal:
    """Who asks. Nothing here comes from the request but what the server could verify."""

    org: str
    user: str
    groups: frozenset[str] = field(default_factory=frozenset[str])
    permissions: frozenset[Permission] = field(default_factory=frozenset[Permission])
    credential: str = ""
    """What it authenticated with, for the audit log: the id of a key, or the issuer of a token."""

    def may(self, permission: Permission) -> bool:
        return permission in self.permissions or "admin" in self.permissions

    def scope(self, level: Level, session: str = "") -> Scope:
        """Its own scope of a level. `session` is the name it gives the session; others' sessions are out of reach."""
        match level:
            case "public":
                return PUBLIC
            case "org":
                return Scope("org", self.org)
            case "user":
                return Scope("user", self.org, self.user)
            case "session":
                return Scope("session", self.org, self.user, session)


LOCAL = Principal("local", "local", permissions=frozenset(PERMISSIONS))
"""Whoever uses the engine in this process, or a server without authentication on this machine alone."""

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""The names of this machine, under which such a server can be reached."""
