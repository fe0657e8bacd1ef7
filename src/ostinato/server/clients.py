"""Clients: they may be slow, and they may leave. Whatever one has started ends when it has left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left before the answer: nobody receives it, the metrics count it."""


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`; if the client leaves first, `work` is cancelled and ClientGone raised."""

    async def disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await cancelled((working, leaving))


async def cancelled(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, the events are closed, and with them the requests.

    Listens for the disconnect itself: whether Starlette does depends on the ASGI version of the server.
    """

    def __init__(self, first: str, events: AsyncGenerator[str, None]) -> None:
        async def body() -> AsyncGenerator[str, None]:
            yield first
            async for event in events:
                yield event

        super().__init__(
            body(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        try:
            await unless_gone(receive, self.stream_response(send))
        except (ClientGone, OSError):
            pass
        finally:
            await self._events.aclose()
