"""API keys and groups, through the door that a server uses."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from access_fixtures import BAD_NAMES, NOW, ODD_NAMES, Clock
from ostinato.access.access import Access
from ostinato.access.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from ostinato.access.principal import LOCAL, PERMISSIONS, Principal
from ostinato.errors import InvalidRequestError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(tmp_path: Path, clock: Clock) -> Iterator[Access]:
    with Access(tmp_path / "access.db", clock=clock) as access:
        yield access


def ask(access: Access, secret: str) -> Principal:
    return access.authenticate(f"Bearer {secret}")


def refused(access: Access, authorization: str | None, says: str | None = None) -> None:
    with pytest.raises(UnauthenticatedError, match=says) as caught:
        access.authenticate(authorization)
    assert caught.value.status == 401


def test_a_key_says_who_asks(access: Access) -> None:
    info, secret = access.keys.create("acme", "alice", ["finance", "hr"], ["publish:org"])
    assert secret.startswith(f"{info.id}_")
    assert len(secret) == 85
    assert ask(access, secret) == Principal(
        "acme",
        "alice",
        groups=frozenset({"finance", "hr"}),
        permissions=frozenset({"publish:org"}),
        credential=info.id,
    )
    assert access.authenticate(f"bearer  {secret} ").user == "alice"
    assert access.keys.all() == [info]
    assert access.keys.all("other") == []


def test_the_secret_is_nowhere_in_the_file(access: Access, tmp_path: Path) -> None:
    _, secret = access.keys.create("acme", "alice")
    ask(access, secret)
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"alice" in stored
    assert secret[-64:].encode() not in stored
    assert bytes.fromhex(secret[-64:]) not in stored


def test_nobody_must_authenticate_until_somebody_can(access: Access, tmp_path: Path) -> None:
    assert not access.required
    assert access.authenticate(None) == access.authenticate("Bearer unused") == LOCAL
    with Access(tmp_path / "access.db") as other:  # as the command does beside a running server
        info, _ = other.keys.create("acme", "alice")
        assert access.required
        refused(access, None, "keys create")
        other.keys.revoke(info.id)
    refused(access, None)
    with Access(tmp_path / "access.db") as later:
        assert later.required  # revoking the last key opens nothing


def test_headers_that_hold_no_key(access: Access) -> None:
    info, secret = access.keys.create("acme", "alice")
    _, other = access.keys.create("acme", "bob")
    changed = secret[:-1] + ("0" if secret[-1] != "0" else "1")
    for value in (
        "",
        secret,
        f"Basic {secret}",
        "Bearer",
        "Bearer ",
        f"Bearer {changed}",
        f"Bearer {secret}0",
        f"Bearer {secret} {secret}",
        f"Bearer {info.id}",
        f"Bearer {info.id}_",
        f"Bearer {info.id}_{other[-64:]}",  # one's id with another's secret
        f"Bearer ost_{'0' * 16}_{secret[-64:]}",
        f"Bearer {secret.upper()}",
        f"Bearer ost_%_{'0' * 64}",
        "Bearer x' OR '1'='1",
        "Bearer é",
        "Bearer \ud800",
        "Bearer ost_" + "0" * 100_000,
        "Bearer a.b.c",
        "Bearer ..",
    ):
        refused(access, value)
    assert ask(access, secret).user == "alice"


def test_revoked_at_the_next_request_of_any_process(access: Access, tmp_path: Path) -> None:
    info, secret = access.keys.create("acme", "alice")
    _, kept = access.keys.create("acme", "alice")
    assert ask(access, secret)
    code = (
        "import sys; from ostinato.access.access import Access; Access(sys.argv[1]).keys.revoke(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "access.db"), info.id], check=True)
    refused(access, f"Bearer {secret}", "revoked")
    assert ask(access, kept).user == "alice"
    revoked = {key.id: key.revoked for key in access.keys.all()}
    assert access.keys.revoke(info.id).revoked == revoked[info.id]  # a second time changes nothing
    assert [entry.action for entry in access.audit.read(action="key.revoke")] == ["key.revoke"]
    with pytest.raises(NotFoundError, match="keys list"):
        access.keys.revoke("ost_0000000000000000")


def test_a_key_expires(access: Access, clock: Clock) -> None:
    _, secret = access.keys.create("acme", "alice", expires=NOW + 60)
    clock.now += 59
    assert ask(access, secret)
    clock.now += 1
    refused(access, f"Bearer {secret}", "expired")
    with pytest.raises(InvalidRequestError, match="expired"):
        access.keys.create("acme", "alice", expires=clock.now)


def test_groups_are_the_users(access: Access, tmp_path: Path) -> None:
    _, one = access.keys.create("acme", "alice", ["finance"])
    _, two = access.keys.create("acme", "alice", ["hr"])
    _, abroad = access.keys.create("evil", "alice")
    assert ask(access, one).groups == ask(access, two).groups == {"finance", "hr"}
    assert ask(access, abroad).groups == frozenset()
    with Access(tmp_path / "access.db") as other:
        other.groups.remove("acme", "alice", "finance")
    assert ask(access, one).groups == ask(access, two).groups == {"hr"}
    with pytest.raises(NotFoundError, match="groups list"):
        access.groups.remove("acme", "alice", "finance")
    access.groups.add("acme", "alice", "hr")
    assert [entry.action for entry in access.audit.read()].count("group.add") == 2


def test_permissions(access: Access) -> None:
    _, secret = access.keys.create("acme", "alice", permissions=["admin"])
    assert all(ask(access, secret).may(permission) for permission in PERMISSIONS)
    with pytest.raises(InvalidRequestError, match="publish:org"):
        access.keys.create("acme", "alice", permissions=["root"])
    # A file of a later version may know more of them.
    with sqlite3.connect(access.state.path) as db:
        db.execute("""UPDATE api_keys SET permissions = '["root", "publish:org"]'""")
    assert ask(access, secret).permissions == {"publish:org"}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_kept_as_they_are(access: Access, name: str) -> None:
    _, secret = access.keys.create(name, name, [name])
    assert ask(access, secret).org == ask(access, secret).user == name
    assert ask(access, secret).groups == {name}
    _, other = access.keys.create("acme", "alice")
    assert ask(access, other).groups == frozenset()
    assert len(access.keys.all()) == 2
    assert len(access.keys.all(name)) == 1


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_cannot_be(access: Access, name: str) -> None:
    for org, user, group in ((name, "u", "g"), ("o", name, "g"), ("o", "u", name)):
        with pytest.raises(InvalidRequestError):
            access.keys.create(org, user, [group])
        with pytest.raises(InvalidRequestError):
            access.groups.add(org, user, group)
    assert not access.required


def test_who_may_forget(access: Access) -> None:
    alice = Principal("acme", "alice")
    admin = Principal("acme", "root", permissions=frozenset({"admin:org"}))
    for user in ("alice", "bob"):
        access.resources.add(Principal("acme", user), "document", "notes", "text")
        access.resources.add(Principal("acme", user), "document", "notes", "s", "session", session="s1")
    access.resources.add(Principal("evil", "alice"), "document", "notes", "text")
    for by, org, user in (
        (alice, "acme", "bob"),
        (alice, "acme", ""),
        (alice, "evil", "alice"),
        (admin, "evil", ""),
    ):
        with pytest.raises(ForbiddenError):
            access.forget_resources(by, org=org, user=user)
    gone = access.forget_resources(alice, org="acme", user="alice", session="s1")
    assert [(info.user, info.session) for info in gone] == [("alice", "s1")]
    gone = access.forget_resources(alice, org="acme", user="alice")
    assert [(info.org, info.user, info.session) for info in gone] == [("acme", "alice", "")]
    assert len(access.forget_resources(admin, org="acme")) == 2
    assert len(access.resources.visible(Principal("evil", "alice"))) == 1
    assert [entry.action for entry in access.audit.read()].count("forget") == 3


def test_a_key_for_a_scraper(access: Access) -> None:
    for permissions, may in (
        (["metrics"], True),
        (["admin"], True),
        (["admin:org", "publish:public"], False),
    ):
        _, secret = access.keys.create("acme", "prometheus", permissions=permissions)
        principal = access.authenticate(f"Bearer {secret}")
        assert principal.may("metrics") == may
        assert principal.may("admin") == (permissions == ["admin"])
