"""What stands before the routes: API keys, the limit on bodies, the count of requests."""

from __future__ import annotations

import hashlib
import hmac
import uuid

from fastapi.exceptions import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ostinato.server.errors import ErrorAnswer, describe, is_anthropic
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
        "/health",
        "/metrics",
    }
)


class ApiKeys:
    """Lets a request pass that has one of the keys as its bearer token. `/health` is open to all."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health" or self._allowed(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        refusal = ErrorAnswer(
            401,
            "Missing or incorrect API key: send it in the header Authorization: Bearer <key>.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await refusal.response(scope)(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1"))
        # All keys are compared, and digests of one length, so that the time taken tells nothing.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
            # One label for all schemas, whose names are the clients' to choose.
            path = "/v1/schemas" if path.startswith("/v1/schemas/") else path
            endpoint = path if path in ENDPOINTS else "other"
            self._metrics.requests.labels(endpoint, str(status)).inc()
