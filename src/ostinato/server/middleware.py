"""What stands before the routes: who asks, the limits on principals and bodies, the count of requests."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.server.errors import describe, is_anthropic
from ostinato.server.limits import LimitedError, Limits, Place
from ostinato.server.metrics import Metrics

REGISTERED_BYTES = 8 * 2**20
"""Most bytes of a body that registers a document or a schema."""
TEXT_BYTES = 2**20
"""Least that the limit of every other body is."""
DISCARDED_BYTES = 32 * 2**20
BODY_WITHIN = 30.0
"""Seconds that a client has to send a body."""

ENDPOINTS = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/schemas",
        "/v1/documents",
        "/v1/requests",
        "/v1/forget",
        "/health",
        "/metrics",
    }
)


class Limited:
    """Gives each request that sends something a place among its principal's, until all of it is answered."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] not in ("POST", "PUT")
            or "principal" not in scope["state"]
        ):
            await self._app(scope, receive, send)
            return
        try:
            place = self._limits.place(scope["state"]["principal"].scope("user"))
        except LimitedError as error:
            await describe(error).response(scope)(scope, receive, send)
            return
        with place:
            scope["state"]["place"] = place
            await self._app(scope, receive, send)


def place_of(request: Request) -> Place:
    """The place that `Limited` has given a request."""
    place = request.state.place
    assert isinstance(place, Place)
    return place


class BodyLimit:
    """Refuses bodies over a limit as they are read, whatever length they declare, and those that do not come in time.

    Args:
        app: what is asked next.
        text_bytes: limit of a body, unless it registers something.
        within: seconds that a body has to come whole.
    """

    def __init__(self, app: ASGIApp, *, text_bytes: int = TEXT_BYTES, within: float = BODY_WITHIN) -> None:
        self._app = app
        self._text_bytes = text_bytes
        self._within = within

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        registers = scope["path"].startswith(("/v1/schemas", "/v1/documents"))
        limit = REGISTERED_BYTES if registers else self._text_bytes
        deadline = asyncio.get_running_loop().time() + self._within
        too_large = HTTPException(413, f"The body is over the limit of {limit} bytes.")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            await self._discard(receive, deadline)
            await describe(too_large).response(scope)(scope, receive, send)
            return
        place: Place | None = scope.get("state", {}).get("place")
        size = 0
        whole = False

        async def limited() -> Message:
            nonlocal size, whole
            if whole:  # what comes now is the client's leaving, for which there is no deadline
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"The body did not come whole within {self._within:g} seconds. Send it faster, or less of it.",
                    headers={"Connection": "close"},
                ) from None
            whole = not message.get("more_body", False)
            size += len(message.get("body", b""))
            if size > limit:
                if not whole:
                    await self._discard(receive, deadline)
                raise too_large
            if place is not None:
                place.weigh(size)
            return message

        await self._app(scope, limited, send)

    async def _discard(self, receive: Receive, deadline: float) -> None:
        """Read on, keeping nothing: a client still sending would see a reset, and not the answer.

        Not for ever: past a size or the deadline the connection is closed on it.
        """
        left = DISCARDED_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return


class RequestIds:
    """Gives each request an id, told in the header in which clients of its API look for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id
        name = b"request-id" if is_anthropic(scope["path"]) else b"x-request-id"

        async def naming(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (name, request_id.encode())]
            await send(message)

        await self._app(scope, receive, naming)


class CountRequests:
    """Counts each request by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == 429:
                    self._metrics.limited.inc()
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"]
            # One label for all that is below, whose names are the clients' to choose.
            above = "/".join(path.split("/")[:3])
            endpoint = path if path in ENDPOINTS else above if above in ENDPOINTS else "other"
            self._metrics.requests.labels(endpoint, str(status)).inc()
