"""Who asks: found out before anything else, on threads of its own, so that no other work is in its way."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future, ThreadPoolExecutor

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ostinato.access.access import Access
from ostinato.access.errors import AccessError
from ostinato.access.jwks import TIMEOUT
from ostinato.access.principal import LOCAL, LOOPBACK, Principal
from ostinato.server.errors import RefusedError, describe

THREADS = 2
"""A key is looked up, or a signature checked, in less than a millisecond; nothing here waits for anything slower."""

_AUTHORITY = re.compile(
    r"(?:\[([0-9a-f:.]+)\]|([^\[\]:/?#@\\\s]+))(?::[0-9]{1,5})?", re.ASCII | re.IGNORECASE
)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(.*)", re.ASCII | re.IGNORECASE)


class Authenticate:
    """Says who asks, in the request's state; nobody else does. `/health` is open to all.

    The key is read from `Authorization`, or from `x-api-key`, where clients of Anthropic's API put it.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="ostinato-authenticate")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        authorization = headers.get("authorization")
        if authorization is None and "x-api-key" in headers:
            authorization = f"Bearer {headers['x-api-key']}"
        try:
            principal = await self._principal(authorization)
            if principal is LOCAL and not is_local(headers):
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

    async def _principal(self, authorization: str | None) -> Principal:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._threads, self._begin, authorization)
        if isinstance(found, Principal):
            return found
        # An issuer's keys are on their way; nobody but its own tokens waits. It is others' too: no cancelling.
        await asyncio.wait((asyncio.wrap_future(found),), timeout=TIMEOUT)
        return await loop.run_in_executor(self._threads, self._access.identify, authorization)

    def _begin(self, authorization: str | None) -> Principal | Future[None]:
        self._access.secrets.refresh()
        return self._access.pending(authorization) or self._access.identify(authorization)


def principal_of(request: Request) -> Principal:
    """Who asks, as `Authenticate` has found."""
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


def is_local(headers: Headers) -> bool:
    """Whether a request that reached this machine also means it.

    A page in a browser here can send requests from elsewhere (`Origin`), and be served under a name that leads here
    (`Host`). Of two such headers nobody knows which one the next to look will believe.
    """
    hosts, origins = headers.getlist("host"), headers.getlist("origin")
    if len(hosts) != 1 or len(origins) > 1:
        return False
    from_here = [_ORIGIN.fullmatch(origin) for origin in origins]
    return _is_loopback(hosts[0]) and all(match and _is_loopback(match[1]) for match in from_here)


def _is_loopback(authority: str) -> bool:
    """Whether a name or address, perhaps with a port, is this machine's, and nothing else stands beside it."""
    match = _AUTHORITY.fullmatch(authority)
    return match is not None and (match[1] or match[2]).lower() in LOOPBACK
