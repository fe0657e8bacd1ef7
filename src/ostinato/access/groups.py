"""Which users are in which groups. Read with every request: who is taken out of a group is out at the next."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.access.audit import Audit
from ostinato.access.errors import NotFoundError
from ostinato.access.names import check_name, shown
from ostinato.access.principal import LOCAL, Principal
from ostinato.access.state import State


@dataclass(frozen=True, order=True)
class Membership:
    """A user of an organisation is in one of its groups."""

    org: str
    user: str
    group: str


class Groups:
    """The memberships of a state: of users, not of keys, so that all keys of a user lose a group at once."""

    def __init__(self, state: State, audit: Audit) -> None:
        self._state = state
        self._audit = audit

    def add(self, org: str, user: str, group: str, *, by: Principal = LOCAL) -> None:
        """Put a user into a group; who is in it already stays."""
        member = _checked(org, user, group)
        with self._state.transaction() as db:
            added = db.execute(
                "INSERT OR IGNORE INTO memberships (org, user, name) VALUES (?, ?, ?)",
                (member.org, member.user, member.group),
            )
            if added.rowcount:
                self._audit.record(by, "group.add", group, org=org, detail={"user": user})

    def remove(self, org: str, user: str, group: str, *, by: Principal = LOCAL) -> None:
        """Take a user out of a group."""
        member = _checked(org, user, group)
        with self._state.transaction() as db:
            removed = db.execute(
                "DELETE FROM memberships WHERE org = ? AND user = ? AND name = ?",
                (member.org, member.user, member.group),
            )
            if not removed.rowcount:
                raise NotFoundError(
                    f"{shown(user)} of {shown(org)} is not in the group {shown(group)}. "
                    "`ostinato groups list` shows who is in which."
                )
            self._audit.record(by, "group.remove", group, org=org, detail={"user": user})

    def of(self, org: str, user: str) -> frozenset[str]:
        """The groups of a user, as of now."""
        rows = self._state.rows("SELECT name FROM memberships WHERE org = ? AND user = ?", org, user)
        return frozenset(row[0] for row in rows)

    def all(self, org: str | None = None) -> list[Membership]:
        """All memberships, or those of an organisation."""
        rows = self._state.rows(
            "SELECT org, user, name FROM memberships WHERE ?1 IS NULL OR org = ?1 ORDER BY org, name, user",
            org,
        )
        return [Membership(*row) for row in rows]


def _checked(org: str, user: str, group: str) -> Membership:
    return Membership(
        check_name(org, "organisation", "org"),
        check_name(user, "user", "user"),
        check_name(group, "group", "group"),
    )
