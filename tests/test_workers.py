"""Threads that principals share: whose turn it is, and that none is lost, whatever becomes of who waits."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.access.principal import Principal
from ostinato.server.workers import THREADS, Workers
from server_fixtures import DEADLINE

ANN, BOB, EVE = (Principal("acme", user) for user in ("ann", "bob", "eve"))
PEOPLE = {each.user: each for each in (ANN, BOB, EVE)}


@contextmanager
def pool(threads: int = THREADS) -> Generator[Workers]:
    workers = Workers(threads, name="test-worker")
    try:
        yield workers
    finally:
        workers.close()


class Held:
    """Work that goes on until it is let go; notes who has begun, in order."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def work(self, name: str) -> str:
        with self._changed:
            self.begun.append(name)
            event = self.go_on.setdefault(name, threading.Event())
            self._changed.notify_all()
        assert event.wait(DEADLINE)
        return name

    def let(self, name: str) -> None:
        with self._changed:
            self.go_on.setdefault(name, threading.Event()).set()

    def let_all(self) -> None:
        for name in list(self.go_on):
            self.let(name)

    async def until(self, count: int) -> None:
        """Wait until so many have begun."""

        def wait() -> None:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self.begun) >= count, DEADLINE), self.begun

        # Of the loop's own threads, not of those that are looked at.
        await asyncio.to_thread(wait)


def start(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(work)


def test_nobody_has_more_than_half_of_the_threads() -> None:
    async def check() -> None:
        with pool(4) as workers:
            held = Held()
            hog = [start(workers.run(EVE, held.work, f"eve {n}")) for n in range(20)]
            await held.until(2)
            other = [start(workers.run(who, held.work, who.user)) for who in (ANN, BOB)]
            await held.until(4)
            assert sorted(held.begun) == ["ann", "bob", "eve 0", "eve 1"]
            for name in ("ann", "bob"):
                held.let(name)
            assert await asyncio.gather(*other) == ["ann", "bob"]
            # Though two threads are free, the hog has its share.
            assert sorted(held.begun) == ["ann", "bob", "eve 0", "eve 1"]
            for number in range(20):
                held.let(f"eve {number}")
            assert await asyncio.gather(*hog) == [f"eve {n}" for n in range(20)]

    asyncio.run(check())


def test_users_take_turns() -> None:
    async def check() -> None:
        with pool(1) as workers:
            held = Held()
            tasks = [start(workers.run(EVE, held.work, f"eve {n}")) for n in range(4)]
            await held.until(1)
            tasks += [start(workers.run(ANN, held.work, f"ann {n}")) for n in range(2)]
            tasks += [start(workers.run(BOB, held.work, "bob 0"))]
            await asyncio.sleep(0)
            for number in range(len(tasks)):
                await held.until(number + 1)
                held.let(held.begun[number])
            await asyncio.gather(*tasks)
            # Each user's own in order, and no one's second before everybody's first.
            assert held.begun == ["eve 0", "eve 1", "ann 0", "bob 0", "eve 2", "ann 1", "eve 3"]

    asyncio.run(check())


def test_who_leaves_a_queue_takes_its_work_along() -> None:
    async def check() -> None:
        with pool(1) as workers:
            held = Held()
            first = start(workers.run(EVE, held.work, "first"))
            await held.until(1)
            waiting = [start(workers.run(EVE, held.work, f"gone {n}")) for n in range(50)]
            last = start(workers.run(EVE, held.work, "last"))
            await asyncio.sleep(0)
            for each in waiting:
                each.cancel()
            await asyncio.wait(waiting)
            held.let("first")
            held.let("last")
            assert await asyncio.gather(first, last) == ["first", "last"]
            assert held.begun == ["first", "last"]

    asyncio.run(check())


def test_a_thread_is_free_when_its_call_ends_and_not_before() -> None:
    """Who has left has a call that goes on; what it occupies counts."""

    async def check() -> None:
        with pool(2) as workers:
            held = Held()
            left = start(workers.run(EVE, held.work, "left"))
            await held.until(1)
            left.cancel()
            await asyncio.wait((left,))
            again = start(workers.run(EVE, held.work, "again"))
            ann = start(workers.run(ANN, held.work, "ann"))
            await held.until(2)
            assert held.begun == ["left", "ann"], "the share of who has left is used"
            held.let("left")
            await held.until(3)
            held.let_all()
            assert await asyncio.gather(again, ann) == ["again", "ann"]

    asyncio.run(check())


def test_what_a_call_raises_is_raised_and_its_thread_is_free() -> None:
    def fail() -> None:
        raise KeyError("why")

    async def check() -> None:
        with pool(1) as workers:
            for _ in range(5):
                with pytest.raises(KeyError, match="why"):
                    await workers.run(ANN, fail)
            assert await workers.run(ANN, int, "7") == 7
            assert await workers.run(BOB, int, "11", base=2) == 3

    asyncio.run(check())


def test_calls_are_made_on_threads_of_their_own() -> None:
    async def check() -> None:
        with pool(2) as workers:
            name = await workers.run(ANN, lambda: threading.current_thread().name)
            assert name.startswith("test-worker")

    asyncio.run(check())


def test_nobody_waits_for_a_user_with_a_long_queue() -> None:
    """Between the coming of a user and its turn no other has more than one."""

    async def check() -> None:
        with pool(1) as workers:
            held = Held()
            hog = [start(workers.run(EVE, held.work, f"eve {n}")) for n in range(100)]
            await held.until(1)
            ann = start(workers.run(ANN, held.work, "ann"))
            await asyncio.sleep(0)
            for name in ("eve 0", "eve 1", "ann"):
                held.let(name)
            assert await ann == "ann"
            assert len(held.begun) <= 4
            for number in range(100):
                held.let(f"eve {number}")
            await asyncio.gather(*hog)

    asyncio.run(check())


@settings(max_examples=60, deadline=None, database=None)
@given(
    threads=st.integers(1, 5),
    acts=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "fail", "leave", "let", "breathe"]),
            st.sampled_from([*PEOPLE]),
            st.integers(0, 30),
        ),
        max_size=60,
    ),
)
def test_whatever_happens_no_thread_is_lost(threads: int, acts: list[tuple[str, str, int]]) -> None:
    share = max(1, threads // 2)
    busy, most = Counter[str](), Counter[str]()
    lock = threading.Lock()
    events: list[threading.Event] = []

    def work(who: str, event: threading.Event, fails: bool) -> str:
        with lock:
            busy[who] += 1
            most[who] = max(most[who], busy[who])
        assert event.wait(DEADLINE)
        with lock:
            busy[who] -= 1
        if fails:
            raise ValueError(who)
        return who

    async def check() -> None:
        with pool(threads) as workers:
            tasks: list[asyncio.Task[str]] = []
            for act, who, number in acts:
                if act in ("ask", "fail"):
                    events.append(threading.Event())
                    tasks.append(start(workers.run(PEOPLE[who], work, who, events[-1], act == "fail")))
                elif act == "leave" and tasks:
                    tasks[number % len(tasks)].cancel()
                elif act == "let" and events:
                    events[number % len(events)].set()
                await asyncio.sleep(0)
            for event in events:
                event.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(each.done() for each in tasks)
            # All threads are there for those who come now, each with its share: nobody's is lost or had twice.
            held = Held()
            everybody = [
                start(workers.run(Principal("new", f"user {n}"), held.work, f"{n}")) for n in range(threads)
            ]
            await held.until(threads)
            held.let_all()
            assert await asyncio.gather(*everybody) == [f"{n}" for n in range(threads)]

    asyncio.run(check())
    assert all(count <= share for count in most.values())
