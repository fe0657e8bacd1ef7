"""Who asks: under which names a server without keys is asked, and that nothing keeps the next from being known."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from ostinato.access.access import Access
from ostinato.access.fetch import Fetch, FetchError
from ostinato.access.tokens import Issuer
from ostinato.server.authenticate import THREADS, Authenticate, principal_of
from server_fixtures import DEADLINE
from token_fixtures import AUDIENCE, ISSUER, public, token

OTHER = "https://login.other.com"


@pytest.fixture
def access(tmp_path: Path) -> Iterator[Access]:
    with Access(tmp_path / "access.db") as access:
        yield access


async def name(request: Request) -> PlainTextResponse:
    return PlainTextResponse(principal_of(request).user)


def asking(access: Access) -> httpx.AsyncClient:
    """A client of an app that tells who asks."""
    app = Authenticate(Starlette(routes=[Route("/", name)]), access)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost")


def bearer(credential: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {credential}"}


# -- names ----------------------------------------------------------------------------------------------

HOST, ORIGIN = ("Host", "localhost:8000"), ("Origin", "http://localhost:3000")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([HOST], 200),
        ([("Host", "LOCALHOST")], 200),
        ([("Host", "127.0.0.1:80")], 200),
        ([("Host", "[::1]")], 200),
        ([("Host", "[::1]:8000")], 200),
        ([HOST, ORIGIN], 200),
        ([HOST, ("Origin", "https://[::1]:1")], 200),
        ([("Host", "[::1].evil.com")], 403),
        ([("Host", "[::1]evil.com")], 403),
        ([("Host", "[::1]:80@evil.com")], 403),
        ([("Host", "localhost:80@evil.com")], 403),
        ([("Host", "evil.com@localhost")], 403),
        ([("Host", "localhost:evil.com")], 403),
        ([("Host", "localhost:8000:8000")], 403),
        ([("Host", "localhost/evil.com")], 403),
        ([("Host", "localhost.evil.com")], 403),
        ([("Host", "evil.com")], 403),
        ([("Host", "::1")], 403),
        ([("Host", "[localhost]")], 403),
        ([("Host", "")], 403),
        ([], 403),
        ([HOST, ("Host", "evil.com")], 403),
        ([("Host", "evil.com"), HOST], 403),
        ([HOST, HOST], 403),
        ([HOST, ("Origin", "http://evil.com")], 403),
        ([HOST, ("Origin", "http://[::1].evil.com")], 403),
        ([HOST, ("Origin", "http://localhost:80@evil.com")], 403),
        ([HOST, ("Origin", "http://evil.com/http://localhost")], 403),
        ([HOST, ("Origin", "localhost")], 403),
        ([HOST, ("Origin", "null")], 403),
        ([HOST, ("Origin", "")], 403),
        ([HOST, ORIGIN, ("Origin", "http://evil.com")], 403),
        ([HOST, ("Origin", "http://evil.com"), ORIGIN], 403),
        ([HOST, ORIGIN, ORIGIN], 403),
    ],
)
def test_under_which_names_it_is_asked(access: Access, headers: list[tuple[str, str]], status: int) -> None:
    """Asked as ASGI has it: what a client's library leaves out or tidies comes as it is."""
    told: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            told.append(message["status"])

    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
    }
    app = Authenticate(Starlette(routes=[Route("/", name)]), access)
    asyncio.run(app(scope, receive, send))
    assert told == [status]


# -- issuers that take their time -----------------------------------------------------------------------


class Slow:
    """A server of a key set that sends a beginning, then bytes now and then, and the rest when it is let."""

    def __init__(self, beginning: bytes, drop: bytes, rest: bytes = b"") -> None:
        self.asked = 0
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = threading.Event()
        """The last connection has, on either side."""
        self._beginning, self._drop, self._rest = beginning, drop, rest
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/jwks.json"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._socket.accept()
                self.asked += 1
                self.ended.clear()
                threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with line, suppress(OSError):
            line.recv(65_536)
            line.sendall(self._beginning)
            self.begun.set()
            while not self.go_on.wait(0.01):
                line.sendall(self._drop)
            line.sendall(self._rest)
        self.ended.set()

    def close(self) -> None:
        self.go_on.set()
        self._socket.close()


@contextmanager
def slow(*parts: bytes) -> Iterator[Slow]:
    server = Slow(*parts)
    try:
        yield server
    finally:
        server.close()


DRIPPING = {
    "headers": (b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"),
    "status": (b"HTTP/1.1 ", b"2"),
    "many headers": (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "body": (b'HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n{"keys": [', b" "),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
}


@pytest.mark.parametrize("what", ["headers", "body"])
def test_nobody_else_waits_for_an_issuer(access: Access, tmp_path: Path, what: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"keys": [public("rsa")]}))
    access.issuers.add(Issuer(OTHER, AUDIENCE, str(path), "other"))
    _, secret = access.keys.create("acme", "alice")
    before = set(threading.enumerate())

    async def attack(server: Slow) -> None:
        async with asking(access) as client:
            forged = [asyncio.create_task(client.get("/", headers=bearer(token()))) for _ in range(6)]
            await asyncio.to_thread(server.begun.wait, DEADLINE)
            for _ in range(3):
                assert (await client.get("/", headers=bearer(secret))).text == "alice"
                assert (await client.get("/", headers=bearer(token(iss=OTHER, sub="bob")))).text == "bob"
            assert not any(each.done() for each in forged)
            ours = [each for each in threading.enumerate() if each not in before and "ostinato" in each.name]
            assert len(ours) <= THREADS + 1
            for answer in await asyncio.gather(*forged):
                assert answer.status_code == 401
                assert "cannot be had" in answer.text
            # The failure is remembered; the connection was cut, and no thread stays with it.
            assert (await client.get("/", headers=bearer(token()))).status_code == 401
            assert server.asked == 1
            assert await asyncio.to_thread(server.ended.wait, DEADLINE)

    with slow(*DRIPPING[what]) as server:
        access.issuers.add(Issuer(ISSUER, AUDIENCE, server.url))
        asyncio.run(attack(server))


def test_who_leaves_takes_no_keys_along(access: Access) -> None:
    body = json.dumps({"keys": [public("rsa")]}).encode()
    parts = (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" ", body)

    async def ask(server: Slow) -> None:
        async with asking(access) as client:
            first, second = (
                asyncio.create_task(client.get("/", headers=bearer(token(sub=sub)))) for sub in ("ann", "bob")
            )
            await asyncio.to_thread(server.begun.wait, DEADLINE)
            first.cancel()
            await asyncio.wait((first,))
            server.go_on.set()
            assert (await second).text == "bob"
            assert server.asked == 1

    with slow(*parts) as server:
        access.issuers.add(Issuer(ISSUER, AUDIENCE, server.url))
        asyncio.run(ask(server))


def test_a_synchronous_caller_waits(access: Access) -> None:
    body = json.dumps({"keys": [public("rsa")]}).encode()
    with slow(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b" ", body) as server:
        access.issuers.add(Issuer(ISSUER, AUDIENCE, server.url))
        server.go_on.set()
        assert access.pending("Bearer nonsense") is access.pending("Bearer a.b.c") is None
        assert access.authenticate(f"Bearer {token()}").user == "alice"
        assert access.pending(f"Bearer {token()}") is None


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("what", [*DRIPPING, "nothing"])
def test_a_fetch_ends_at_its_deadline(what: str, scheme: str) -> None:
    with slow(*DRIPPING.get(what, (b"", b""))) as server:
        fetch = Fetch(server.url.replace("http", scheme, 1), most=1 << 20, seconds=0.3)
        with pytest.raises(FetchError, match="cannot be fetched"):
            fetch.done.result(DEADLINE)
        for thread in threading.enumerate():
            if thread.name == "ostinato-fetch":
                thread.join(DEADLINE)
                assert not thread.is_alive()


def test_a_full_pool_of_threads_keeps_nobody_out(access: Access) -> None:
    _, secret = access.keys.create("acme", "alice")
    end = threading.Event()

    async def ask() -> str:
        work: list[Coroutine[Any, Any, bool]] = [asyncio.to_thread(end.wait, DEADLINE) for _ in range(100)]
        busy = [asyncio.create_task(each) for each in work]
        await asyncio.sleep(0)
        async with asking(access) as client:
            found = (await client.get("/", headers=bearer(secret))).text
        assert not any(each.done() for each in busy)
        end.set()
        await asyncio.gather(*busy)
        return found

    assert asyncio.run(ask()) == "alice"
