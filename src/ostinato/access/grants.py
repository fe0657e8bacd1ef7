"""The rules of who may read a registered document or schema, and who may change it.

Read:

1. The owner always may.
2. With readers, only the owner and those readers may, and readers are users and groups of the owner's organisation.
3. Without readers the level decides: public: everyone; org: the owner's organisation; user and session: the owner.

Register: at level org with the permission `publish:org`, at level public with `publish:public`. Readers narrow a level
org, and widen a level user to those named, which needs no permission: it is the owner's own text, and nobody else's
name is put to it. What everyone may read has no readers, and what belongs to a session has none either.

Change (readers) and remove: the owner, `admin:org` of the owner's organisation, and `admin`. Taking the last reader from
a document of level org opens it to the organisation, and so needs `publish:org`.

No permission lets anyone read what these rules do not: an administrator may remove a document, and not see it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from ostinato.access.errors import ForbiddenError
from ostinato.access.names import check_name, shown
from ostinato.access.principal import Permission, Principal
from ostinato.access.scope import Level
from ostinato.errors import InvalidRequestError

MAX_READERS = 1_000
"""Readers of one document or schema. More are a group."""

_PUBLISHING: dict[Level, Permission] = {"org": "publish:org", "public": "publish:public"}


@dataclass(frozen=True, order=True)
class Reader:
    """A user or a group of the owner's organisation, written `user:bob`, `group:finance`."""

    kind: Literal["group", "user"]
    name: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


def badges(principal: Principal) -> list[str]:
    """All that a principal is as a reader."""
    groups = (str(Reader("group", group)) for group in principal.groups)
    return [str(Reader("user", principal.user)), *groups]


class Owned(Protocol):
    """What the rules are about."""

    @property
    def org(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def level(self) -> Level: ...


class Readable(Owned, Protocol):
    """What may be read."""

    @property
    def restricted(self) -> bool:
        """Whether it has readers."""
        ...

    @property
    def named(self) -> bool:
        """Whether the principal is one of them, by its user or a group."""
        ...


def owns(principal: Principal, owned: Owned) -> bool:
    """Whether it is the principal's own. The same name in another organisation is another user."""
    return (principal.org, principal.user) == (owned.org, owned.user)


def may_read(principal: Principal, owned: Readable) -> bool:
    """Whether a principal may use it: rules 1 to 3."""
    if owns(principal, owned):
        return True
    if owned.restricted:
        return principal.org == owned.org and owned.named
    return owned.level == "public" or (owned.level == "org" and principal.org == owned.org)


def manages(principal: Principal, org: str) -> bool:
    """Whether a principal may change what others of an organisation own."""
    return principal.may("admin") or (principal.may("admin:org") and principal.org == org)


def may_change(principal: Principal, owned: Owned) -> bool:
    """Whether a principal may change its readers, and remove it."""
    return owns(principal, owned) or manages(principal, owned.org)


def check_publish(principal: Principal, level: Level) -> None:
    """Refuse a level that needs a permission the principal has not."""
    needed = _PUBLISHING.get(level)
    if needed is not None and not principal.may(needed):
        raise ForbiddenError(
            f"Publishing at level {level} needs the permission {needed}, which these credentials do not have. "
            "Use level user, or ask for a key with it (ostinato keys create --permission).",
            param="scope",
            code="scope_not_permitted",
        )


def parse_readers(texts: Collection[str], level: Level) -> frozenset[Reader]:
    """Readers of what has a level, as a client writes them."""
    if len(texts) > MAX_READERS:
        raise InvalidRequestError(
            f"{len(texts):,} readers are named; {MAX_READERS:,} are the most. Put them into a group, and name that.",
            param="readers",
        )
    readers = frozenset(_parse_reader(text) for text in texts)
    if readers and level in ("public", "session"):
        whose = "everyone may read it" if level == "public" else "it belongs to a session alone"
        raise InvalidRequestError(
            f"What is of level {level} has no readers: {whose}. Leave readers out, or choose level user or org.",
            param="readers",
        )
    return readers


def _parse_reader(text: str) -> Reader:
    kind, _, name = text.partition(":")
    if kind in ("group", "user"):
        return Reader(kind, check_name(name, f"{kind} of readers", "readers"))
    raise InvalidRequestError(
        f"{shown(text)} is not a reader: write group:NAME or user:NAME.", param="readers"
    )
