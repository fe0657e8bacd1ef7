"""Documents and schemas: who sees them, who changes them, and that nothing tells of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from access_fixtures import ADMIN, ALICE, BAD_NAMES, BOB, MALLORY, ODD_NAMES, ROOT, Clock
from ostinato.access.access import Access
from ostinato.access.errors import AccessError, ConflictError, ForbiddenError, NotFoundError
from ostinato.access.grants import MAX_READERS
from ostinato.access.principal import PERMISSIONS, Principal
from ostinato.access.resources import Kind, Resource, ResourceInfo
from ostinato.access.scope import LEVELS, Level, Scope
from ostinato.errors import InvalidRequestError

DAN = Principal("acme", "dan", permissions=frozenset({"publish:org"}))
PUBLISHER = Principal("acme", "carol", permissions=frozenset({"publish:org", "publish:public"}))


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    with Access(tmp_path / "access.db", clock=Clock()) as access:
        yield access


def sees(access: Access, principal: Principal, reference: str, kind: Kind = "document") -> bool:
    try:
        found = access.resources.get(principal, reference, kind)
    except NotFoundError:
        return False
    assert found.id in {info.id for info in access.resources.visible(principal, kind)}
    return True


def test_a_document(access: Access) -> None:
    made = access.resources.add(
        PUBLISHER,
        "document",
        "handbook",
        "Line 1\nLine 2 é\0",
        "org",
        readers=["group:hr", "user:bob"],
        ttl=60,
    )
    assert made.id.startswith("doc_")
    assert len(made.id) == 4 + 32
    assert access.resources.get(BOB, "handbook", "document") == made
    assert access.resources.get(BOB, made.id, "document").content == "Line 1\nLine 2 é\0"
    assert {str(reader) for reader in made.readers} == {"group:hr", "user:bob"}
    assert "Line 1" not in repr(made)
    info = access.resources.visible(BOB)[0]
    assert (info.id, info.name, info.ttl, info.readers) == (made.id, "handbook", 60, made.readers)
    assert not sees(access, BOB, made.id, "schema")
    assert not sees(access, BOB, "handbook", "schema")
    schema = access.resources.add(PUBLISHER, "schema", "handbook", "<schema/>")
    assert schema.id.startswith("sch_")
    assert access.resources.own(PUBLISHER, "handbook", "schema") is not None
    assert access.resources.own(PUBLISHER, "handbook", "document") == info
    assert access.resources.own(BOB, "handbook", "document") is None


@pytest.mark.parametrize(
    ("level", "readers", "seen_by"),
    [
        ("public", [], {"carol", "alice", "bob", "mallory", "admin", "root"}),
        ("org", [], {"carol", "alice", "bob", "admin"}),
        ("org", ["group:finance"], {"carol", "alice"}),
        ("user", [], {"carol"}),
        ("user", ["group:finance"], {"carol", "alice"}),
        ("user", ["user:bob"], {"carol", "bob"}),
        ("user", ["user:root", "user:mallory"], {"carol", "admin"}),  # those of acme: not hq's, not evil's
        ("user", ["group:nobody"], {"carol"}),
        ("session", [], {"carol"}),
    ],
)
def test_who_sees_it(access: Access, level: Level, readers: list[str], seen_by: set[str]) -> None:
    session = "s1" if level == "session" else ""
    made = access.resources.add(PUBLISHER, "document", "d", "text", level, readers=readers, session=session)
    people = {
        "carol": PUBLISHER,
        "alice": ALICE,
        "bob": BOB,
        "mallory": MALLORY,
        "admin": ADMIN,
        "root": ROOT,
    }
    assert {name for name, who in people.items() if sees(access, who, made.id)} == seen_by


@pytest.mark.parametrize(
    ("level", "session", "scope"),
    [
        ("public", "", Scope("public")),
        ("org", "", Scope("org", "acme")),
        ("user", "", Scope("user", "acme", "carol")),
        ("session", "s1", Scope("session", "acme", "carol", "s1")),
    ],
)
def test_its_scope(access: Access, level: Level, session: str, scope: Scope) -> None:
    made = access.resources.add(PUBLISHER, "document", "d", "text", level, session=session)
    assert made.scope == replace(scope, resource=made.id)
    # A user's document may get readers: it is not the user's alone.
    assert made.scope.within(scope) == (level != "user")


def test_publishing_needs_a_permission(access: Access) -> None:
    for level, needed in (("org", "publish:org"), ("public", "publish:public")):
        with pytest.raises(ForbiddenError, match=needed) as caught:
            access.resources.add(ALICE, "document", "d", "the secret text", level)
        assert caught.value.status == 403
        only_other = Principal("acme", "x", permissions=frozenset(PERMISSIONS) - {needed, "admin"})
        with pytest.raises(ForbiddenError):
            access.resources.add(only_other, "document", "d", "the secret text", level)
    entries = access.audit.read(action="refused")
    assert [entry.detail["kind"] for entry in entries] == ["escalation"] * 4
    assert "secret text" not in str(entries)
    assert access.resources.visible(ALICE) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"level": "public", "readers": ["user:bob"]}, "everyone may read it"),
        ({"level": "session", "session": "s", "readers": ["user:bob"]}, "session alone"),
        ({"level": "session"}, "needs a session"),
        ({"level": "user", "session": "s"}, "needs a session"),
        ({"readers": ["bob"]}, "group:NAME or user:NAME"),
        ({"readers": ["org:evil"]}, "group:NAME or user:NAME"),
        ({"readers": ["user:"]}, "non-empty"),
        ({"readers": ["user:a\0b"]}, "cannot be seen"),
        ({"name": "doc_0"}, "as an id does"),
        ({"content": "half \ud800"}, "surrogate"),
    ],
)
def test_what_cannot_be_registered(access: Access, arguments: dict[str, object], says: str) -> None:
    given: dict[str, object] = {"name": "d", "content": "text"} | arguments
    with pytest.raises(InvalidRequestError, match=says):
        access.resources.add(PUBLISHER, "document", **given)  # type: ignore[arg-type]
    assert access.resources.visible(PUBLISHER) == []


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names(access: Access, name: str) -> None:
    made = access.resources.add(ALICE, "document", name, "text", readers=[f"group:{name}", f"user:{name}"])
    assert access.resources.get(ALICE, name, "document") == made
    assert sees(access, Principal("acme", name), made.id)
    assert not sees(access, Principal("acme", name), name)  # what is shared is reached by its id
    assert sees(access, Principal("acme", "x", groups=frozenset({name})), made.id)
    assert not sees(access, BOB, name)
    if name == "аlice":
        assert not sees(access, ALICE, "alice")


@pytest.mark.parametrize("name", BAD_NAMES)
def test_bad_names(access: Access, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        access.resources.add(ALICE, "document", name, "text")
    assert not sees(access, ALICE, name)
    assert access.resources.own(ALICE, name, "document") is None
    assert access.audit.read()[-1].detail == {"kind": "not_found", "resource": "document"}


def test_whose_name_it_is(access: Access) -> None:
    makers = (
        (DAN, "org", []),
        (PUBLISHER, "public", []),
        (BOB, "user", []),
    )
    for maker, level, readers in makers:
        made = access.resources.add(maker, "document", "handbook", maker.user, level, readers=readers)
        assert access.resources.get(BOB, "handbook", "document") == made  # each comes before all above
    access.resources.remove(BOB, "handbook", "document")
    access.resources.remove(PUBLISHER, "handbook", "document")
    later = Principal("acme", "fay", permissions=frozenset({"publish:org"}))
    access.resources.add(later, "document", "handbook", "later", "org")
    assert access.resources.get(BOB, "handbook", "document").content == "dan"  # not taken over
    with pytest.raises(ConflictError, match="already"):
        access.resources.add(later, "document", "handbook", "again")


def test_whose_names_mean_nothing_to_others(access: Access) -> None:
    far = Principal("other", "zoe", permissions=frozenset({"publish:org", "publish:public"}))
    shared = [
        access.resources.add(Principal("acme", "eve"), "schema", "helpdesk", "eve", readers=["user:bob"]),
        access.resources.add(far, "schema", "helpdesk", "zoe", "public"),
    ]
    hidden = access.resources.add(DAN, "schema", "helpdesk", "dan", "org", readers=["group:finance"])
    # Neither a name that nobody else has, nor one that is to be found elsewhere, is theirs to give.
    for use in (access.resources.get, access.resources.remove):
        with pytest.raises(NotFoundError):
            use(BOB, "helpdesk", "schema")
    with pytest.raises(NotFoundError):
        access.resources.set_readers(BOB, "helpdesk", "schema", [])
    assert access.resources.names(BOB, "schema") == []
    for made in shared:
        assert access.resources.get(BOB, made.id, "schema") == made
    assert not sees(access, BOB, hidden.id, "schema")
    assert (
        access.resources.get(ALICE, "helpdesk", "schema") == hidden
    )  # published, and she is among its readers
    assert access.resources.names(ALICE, "schema") == ["helpdesk"]
    own = access.resources.add(BOB, "schema", "helpdesk", "bob")
    assert access.resources.get(BOB, "helpdesk", "schema") == own


def test_how_many_readers_there_are(access: Access) -> None:
    names = [f"user:u{number}" for number in range(MAX_READERS + 1)]
    with pytest.raises(InvalidRequestError, match="1,000 are the most") as caught:
        access.resources.add(ALICE, "document", "d", "text", readers=names)
    assert caught.value.param == "readers"
    made = access.resources.add(ALICE, "document", "d", "text", readers=names[1:])
    with pytest.raises(InvalidRequestError, match="1,001"):
        access.resources.set_readers(ALICE, made.id, "document", names)
    assert access.resources.get(Principal("acme", "u1000"), made.id, "document") == made
    assert not sees(access, Principal("acme", "u0"), made.id)


def test_what_is_not_readable_is_not_read(access: Access) -> None:
    """A refusal takes the same steps of SQLite, whatever there is."""
    empty = access.resources.add(ALICE, "document", "small", "")
    large = access.resources.add(
        ALICE, "document", "large", "x" * 5_000_000, readers=[f"user:u{number}" for number in range(1_000)]
    )

    def steps(ask: Callable[[], object]) -> int:
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        with access.state.transaction() as db:
            db.set_progress_handler(step, 1)
            attempt(ask)
            db.set_progress_handler(None, 1)
        return count

    ids = (empty.id, large.id, "doc_" + "0" * 32)
    for use in (access.resources.get, access.resources.remove):
        taken = [steps(lambda use=use, id=id: use(BOB, id, "document")) for id in ids]
        assert max(taken) - min(taken) <= 12  # of the columns that only a row has
        assert 20 < min(taken) < 200
        taken = [steps(lambda use=use, name=name: use(BOB, name, "document")) for name in ("large", "no")]
        assert max(taken) - min(taken) <= 12
    before = steps(lambda: access.resources.visible(BOB))
    for number in range(50):
        access.resources.add(ALICE, "document", f"more-{number}", "text", readers=["user:carol"])
    assert steps(lambda: access.resources.visible(BOB)) == before


def test_names_of_sessions(access: Access) -> None:
    for session in ("s1", "s2"):
        access.resources.add(ALICE, "document", "upload", session, "session", session=session)
    assert access.resources.get(ALICE, "upload", "document", session="s2").content == "s2"
    assert not sees(access, ALICE, "upload")
    with pytest.raises(NotFoundError):
        access.resources.get(BOB, "upload", "document", session="s1")
    access.resources.add(ALICE, "document", "upload", "all")
    assert access.resources.get(ALICE, "upload", "document", session="s1").content == "s1"
    assert access.resources.get(ALICE, "upload", "document", session="s3").content == "all"


def test_what_is_not_yours_might_as_well_not_exist(access: Access) -> None:
    assert NotFoundError.status == 404
    made = access.resources.add(ALICE, "document", "plan", "text")
    absent = "doc_" + "0" * 32
    for use in (access.resources.get, access.resources.remove):
        messages: list[str] = []
        for reference in (made.id, absent):
            with pytest.raises(NotFoundError) as caught:
                use(MALLORY, reference, "document")
            messages.append(str(caught.value).replace(reference, "ID"))
        assert len(set(messages)) == 1
    with pytest.raises(NotFoundError):
        access.resources.set_readers(MALLORY, made.id, "document", ["user:mallory"])
    entries = access.audit.read(action="refused")
    assert [entry.target for entry in entries] == [made.id, absent, made.id, absent, made.id]
    assert {entry.org for entry in entries} == {"evil"}
    assert sees(access, ALICE, made.id)


def test_who_changes_it(access: Access) -> None:
    made = access.resources.add(ALICE, "document", "plan", "text", readers=["user:bob"])
    for change in (
        lambda: access.resources.remove(BOB, made.id, "document"),
        lambda: access.resources.set_readers(BOB, made.id, "document", []),
    ):
        with pytest.raises(ForbiddenError, match="another's"):
            change()
    # An administrator may by id, and does not see it for that; by name it finds what it sees.
    with pytest.raises(NotFoundError):
        access.resources.remove(ADMIN, "plan", "document")
    assert not sees(access, ADMIN, made.id)
    assert access.resources.set_readers(ADMIN, made.id, "document", ["group:hr"]).readers
    assert not sees(access, BOB, made.id)
    assert access.resources.remove(ROOT, made.id, "document").id == made.id
    assert not sees(access, ALICE, made.id)


def test_taking_the_last_reader_away_is_publishing(access: Access) -> None:
    made = access.resources.add(PUBLISHER, "document", "plan", "text", "org", readers=["user:bob"])
    without = Principal("acme", "carol")
    access.resources.set_readers(without, made.id, "document", ["user:alice"])
    with pytest.raises(ForbiddenError, match="publish:org"):
        access.resources.set_readers(without, made.id, "document", [])
    assert not sees(access, BOB, made.id)
    access.resources.set_readers(PUBLISHER, made.id, "document", [])
    assert sees(access, BOB, made.id)
    access.resources.set_readers(without, made.id, "document", [])  # it has none already


def test_revoked_through_another_connection(access: Access, tmp_path: Path) -> None:
    made = access.resources.add(ALICE, "document", "plan", "text", readers=["user:bob"])
    assert sees(access, BOB, made.id)
    with Access(tmp_path / "access.db") as other:
        other.resources.set_readers(ALICE, made.id, "document", [])
        assert not sees(access, BOB, made.id)
        other.resources.remove(ALICE, made.id, "document")
        assert not sees(access, ALICE, made.id)


def test_what_is_removed_is_gone_from_the_files(access: Access, tmp_path: Path) -> None:
    text = "the quick brown fox " * 5_000  # over many pages
    made = access.resources.add(ALICE, "document", "plan", text)
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"quick brown" in stored
    access.resources.remove(ALICE, made.id, "document")
    stored = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"quick brown" not in stored


def test_nobody_is_everybody(access: Access) -> None:
    made = access.resources.add(ALICE, "document", "plan", "text")
    assert access.resources.forget(org="") == access.forget_resources(ROOT, org="") == []
    assert access.resources.forget(org="acme", user="bob") == []
    assert access.resources.forget(org="acme", user="alice", session="s") == []
    assert access.resources.forget(org="acme") == [made_info(made)]


def made_info(made: Resource) -> ResourceInfo:
    return ResourceInfo(**{name: value for name, value in vars(made).items() if name != "content"})


T = TypeVar("T")


def attempt(call: Callable[[], T]) -> tuple[T | None, type[Exception] | None]:
    """What a call returns, or the kind of error it raises."""
    try:
        return call(), None
    except (InvalidRequestError, AccessError) as error:
        return None, type(error)


# The rules once more, written without a look at the code: what is registered is a list of plain records, and who may
# do what is worked out from scratch for each question.

USERS = ("alice", "bob", "root")
ORGS = ("acme", "evil")
GROUPS = ("finance", "hr")
NAMES = ("plan", "notes")


@dataclass
class Thing:
    id: str
    kind: str
    name: str
    owner: tuple[str, str]
    level: str
    session: str
    readers: set[str]

    def open_to(self, who: Principal) -> bool:
        if self.owner == (who.org, who.user):
            return True
        if self.readers:
            badges = {f"user:{who.user}"} | {f"group:{group}" for group in who.groups}
            return self.owner[0] == who.org and not badges.isdisjoint(self.readers)
        return {"public": True, "org": self.owner[0] == who.org}.get(self.level, False)

    def ruled_by(self, who: Principal) -> bool:
        mine = self.owner == (who.org, who.user)
        return (
            mine
            or "admin" in who.permissions
            or ("admin:org" in who.permissions and self.owner[0] == who.org)
        )


principals = st.builds(
    Principal,
    st.sampled_from(ORGS),
    st.sampled_from(USERS),
    groups=st.frozensets(st.sampled_from(GROUPS)),
    permissions=st.frozensets(st.sampled_from(PERMISSIONS)),
)
reader_sets = st.sets(
    st.sampled_from([f"user:{u}" for u in USERS] + [f"group:{g}" for g in GROUPS]), max_size=2
)
kinds = st.sampled_from(["document", "schema"])


class Visibility(RuleBasedStateMachine):
    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.access = Access(":memory:", clock=Clock())
        self.things: list[Thing] = []

    def teardown(self) -> None:
        self.access.close()

    @rule(
        target=ids,
        who=principals,
        kind=kinds,
        name=st.sampled_from(NAMES),
        level=st.sampled_from(LEVELS),
        readers=reader_sets,
        session=st.sampled_from(["s1", "s2"]),
    )
    def register(
        self, who: Principal, kind: Kind, name: str, level: Level, readers: set[str], session: str
    ) -> str:
        session = session if level == "session" else ""
        owner = (who.org, who.user)
        outcome: type[Exception] | None = None
        if readers and level in ("public", "session"):
            outcome = InvalidRequestError
        elif level in ("public", "org") and not {"admin", f"publish:{level}"} & who.permissions:
            outcome = ForbiddenError
        elif any((t.owner, t.session, t.kind, t.name) == (owner, session, kind, name) for t in self.things):
            outcome = ConflictError
        made, error = attempt(
            lambda: self.access.resources.add(
                who, kind, name, "text", level, readers=readers, session=session
            )
        )
        assert error is outcome
        if made is None:
            return "doc_" + "0" * 32
        self.things.append(Thing(made.id, kind, name, owner, level, session, set(readers)))
        return made.id

    def outcome(self, who: Principal, id: str, kind: str) -> tuple[Thing | None, type[Exception] | None]:
        thing = next((t for t in self.things if t.id == id and t.kind == kind), None)
        if thing is None or not (thing.open_to(who) or thing.ruled_by(who)):
            return None, NotFoundError
        return thing, None if thing.ruled_by(who) else ForbiddenError

    @rule(who=principals, id=ids, kind=kinds, readers=reader_sets)
    def grant(self, who: Principal, id: str, kind: Kind, readers: set[str]) -> None:
        thing, outcome = self.outcome(who, id, kind)
        if thing is not None and outcome is None:
            if readers and thing.level in ("public", "session"):
                outcome = InvalidRequestError
            elif thing.level == "org" and thing.readers and not readers:
                admin = "admin" in who.permissions or (
                    "admin:org" in who.permissions and who.org == thing.owner[0]
                )
                outcome = None if admin or "publish:org" in who.permissions else ForbiddenError
        info, error = attempt(lambda: self.access.resources.set_readers(who, id, kind, readers))
        assert error is outcome
        if info is not None:
            assert thing is not None
            thing.readers = set(readers)
            assert {str(reader) for reader in info.readers} == readers

    @rule(who=principals, id=consumes(ids), kind=kinds)
    def remove(self, who: Principal, id: str, kind: Kind) -> None:
        thing, outcome = self.outcome(who, id, kind)
        info, error = attempt(lambda: self.access.resources.remove(who, id, kind))
        assert error is outcome
        if info is not None:
            assert thing is not None
            self.things.remove(thing)

    @rule(org=st.sampled_from(ORGS), user=st.sampled_from(USERS))
    def forget(self, org: str, user: str) -> None:
        gone = self.access.forget_resources(Principal(org, user), org=org, user=user)
        assert {info.id for info in gone} == {t.id for t in self.things if t.owner == (org, user)}
        self.things = [t for t in self.things if t.owner != (org, user)]

    @rule(who=principals, id=ids, kind=kinds)
    def read(self, who: Principal, id: str, kind: Kind) -> None:
        may = any(t.id == id and t.kind == kind and t.open_to(who) for t in self.things)
        assert sees(self.access, who, id, kind) == may

    @rule(who=principals, name=st.sampled_from(NAMES), kind=kinds, session=st.sampled_from(["", "s1", "s2"]))
    def read_by_name(self, who: Principal, name: str, kind: Kind, session: str) -> None:
        named = [t for t in self.things if (t.kind, t.name) == (kind, name)]
        mine = [t for t in named if t.owner == (who.org, who.user)]
        published = [t for t in named if t.owner[0] == who.org and t.open_to(who)]
        ranks = (
            [t.id for t in mine if t.session and t.session == session],
            [t.id for t in mine if not t.session],
            [t.id for t in published if t.level == "public"],
            [t.id for t in published if t.level == "org"],
        )
        first = next((rank for rank in ranks if rank), [])
        made, error = attempt(lambda: self.access.resources.get(who, name, kind, session=session))
        assert (made is None) == (not first)
        assert made.id == first[0] if made else error is NotFoundError

    @rule(who=principals)
    def list_all(self, who: Principal) -> None:
        listed = {info.id for info in self.access.resources.visible(who)}
        assert listed == {t.id for t in self.things if t.open_to(who)}

    @invariant()
    def as_many_as_in_the_model(self) -> None:
        assert self.access.state.row("SELECT count(*) FROM resources")[0] == len(self.things)
        readers = self.access.state.row("SELECT count(*) FROM readers")[0]
        assert readers == sum(len(t.readers) for t in self.things)


TestVisibility = Visibility.TestCase
TestVisibility.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
