"""Registered documents and schemas: their text, whose it is, and who may read it (the rules: `grants.py`).

Whoever uses one asks here each time, and is answered by the file as it is at that moment: a grant taken back, by this
process or another, is gone at the next request.
"""

from __future__ import annotations

import json
import re
import secrets
import sqlite3
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from ostinato.access.audit import Action, Audit
from ostinato.access.errors import ConflictError, ForbiddenError, NotFoundError
from ostinato.access.grants import (
    Reader,
    badges,
    check_publish,
    manages,
    may_change,
    may_read,
    owns,
    parse_readers,
)
from ostinato.access.names import check_name, shown
from ostinato.access.principal import Principal
from ostinato.access.scope import Level, Scope
from ostinato.access.state import State
from ostinato.errors import InvalidRequestError

Kind = Literal["document", "schema"]

PREFIXES: dict[Kind, str] = {"document": "doc_", "schema": "sch_"}

_ID = re.compile(r"(?:doc|sch)_[0-9a-f]{32}", re.ASCII)
# SQLite finds what stands behind a text in a row by reading all of that text.
_REST = "ttl, created, (SELECT json_group_array(reader) FROM readers WHERE resource = resources.id)"
_OWNED = "kind, name, org, user, level, session"

_FACTS = f"""resources.id, {_OWNED},
    EXISTS (SELECT 1 FROM readers WHERE resource = asked.id),
    EXISTS (SELECT 1 FROM json_each(?1) CROSS JOIN readers ON resource = asked.id AND reader = value)
    FROM asked LEFT JOIN resources ON resources.id = asked.id"""
"""What decides who may read something: the same to look up for any number of readers, and for what is not there."""

_BY_ID = f"WITH asked(id) AS (VALUES (?2)) SELECT {_FACTS}"
_BY_NAME = f"""WITH asked(id, place, at) AS (
        SELECT id, session = '', 0 FROM resources
        WHERE org = ?2 AND user = ?3 AND session IN ('', ?4) AND kind = ?5 AND name = ?6
        UNION ALL
        SELECT id, 2 + (level = 'org'), rowid FROM resources
        WHERE kind = ?5 AND name = ?6 AND org = ?2 AND level IN ('public', 'org')
    ) SELECT {_FACTS} ORDER BY place, at"""
_ALL = f"""WITH asked(id) AS (
        SELECT id FROM resources WHERE org = ?2 AND user = ?3
        UNION SELECT id FROM resources WHERE level = 'public'
        UNION SELECT id FROM resources WHERE org = ?2 AND level = 'org'
        UNION SELECT resource FROM json_each(?1) JOIN readers ON reader = value
    ) SELECT {_FACTS} WHERE ?4 IS NULL OR kind = ?4 ORDER BY name, resources.rowid"""


@dataclass(frozen=True)
class ResourceInfo:
    """A document or schema without its text."""

    id: str
    kind: Kind
    name: str
    org: str
    user: str
    level: Level
    session: str = ""
    ttl: float | None = None
    """Seconds that its KV is kept without being used; None: as the cache sees fit."""
    created: float = 0.0
    readers: frozenset[Reader] = field(default_factory=frozenset[Reader])

    @property
    def scope(self) -> Scope:
        """The scope of its KV: its own, within its level."""
        org = "" if self.level == "public" else self.org
        user = self.user if self.level in ("user", "session") else ""
        return Scope(self.level, org, user, self.session, self.id)


@dataclass(frozen=True)
class Resource(ResourceInfo):
    """A document or schema with its text."""

    content: str = field(default="", repr=False)


@dataclass(frozen=True)
class _Asked:
    """Something that a principal asks for, as far as the rules are about it."""

    id: str
    kind: Kind
    name: str
    org: str
    user: str
    level: Level
    session: str
    restricted: bool
    named: bool


class Resources:
    """The documents and schemas of a state, as far as each principal may see and change them."""

    def __init__(self, state: State, audit: Audit) -> None:
        self._state = state
        self._audit = audit

    def add(
        self,
        principal: Principal,
        kind: Kind,
        name: str,
        content: str,
        level: Level = "user",
        *,
        readers: Collection[str] = (),
        session: str = "",
        ttl: float | None = None,
    ) -> Resource:
        """Register the principal's document or schema; see `prepare`."""
        resource = self.prepare(
            principal, kind, name, content, level, readers=readers, session=session, ttl=ttl
        )
        self.insert(principal, resource)
        return resource

    def prepare(
        self,
        principal: Principal,
        kind: Kind,
        name: str,
        content: str,
        level: Level = "user",
        *,
        readers: Collection[str] = (),
        session: str = "",
        ttl: float | None = None,
    ) -> Resource:
        """A document or schema as it would be registered; `insert` does it.

        Args:
            principal: the owner.
            kind: which of the two.
            name: what it is called; the owner has one of that kind and name (in each session).
            content: its text.
            level: who may read it, where there are no readers.
            readers: who may read it, as `group:NAME` and `user:NAME`.
            session: of level session: which of the owner's.
            ttl: seconds to keep its KV.
        """
        check_name(name, "name", "name")
        if name.startswith(tuple(PREFIXES.values())):
            raise InvalidRequestError(f"A name cannot begin as an id does ({shown(name)}).", param="name")
        if (level == "session") != bool(session):
            raise InvalidRequestError("Level session, and no other, needs a session.", param="session")
        if session:
            check_name(session, "session", "session")
        _check_text(content)
        allowed = parse_readers(readers, level)
        try:
            check_publish(principal, level)
        except ForbiddenError:
            self._audit.refused(principal, "escalation", name, {"level": level, "resource": kind})
            raise
        return Resource(
            PREFIXES[kind] + secrets.token_hex(16),
            kind,
            name,
            principal.org,
            principal.user,
            level,
            session,
            ttl,
            self._state.now(),
            allowed,
            content,
        )

    def insert(self, principal: Principal, resource: Resource) -> None:
        """Register what `prepare` has made; `ConflictError` if the owner has one of that name."""
        values = (
            resource.id,
            resource.kind,
            resource.name,
            resource.org,
            resource.user,
            resource.level,
            resource.session,
            resource.ttl,
            resource.created,
            resource.content,
        )
        with self._state.transaction() as db:
            try:
                db.execute(
                    "INSERT INTO resources (id, kind, name, org, user, level, session, ttl, created, content) "
                    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    values,
                )
            except sqlite3.IntegrityError:
                raise ConflictError(
                    f"You have a {resource.kind} {shown(resource.name)} already. Remove it first, or choose "
                    "another name.",
                    param="name",
                    code="name_taken",
                ) from None
            texts = sorted(str(reader) for reader in resource.readers)
            db.executemany("INSERT INTO readers VALUES (?, ?)", [(resource.id, text) for text in texts])
            detail = {"name": resource.name, "level": resource.level, "readers": texts}
            self._audit.record(principal, _action(resource.kind, "register"), resource.id, detail=detail)

    def set_content(self, principal: Principal, id: str, content: str) -> None:
        """Give the principal's own document or schema another text; its id and its readers stay."""
        _check_text(content)
        with self._state.transaction() as db:
            done = db.execute(
                "UPDATE resources SET content = ? WHERE id = ? AND org = ? AND user = ?",
                (content, id, principal.org, principal.user),
            )
            kind: Kind = "document" if id.startswith(PREFIXES["document"]) else "schema"
            if not done.rowcount:
                raise self._not_found(principal, kind, id)
            self._audit.record(principal, _action(kind, "register"), id, detail={"replaced": 1})
            self._state.scrub()

    def get(self, principal: Principal, reference: str, kind: Kind, *, session: str = "") -> Resource:
        """The document or schema of an id or a name, if the principal may read it; else 404, whatever the reason.

        A name means the principal's own, first its session's, and then what its organisation publishes: to everyone
        before to itself, for which more is needed, and of those the oldest. What others share with the principal, and
        what other organisations publish, is reached by its id alone: nobody puts a text of his in the place of one
        that somebody expects under a name.
        """
        for asked in self._meant(principal, reference, kind, session):
            if may_read(principal, asked):
                # The text is read only now: what is not the principal's takes no time by its size.
                info = self._info(asked.id)
                row = self._state.row("SELECT content FROM resources WHERE id = ?", asked.id)
                if info is not None and row is not None:
                    return Resource(**vars(info), content=row[0])
        raise self._not_found(principal, kind, reference)

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All changes made inside happen, or none."""
        return self._state.transaction()

    def own(self, principal: Principal, name: str, kind: Kind, *, session: str = "") -> ResourceInfo | None:
        """The principal's own of that name."""
        if not (name + session).isprintable():
            return None  # nothing is called so
        row = self._state.row(
            "SELECT id FROM resources WHERE org = ? AND user = ? AND session = ? AND kind = ? AND name = ?",
            principal.org,
            principal.user,
            session,
            kind,
            name,
        )
        return None if row is None else self._info(row[0])

    def visible(self, principal: Principal, kind: Kind | None = None) -> list[ResourceInfo]:
        """All that the principal may read, in the order of names."""
        found = self._asked(_ALL, principal, principal.org, principal.user, kind)
        infos = (self._info(asked.id) for asked in found if may_read(principal, asked))
        return [info for info in infos if info is not None]

    def names(self, principal: Principal, kind: Kind) -> list[str]:
        """The names that mean something to the principal, in order."""
        found = self._asked(_ALL, principal, principal.org, principal.user, kind)
        return [
            asked.name
            for asked in found
            if may_read(principal, asked)
            and (owns(principal, asked) or (asked.org == principal.org and asked.level in ("public", "org")))
        ]

    def remove(self, principal: Principal, reference: str, kind: Kind, *, session: str = "") -> ResourceInfo:
        """Remove a document or schema, text and grants; it is returned, for its KV to be forgotten."""
        with self._state.transaction() as db:
            info = self._changeable(principal, reference, kind, session)
            db.execute("DELETE FROM resources WHERE id = ?", (info.id,))
            detail = {"name": info.name, "owner": info.user}
            self._audit.record(principal, _action(kind, "remove"), info.id, org=info.org, detail=detail)
            self._state.scrub()
        return info

    def set_readers(
        self, principal: Principal, reference: str, kind: Kind, readers: Collection[str], *, session: str = ""
    ) -> ResourceInfo:
        """Say anew who may read it; whoever is not among them any more is refused from now on."""
        with self._state.transaction() as db:
            info = self._changeable(principal, reference, kind, session)
            wanted = parse_readers(readers, info.level)
            if info.level == "org" and info.readers and not wanted and not manages(principal, info.org):
                try:
                    check_publish(principal, "org")
                except ForbiddenError:
                    self._audit.refused(principal, "escalation", info.id)
                    raise
            changes: tuple[tuple[Action, frozenset[Reader], str], ...] = (
                ("grant", wanted - info.readers, "INSERT INTO readers VALUES (?, ?)"),
                ("revoke", info.readers - wanted, "DELETE FROM readers WHERE resource = ? AND reader = ?"),
            )
            for action, changed, statement in changes:
                texts = sorted(str(reader) for reader in changed)
                db.executemany(statement, [(info.id, text) for text in texts])
                if texts:
                    detail = {"name": info.name, "readers": texts}
                    self._audit.record(principal, action, info.id, org=info.org, detail=detail)
            return replace(info, readers=wanted)

    def forget(self, *, org: str, user: str = "", session: str = "") -> list[ResourceInfo]:
        """Remove all of an organisation, or of a user or a session of its, and return it.

        Whether the asker may is the caller's to check.
        """
        with self._state.transaction() as db:
            rows = self._state.rows(
                "SELECT id FROM resources WHERE org = ?1 AND ?2 IN ('', user) AND ?3 IN ('', session) "
                "ORDER BY rowid",
                org,
                user,
                session,
            )
            gone = [info for (id,) in rows if (info := self._info(id)) is not None]
            db.executemany("DELETE FROM resources WHERE id = ?", [(info.id,) for info in gone])
            if gone:
                self._state.scrub()
        return gone

    def _meant(self, principal: Principal, reference: str, kind: Kind, session: str) -> list[_Asked]:
        """What may be meant, the first choice first; not all is for the principal to read."""
        if not (reference + session).isprintable():
            return []  # nothing is called so
        if _ID.fullmatch(reference):
            return [each for each in self._asked(_BY_ID, principal, reference) if each.kind == kind]
        return self._asked(_BY_NAME, principal, principal.org, principal.user, session, kind, reference)

    def _asked(self, query: str, principal: Principal, *values: object) -> list[_Asked]:
        rows = self._state.rows(query, json.dumps(badges(principal)), *values)
        return [_Asked(*row) for row in rows if row[0] is not None]

    def _info(self, id: str) -> ResourceInfo | None:
        row = self._state.row(f"SELECT {_OWNED}, {_REST} FROM resources WHERE id = ?", id)
        return None if row is None else ResourceInfo(id, *row[:8], readers=_readers(row[8]))

    def _changeable(self, principal: Principal, reference: str, kind: Kind, session: str) -> ResourceInfo:
        """What is meant, if the principal may change it; 404 if it may not even know of it."""
        by_id = _ID.fullmatch(reference) is not None
        for asked in self._meant(principal, reference, kind, session):
            mine = may_change(principal, asked)
            # An administrator reaches what it cannot read by its id alone: a name may be several users'.
            if not may_read(principal, asked) and not (by_id and mine):
                continue
            if mine:
                info = self._info(asked.id)
                assert info is not None  # in one transaction
                return info
            self._audit.refused(principal, "not_owner", asked.id)
            raise ForbiddenError(
                f"The {kind} {shown(reference)} is another's: its owner changes it, or who has admin:org."
            )
        raise self._not_found(principal, kind, reference)

    def _not_found(self, principal: Principal, kind: Kind, reference: str) -> NotFoundError:
        # Logged whether it exists or not: neither the answer nor the time it takes tells the two apart.
        self._audit.refused(principal, "not_found", reference, {"resource": kind})
        return NotFoundError(
            f"There is no {kind} {shown(reference)} that you may use.", code=f"{kind}_not_found"
        )


def _check_text(content: str) -> None:
    try:
        content.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The text holds half a surrogate pair: it is not Unicode.", param="content"
        ) from None


def _action(kind: Kind, what: Literal["register", "remove"]) -> Action:
    return cast("Action", f"{kind}.{what}")


def _readers(texts: str) -> frozenset[Reader]:
    parted = (text.partition(":") for text in json.loads(texts))
    return frozenset(Reader(kind, name) for kind, _, name in parted)
