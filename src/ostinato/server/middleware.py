"""What stands before the routes: who asks, the limit on bodies, the count of requests."""

from __future__ import annotations

import asyncio
import uuid

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.access.access import Access
from ostinato.access.errors import AccessError
from ostinato.access.principal import LOCAL, LOOPBACK, Principal
from ostinato.server.errors import RefusedError, describe, is_anthropic
from ostinato.server.metrics import Metrics

MAX_BODY_BYTES = 8 * 2**20
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


class Authenticate:
    """Says who asks, in the request's state; nobody else does. `/health` is open to all.

    The key is read from `Authorization`, or from `x-api-key`, where clients of Anthropic's API put it.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        authorization = headers.get("authorization")
        if authorization is None and "x-api-key" in headers:
            authorization = f"Bearer {headers['x-api-key']}"
        try:
            # It may ask a file, or fetch an issuer's keys; the event loop serves others meanwhile.
            principal = await asyncio.to_thread(self._principal, authorization)
            if principal is LOCAL and not _is_local(headers):
                raise RefusedError(
                    403,
                    "Without authentication this server answers to localhost alone. Ask it by that name, or make a "
                    "key: ostinato keys create.",
                    code="not_local",
                )
        except (AccessError, RefusedError) as error:
            await describe(error).response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)

    def _principal(self, authorization: str | None) -> Principal:
        self._access.secrets.refresh()
        return self._access.authenticate(authorization)


def principal_of(request: Request) -> Principal:
    """Who asks, as `Authenticate` has found."""
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def _is_local(headers: Headers) -> bool:
    """Whether a request that reached this machine also means it.

    A page in a browser here can send requests from elsewhere (`Origin`), and be served under a name that leads here
    (`Host`).
    """
    origin = headers.get("origin", "")
    return _host(headers.get("host", "")) in LOOPBACK and (
        not origin or _host(origin.partition("://")[2]) in LOOPBACK
    )


def _host(header: str) -> str:
    """The name in a `Host` header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].lower()


class BodyLimit:
    """Refuses bodies over a limit as they are read, whatever length they declare."""

    def __init__(self, app: ASGIApp, limit: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        too_large = HTTPException(413, f"The body is over the limit of {self._limit} bytes.")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdigit() and int(declared) > self._limit:
            await self._discard(receive)
            await describe(too_large).response(scope)(scope, receive, send)
            return
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                await self._discard(receive)
                raise too_large
            return message

        await self._app(scope, limited, send)

    async def _discard(self, receive: Receive) -> None:
        """Read on, keeping nothing: a client still sending would see a reset, and not the answer.

        Not for ever: past four times the limit the connection is closed on it.
        """
        left = 4 * self._limit
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
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            path = scope["path"]
            # One label for all that is below, whose names are the clients' to choose.
            above = "/".join(path.split("/")[:3])
            endpoint = path if path in ENDPOINTS else above if above in ENDPOINTS else "other"
            self._metrics.requests.labels(endpoint, str(status)).inc()
