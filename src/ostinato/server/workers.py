"""Workers: threads for what takes a while, shared fairly by those who ask.

The event loop must not wait for a file, a template or a tokenizer, and no principal's work must wait for all of
another's. So each principal has a queue of its own, the queues take turns, and none has more than half of the threads.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from ostinato.access.principal import Principal

P = ParamSpec("P")
T = TypeVar("T")
User = tuple[str, str]
"""Organisation and user."""

THREADS = 3
"""More would take the processor from the engine."""


class Workers:
    """A pool of threads for one event loop. Who leaves while its work waits in a queue takes it along."""

    def __init__(self, threads: int = THREADS, *, name: str = "ostinato-worker") -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._idle = threads
        self._share = max(1, threads // 2)
        self._queues: OrderedDict[User, deque[asyncio.Future[None]]] = OrderedDict()
        self._working: dict[User, int] = {}

    async def run(
        self, principal: Principal, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """The result of `call`, made on a thread when it is the turn of the user's work."""
        whose = principal.org, principal.user
        await self._turn(whose)
        made = self._threads.submit(partial(call, *args, **kwargs))
        loop = asyncio.get_running_loop()
        # The thread is free when the call ends, not when who asked for it has left.
        made.add_done_callback(lambda _: _soon(loop, self._done, whose))
        return await asyncio.wrap_future(made)

    def close(self) -> None:
        """Take no more work; what is being done is finished."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, whose: User) -> None:
        if self._idle and self._working.get(whose, 0) < self._share:
            self._take(whose)
            return
        waiting = asyncio.get_running_loop().create_future()
        self._queues.setdefault(whose, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                self._done(whose)  # it was its turn already
            raise

    def _take(self, whose: User) -> None:
        self._idle -= 1
        self._working[whose] = self._working.get(whose, 0) + 1

    def _done(self, whose: User) -> None:
        self._idle += 1
        self._working[whose] -= 1
        if not self._working[whose]:
            del self._working[whose]
        while self._idle:
            free = (each for each in self._queues if self._working.get(each, 0) < self._share)
            following = next(free, None)
            if following is None:
                return
            waiting = self._queues[following].popleft()
            if self._queues[following]:
                self._queues.move_to_end(following)
            else:
                del self._queues[following]
            if not waiting.done():  # else whoever waited has left
                self._take(following)
                waiting.set_result(None)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: Any) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call, *args)
