"""What takes as many steps of SQLite tells nothing by its time: a document that is another's, and none at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from access_fixtures import ALICE, BOB, MALLORY
from ostinato.access.access import Access
from ostinato.access.errors import ForbiddenError, NotFoundError
from ostinato.access.grants import MAX_READERS
from ostinato.access.principal import Principal
from ostinato.access.resources import PREFIXES, Kind

READERS = (0, 1, 40, MAX_READERS)
COLUMNS = 12
"""Steps that SQLite takes for the columns of a row, which only what exists has: less than a microsecond."""


@pytest.fixture
def access() -> Iterator[Access]:
    with Access(":memory:") as access:
        yield access


def work_of(access: Access, ask: Callable[[], object]) -> tuple[list[str], int]:
    """The statements that an answer takes, and the steps of SQLite's machine."""
    statements: list[str] = []
    steps = 0

    def step() -> int:
        nonlocal steps
        steps += 1
        return 0

    with access.state.transaction() as db:
        db.set_trace_callback(lambda text: statements.append(text.split("'")[0][:60]))
        db.set_progress_handler(step, 1)
        with suppress(NotFoundError, ForbiddenError):
            ask()
        db.set_progress_handler(None, 1)
        db.set_trace_callback(None)
    return statements, steps


def readers(count: int) -> list[str]:
    return [f"user:reader {number}" for number in range(count)]


USES: dict[str, Callable[[Access, Principal, str, Kind], object]] = {
    "read": lambda access, who, name, kind: access.resources.get(who, name, kind),
    "remove": lambda access, who, name, kind: access.resources.remove(who, name, kind),
    "share": lambda access, who, name, kind: access.resources.set_readers(who, name, kind, ["user:eve"]),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("prober", [BOB, MALLORY, Principal("acme", "eve", groups=frozenset({"a", "b"}))])
@pytest.mark.parametrize("kind", ["document", "schema"])
def test_anothers_takes_the_work_of_none(access: Access, use: str, prober: Principal, kind: Kind) -> None:
    """By id and by name, however many may read it and however long it is."""
    made = [
        access.resources.add(ALICE, kind, f"plan {count}", "x" * (10 + 2_000 * count), readers=readers(count))
        for count in READERS
    ]
    for there, absent in (
        ([each.id for each in made], PREFIXES[kind] + "0" * 32),
        ([each.name for each in made], "plan 9"),
    ):
        for _ in range(12):  # until refusals of this kind are counted, and not written one by one
            refused(access, use, prober, absent, kind)
        statements, steps = work_of(access, lambda absent=absent: USES[use](access, prober, absent, kind))
        assert steps > 10
        for reference in there:
            same, taken = work_of(access, lambda it=reference: USES[use](access, prober, it, kind))
            assert same == statements, "one way to ask, whatever there is"
            assert abs(taken - steps) <= COLUMNS


def refused(access: Access, use: str, prober: Principal, reference: str, kind: Kind) -> None:
    with pytest.raises(NotFoundError):
        USES[use](access, prober, reference, kind)


def test_a_list_takes_no_more_for_what_others_have(access: Access) -> None:
    for name in ("mine", "mine too"):
        access.resources.add(BOB, "document", name, "text")
    _, before = work_of(access, lambda: access.resources.visible(BOB, "document"))
    for number in range(100):
        access.resources.add(ALICE, "document", f"hers {number}", "x" * 10_000, readers=readers(number))
    statements, after = work_of(access, lambda: access.resources.visible(BOB, "document"))
    assert after == before
    assert len(statements) <= 3
    _, names = work_of(access, lambda: access.resources.names(BOB, "document"))
    assert names <= before


def test_what_is_told_is_the_same(access: Access) -> None:
    made = access.resources.add(ALICE, "document", "plan", "text", readers=readers(40))
    for prober in (BOB, MALLORY):
        for there, absent in ((made.id, "doc_" + "0" * 32), (made.name, "none")):
            told: list[str] = []
            for reference in (there, absent):
                with pytest.raises(NotFoundError) as caught:
                    access.resources.get(prober, reference, "document")
                told.append(str(caught.value).replace(reference, "…"))
            assert told[0] == told[1]
