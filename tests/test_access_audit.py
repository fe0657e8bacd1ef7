"""The audit log: what is in it, that it only grows, and that nobody can fill the disk through it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from access_fixtures import ADMIN, ALICE, BOB, MALLORY, NOW, ROOT, Clock
from ostinato.access import audit
from ostinato.access.access import Access
from ostinato.access.audit import BURST, MAX_KINDS
from ostinato.access.errors import ForbiddenError, UnauthenticatedError
from ostinato.access.principal import Principal
from ostinato.errors import InvalidRequestError


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def access(tmp_path: Path, clock: Clock) -> Iterator[Access]:
    with Access(tmp_path / "access.db", clock=clock) as access:
        yield access


def test_every_change_is_in_it(access: Access, clock: Clock) -> None:
    info, secret = access.keys.create("acme", "alice", ["finance"], by=ADMIN)
    clock.now += 1
    access.keys.revoke(info.id, by=ROOT)
    doc = access.resources.add(ALICE, "document", "plan", "the text of it", readers=["user:bob"])
    access.resources.set_readers(ALICE, doc.id, "document", ["group:hr"])
    access.resources.remove(ALICE, doc.id, "document")
    entries = access.audit.read()
    assert [(entry.action, entry.actor_user, entry.target) for entry in entries] == [
        ("group.add", "root", "finance"),
        ("key.create", "root", info.id),
        ("key.revoke", "root", info.id),
        ("document.register", "alice", doc.id),
        ("grant", "alice", doc.id),
        ("revoke", "alice", doc.id),
        ("document.remove", "alice", doc.id),
    ]
    assert {entry.org for entry in entries} == {"acme"}
    assert {entry.outcome for entry in entries} == {"ok"}
    assert entries[2].actor_org == "hq"
    assert entries[2].time == NOW + 1
    assert entries[4].detail == {"name": "plan", "readers": ["group:hr"]}
    for hidden in (secret, "the text of it"):
        assert hidden not in str(entries)


def test_what_is_asked_for(access: Access, clock: Clock) -> None:
    for number in range(5):
        access.audit.record(ALICE, "grant", str(number))
        access.audit.record(MALLORY, "revoke", str(number))
        clock.now += 10
    assert [entry.target for entry in access.audit.read(org="acme")] == list("01234")
    assert [entry.target for entry in access.audit.read(org="acme", limit=2)] == list("34")
    assert [entry.target for entry in access.audit.read(action="revoke", since=NOW + 30)] == list("34")
    assert access.audit.read(org="acme' OR '1'='1") == []
    with pytest.raises(InvalidRequestError, match=r"key\.create"):
        access.audit.read(action="grants")


def test_who_may_read_it(access: Access) -> None:
    access.audit.record(ALICE, "grant", "ours")
    access.audit.record(MALLORY, "grant", "theirs")
    assert [entry.target for entry in access.audit.read_as(ADMIN)] == ["ours"]
    assert [entry.target for entry in access.audit.read_as(MALLORY)] == ["theirs"]
    assert [entry.target for entry in access.audit.read_as(ROOT)] == ["ours", "theirs"]
    with pytest.raises(ForbiddenError):
        access.audit.read_as(ALICE)
    assert access.audit.read(action="refused")[0].actor_user == "alice"


ATTACKS = (
    "UPDATE audit SET actor_user = 'bob'",
    "UPDATE OR REPLACE audit SET id = 1",
    "DELETE FROM audit",
    "DELETE FROM main.audit WHERE id = 1",
    "REPLACE INTO audit SELECT 1, 0, '', '', '', '', 'grant', '', 'ok', '{}'",
    "INSERT OR REPLACE INTO audit SELECT * FROM audit",
    "DROP TABLE audit",
    "DROP TRIGGER audit_no_delete",
    "ALTER TABLE audit RENAME TO forgotten",
    "PRAGMA writable_schema = ON",
    "DELETE FROM sqlite_schema",
    "UPDATE sqlite_schema SET sql = '' WHERE name = 'audit_no_delete'",
)


@pytest.mark.parametrize("attack", ATTACKS)
def test_it_only_grows(access: Access, attack: str) -> None:
    for number in range(3):
        access.audit.record(ALICE, "grant", str(number))
    before = access.audit.read()
    with pytest.raises(sqlite3.DatabaseError), access.state.transaction() as db:
        db.execute(attack)
    assert access.audit.read() == before
    access.audit.record(ALICE, "grant", "after")
    assert [entry.target for entry in access.audit.read()] == ["0", "1", "2", "after"]


@pytest.mark.parametrize("attack", ATTACKS[:6])
def test_it_only_grows_through_other_connections(access: Access, attack: str) -> None:
    access.audit.record(ALICE, "grant", "x")
    db = sqlite3.connect(access.state.path)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(attack)
    db.close()


def test_control_characters(access: Access) -> None:
    target = "a\n2027-01-01 admin ok\x00\x1b[2J\ud800\u202e" + "x" * 10_000
    access.audit.record(
        Principal("acme", "alice", credential="k\r\n"), "refused", target, detail={"name": target}
    )
    entry = access.audit.read()[0]
    assert entry.target.startswith("a\\n2027-01-01 admin ok\\x00\\x1b[2J\\ud800\\u202exxx")
    assert entry.target.isprintable()
    assert len(entry.target) < 400
    assert entry.credential == "k\\r\\n"
    assert str(entry.detail["name"]).isprintable()
    access.audit.record(ALICE, "grant", "x", detail={"readers": [f"user:{i}" for i in range(1000)]})
    assert len(access.audit.read()[-1].detail["readers"]) == 51  # type: ignore[arg-type]


def test_a_flood_of_refusals(access: Access, clock: Clock) -> None:
    _, secret = access.keys.create("acme", "alice")

    def flood(count: int) -> None:
        for number in range(count):
            with pytest.raises(UnauthenticatedError):
                access.authenticate(f"Bearer ost_{number:016x}_{'0' * 64}")

    flood(1000)
    rows = access.audit.read(action="refused", limit=10_000)
    assert len(rows) == BURST
    assert rows[0].detail["kind"] == "credential"
    assert rows[0].target == f"ost_{0:016x}"
    assert secret not in str(rows)
    access.audit.refused(MALLORY, "escalation", "x")  # another's refusals are not lost in it
    assert access.audit.read()[-1].actor_user == "mallory"
    clock.now += 60
    flood(1)
    assert access.audit.read()[-1].detail["repeated"] == 1000 - BURST
    clock.now += 24 * 3600
    flood(5)
    assert len(access.audit.read(action="refused", limit=10_000)) == BURST + 1 + 1 + 5


def test_counts_are_written_at_the_end(tmp_path: Path, clock: Clock) -> None:
    with Access(tmp_path / "access.db", clock=clock) as access:
        for _ in range(BURST + 7):
            access.audit.refused(ALICE, "escalation")
    with Access(tmp_path / "access.db", clock=clock) as access:
        assert access.audit.read()[-1].detail == {"kind": "escalation", "repeated": 7}
        assert access.audit.read()[-1].actor_user == "alice"


def test_a_flood_from_many(access: Access) -> None:
    for number in range(MAX_KINDS + 100):
        access.audit.refused(Principal("acme", f"u{number}"), "escalation")
    assert len(access.audit.read(limit=10_000)) == MAX_KINDS + BURST


def test_a_flood_of_forgetting(access: Access, clock: Clock) -> None:
    for _ in range(1_000):
        assert access.forget_resources(BOB, org="acme", user="bob") == []
        access.audit.record(BOB, "forget", "chatcmpl-1", detail={"kind": "request"})
    assert len(access.audit.read(action="forget", limit=10_000)) == BURST
    # What is taken away that was registered is told each time; who else forgets is told all the same.
    access.resources.add(BOB, "document", "plan", "text")
    assert access.forget_resources(BOB, org="acme", user="bob")
    assert access.audit.read()[-1].detail["resources"]
    access.forget_resources(ALICE, org="acme", user="alice")
    assert access.audit.read()[-1].actor_user == "alice"
    clock.now += 60
    access.forget_resources(BOB, org="acme", user="bob", session="s")
    assert access.audit.read()[-1].detail["repeated"] == 2_000 - BURST
    assert access.audit.read()[-1].detail["session"] == "s"
    access.forget_resources(BOB, org="acme", user="bob")
    access.audit.flush()
    last = access.audit.read()[-1]
    assert (last.action, last.outcome, last.detail) == ("forget", "ok", {"repeated": 1})


def test_a_flood_from_one_after_another(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many principals as an issuer of tokens cares to name, each of whom is forgotten in time."""
    monkeypatch.setattr(audit, "ALL_BURST", 100)
    monkeypatch.setattr(audit, "MAX_KINDS", 50)
    with Access(tmp_path / "access.db", clock=clock) as access:
        for number in range(1_000):
            access.audit.refused(Principal("acme", f"u{number}"), "escalation")
            clock.now += 0.1
        assert access.state.row("SELECT count(*) FROM audit")[0] <= 100 + 100
        clock.now += 3600
        access.audit.refused(ALICE, "escalation")
        assert access.audit.read()[-1].actor_user == "alice"


def test_a_refusal_outlives_what_is_rolled_back(access: Access) -> None:
    def register() -> None:
        with access.state.transaction():
            access.resources.add(ALICE, "document", "mine", "text")
            access.resources.add(ALICE, "document", "everyone's", "text", "public")

    with pytest.raises(ForbiddenError):
        register()
    assert [entry.action for entry in access.audit.read()] == ["refused"]
    assert access.resources.visible(ALICE) == []
