"""The store whose room owners share, against the plainest account of what it holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ostinato.cache.owned import Owned

ROOM = 6
OWNERS = st.sampled_from(["ann", "bob", "eve"])
KEYS = st.integers(0, 9)


class Keeping(RuleBasedStateMachine):
    """`Owned` against a list of what is kept, the newest last."""

    def __init__(self) -> None:
        super().__init__()
        self.store: Owned[str, int, int] = Owned(ROOM)
        self.kept: list[tuple[str, int, int]] = []
        self.values = iter(range(10**9))

    def of(self, owner: str) -> list[tuple[str, int, int]]:
        return [each for each in self.kept if each[0] == owner]

    def take(self, owner: str, key: int) -> tuple[str, int, int] | None:
        found = next((each for each in self.kept if each[:2] == (owner, key)), None)
        if found is not None:
            self.kept.remove(found)
        return found

    @rule(owner=OWNERS, key=KEYS)
    def put(self, owner: str, key: int) -> None:
        value = next(self.values)
        before = {each: len(self.of(each)) for each in ("ann", "bob", "eve")}
        self.store.put(owner, key, value)
        new = self.take(owner, key) is None
        self.kept.append((owner, key, value))
        if len(self.kept) <= ROOM:
            return
        # One has gone: the oldest of somebody who has most, whoever else has put something.
        left = set(self.store)
        gone = [each for each in self.kept if each not in left]
        assert new
        assert len(gone) == 1
        (loser, *_), most = gone[0], max(len(self.of(each)) for each in before)
        assert len(self.of(loser)) == most
        assert gone[0] == self.of(loser)[0]
        if before[owner] + 1 < max(before.values()):
            assert loser != owner, "who has less than another loses nothing by it"
        self.kept.remove(gone[0])

    @rule(owner=OWNERS, key=KEYS)
    def get(self, owner: str, key: int) -> None:
        found = self.take(owner, key)
        if found is not None:
            self.kept.append(found)  # it is its owner's newest now
        assert self.store.get(owner, key) == (None if found is None else found[2])

    @rule(owner=OWNERS, key=KEYS)
    def drop(self, owner: str, key: int) -> None:
        self.store.drop(owner, key)
        self.take(owner, key)

    @rule(owner=OWNERS, every=st.integers(2, 4))
    def forget(self, owner: str, every: int) -> None:
        self.store.forget(lambda whose, value: whose == owner and value % every == 0)
        self.kept = [each for each in self.kept if each[0] != owner or each[2] % every]

    @rule()
    def clear(self) -> None:
        self.store.forget(lambda *_: True)
        self.kept = []

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.store) == len(self.kept) <= ROOM
        assert sorted(self.store) == sorted(self.kept)
        for owner in ("ann", "bob", "eve"):
            assert [each for each in self.store if each[0] == owner] == self.of(owner), "in order of use"


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, database=None)


def test_who_fills_it_pushes_out_its_own() -> None:
    store: Owned[str, int, str] = Owned(100)
    for number in range(40):
        store.put("ann", number, "hers")
    for number in range(10_000):
        store.put("eve", number, "flood")
    assert [key for owner, key, _ in store if owner == "ann"] == [*range(40)]
    assert [key for owner, key, _ in store if owner == "eve"] == [*range(9_940, 10_000)]
