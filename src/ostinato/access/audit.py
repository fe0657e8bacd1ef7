"""The audit log: who changed what others may do or read, and who was refused. It can only grow."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ostinato.access.errors import ForbiddenError, StateError
from ostinato.access.names import MAX_NAME, printable
from ostinato.access.principal import Principal
from ostinato.access.state import State
from ostinato.errors import InvalidRequestError

log = logging.getLogger(__name__)

Action = Literal[
    "key.create",
    "key.revoke",
    "group.add",
    "group.remove",
    "issuer.add",
    "issuer.remove",
    "document.register",
    "document.remove",
    "schema.register",
    "schema.remove",
    "grant",
    "revoke",
    "forget",
    "refused",
]
ACTIONS: tuple[Action, ...] = get_args(Action)

Outcome = Literal["ok", "refused"]
Value = str | int | float | Sequence[str] | None
Detail = Mapping[str, Value]
"""What else there is to say: names, ids and numbers. Never a secret, never text of a prompt or document."""

MAX_TEXT = 300
"""Characters of a target or a string of a detail that are kept; all names fit."""

MAX_ITEMS = 50
"""Items of a list of a detail that are kept."""

BURST = 10
PER_SECOND = 1 / 60
"""Refusals of a kind and principal that are each a row: some at once, then one a minute; the rest are counted. The same
for forgetting, which anyone may do as often as it likes."""

MAX_KINDS = 1_000
"""Pairs of kind and principal told apart at a time; those beyond share one count."""

ALL_BURST = 10_000
ALL_PER_SECOND = 1.0
"""Such rows of all principals together, of whom an issuer of tokens may name any number."""


@dataclass(frozen=True)
class Entry:
    """A row of the log. `org` is the organisation concerned; the actor is who did it, where that is known."""

    id: int
    time: float
    org: str
    actor_org: str | None
    actor_user: str | None
    credential: str | None
    action: Action
    target: str
    outcome: Outcome
    detail: Detail


@dataclass
class _Bucket:
    """Rows that may be written: some at once, then so many a second."""

    burst: float
    per_second: float
    at: float
    used: float = 0.0
    unwritten: int = 0

    def full(self, now: float) -> bool:
        """Whether there is no room for a row now."""
        self.used = max(0.0, self.used - max(0.0, now - self.at) * self.per_second)
        self.at = now
        return self.used > self.burst - 1

    @property
    def idle(self) -> bool:
        """Whether a new one would be the same."""
        return not self.unwritten and not self.used


_Key = tuple[Action, str, str, str]
"""Action, kind, and the principal's organisation and user: what is counted together."""


class Audit:
    """The log of a state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._buckets: dict[_Key, _Bucket] = {}
        self._all = _Bucket(ALL_BURST, ALL_PER_SECOND, state.now())
        self._lock = threading.Lock()

    def record(
        self,
        principal: Principal | None,
        action: Action,
        target: str,
        *,
        org: str | None = None,
        outcome: Outcome = "ok",
        detail: Detail | None = None,
    ) -> None:
        """Append a row. Inside the transaction of the change it tells of, there is never the one without the other.

        Of a principal's acts of forgetting that took nothing registered away, a flood is counted as of refusals.

        Args:
            principal: who did it; None if unknown.
            action: what was done.
            target: to what: an id or a name.
            org: the organisation concerned, if it is not the principal's.
            outcome: whether it was done.
            detail: see `Detail`.
        """
        if action == "forget" and principal is not None and not (detail or {}).get("resources"):
            repeated = self._repeated((action, "", principal.org, principal.user))
            if repeated is None:
                return
            detail = dict(detail or {}) | ({"repeated": repeated} if repeated else {})
        self._write(principal, action, target, org, outcome, detail or {})

    def _write(
        self,
        principal: Principal | None,
        action: Action,
        target: str,
        org: str | None,
        outcome: Outcome,
        detail: Detail,
    ) -> None:
        actor = (None, None, None)
        if principal is not None:
            actor = (principal.org, principal.user, printable(principal.credential, MAX_TEXT))
        concerned = org if org is not None else principal.org if principal is not None else ""
        with self._state.transaction() as db:
            db.execute(
                "INSERT INTO audit (time, org, actor_org, actor_user, credential, action, target, outcome, detail) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    self._state.now(),
                    concerned,
                    *actor,
                    action,
                    printable(target, MAX_TEXT),
                    outcome,
                    json.dumps({name: _bounded(value) for name, value in detail.items()}),
                ),
            )

    def refused(
        self, principal: Principal | None, kind: str, target: str = "", detail: Detail | None = None
    ) -> None:
        """Append a refusal. Whoever repeats one cannot fill the disk: of a flood, one a minute is a row, with a count.

        Args:
            principal: who was refused; None if it did not get as far as being known.
            kind: a word of the code for what was refused ("credential", "escalation", ...): never the client's text.
            target: what it wanted.
            detail: as in `record`.
        """
        org, user = ("", "") if principal is None else (principal.org, principal.user)
        repeated = self._repeated(("refused", kind, org, user))
        if repeated is None:
            return
        full = {"kind": kind} | dict(detail or {}) | ({"repeated": repeated} if repeated else {})

        def write() -> None:
            try:
                self.record(principal, "refused", target, outcome="refused", detail=full)
            except StateError:  # the refusal stands all the same
                log.exception("A refusal (%s) could not be written to the audit log.", kind)

        self._state.outside(write)  # what is refused may roll back the transaction it was asked in

    def flush(self) -> None:
        """Write the counts of what are not rows yet, as the server does when it ends."""
        with self._lock:
            left = {key: bucket.unwritten for key, bucket in self._buckets.items() if bucket.unwritten}
            self._buckets.clear()
        for (action, kind, org, user), count in left.items():
            principal = Principal(org, user) if org else None
            detail = ({"kind": kind} if kind else {}) | {"repeated": count}
            self._write(principal, action, "", None, "refused" if action == "refused" else "ok", detail)

    def _repeated(self, key: _Key) -> int | None:
        """How many like it have no row of their own since the last that has; None if this one gets none either."""
        now = self._state.now()
        with self._lock:
            if key not in self._buckets and len(self._buckets) >= MAX_KINDS:
                self._buckets = {
                    other: bucket
                    for other, bucket in self._buckets.items()
                    if bucket.full(now) or not bucket.idle
                }
                if len(self._buckets) >= MAX_KINDS:
                    key = (key[0], "many", "", "")
            bucket = self._buckets.setdefault(key, _Bucket(BURST, PER_SECOND, now))
            if bucket.full(now) or self._all.full(now):
                bucket.unwritten += 1
                return None
            bucket.used += 1
            self._all.used += 1
            repeated, bucket.unwritten = bucket.unwritten, 0
            return repeated

    def read(
        self,
        *,
        org: str | None = None,
        since: float | None = None,
        action: str | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        """The last `limit` rows that match, the oldest first."""
        if action is not None and action not in ACTIONS:
            raise InvalidRequestError(
                f"There is no action {printable(action, 50)!r}: choose one of {', '.join(ACTIONS)}.",
                param="action",
            )
        rows = self._state.rows(
            "SELECT id, time, org, actor_org, actor_user, credential, action, target, outcome, detail FROM audit "
            "WHERE (?1 IS NULL OR org = ?1) AND (?2 IS NULL OR time >= ?2) AND (?3 IS NULL OR action = ?3) "
            "ORDER BY id DESC LIMIT ?4",
            org,
            since,
            action,
            limit,
        )
        return [Entry(*row[:9], detail=json.loads(row[9])) for row in reversed(rows)]

    def read_as(
        self,
        principal: Principal,
        *,
        since: float | None = None,
        action: str | None = None,
        limit: int = 100,
    ) -> list[Entry]:
        """What a principal may read: everything with `admin`, what concerns its organisation with `admin:org`."""
        if principal.may("admin"):
            return self.read(since=since, action=action, limit=limit)
        if not principal.may("admin:org"):
            self.refused(principal, "escalation", "audit")
            raise ForbiddenError("Reading the audit log needs the permission admin:org.")
        return self.read(org=principal.org, since=since, action=action, limit=limit)


def _bounded(value: Value) -> Value:
    if isinstance(value, str):
        return printable(value, MAX_TEXT)
    if isinstance(value, Sequence):
        more = [f"and {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return [printable(item, MAX_NAME) for item in value[:MAX_ITEMS]] + more
    return value
