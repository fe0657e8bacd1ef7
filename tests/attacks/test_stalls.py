"""Attacks that would hold up everybody: work of clients that leave, slow issuers, bodies that cost, floods.

Nothing here is timed. What an attacker has begun is held where it would do harm, and meanwhile the others are answered.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.access.tokens import Issuer
from ostinato.engine.scheduler import Work
from ostinato.server.limits import Limits
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, idle, serving, wait_until
from token_fixtures import AUDIENCE, ISSUER, token

Json = dict[str, Any]
SCHEMAS = "/v1/schemas"


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=32_768) as engine:
        yield engine


@dataclass
class Site:
    """A server with a user of one organisation, who asks, and one of another, who attacks."""

    engine: Engine
    access: Access
    url: str
    limits: Limits
    keys: dict[str, str]

    def headers(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[who]}"}

    def ask(self, who: str, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
        """A request that is answered, or the test fails."""
        prompt: Json = {} if path != COMPLETIONS else {"prompt": "How far does a tern fly?"}
        body = {"model": self.engine.model_name, "max_tokens": 4, "ignore_eos": True} | prompt | fields
        return httpx.post(self.url + path, json=body, headers=self.headers(who), timeout=DEADLINE)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=DEADLINE)

    def send(self, connection: socket.socket, who: str, path: str, body: Json) -> None:
        """Ask without waiting for the answer."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Authorization: Bearer {self.keys[who]}\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)

    def all_is_over(self) -> None:
        """Whatever anybody has begun has ended, and its places are given back."""
        wait_until(lambda: idle(self.engine))
        wait_until(lambda: self.limits.known == 0)


@contextmanager
def site_of(engine: Engine, limits: Limits | None = None, **options: Any) -> Generator[Site]:
    engine.clear_cache()
    limits = limits or Limits()
    with Access(":memory:") as access, serving(engine, access, limits=limits, **options) as url:
        keys = {
            user: access.keys.create(org, user)[1] for org, user in (("acme", "alice"), ("evil", "mallory"))
        }
        yield Site(engine, access, url, limits, keys)


@pytest.fixture
def site(engine: Engine) -> Iterator[Site]:
    with site_of(engine) as site:
        yield site
        site.all_is_over()


class Gate:
    """Holds the engine before each step until it is let on, and counts the steps."""

    def __init__(self, engine: Engine, patch: pytest.MonkeyPatch) -> None:
        self.steps = 0
        self._go_on = threading.Event()
        self._go_on.set()
        self.reached = threading.Event()
        schedule = engine.scheduler.schedule

        def watched() -> list[Work]:
            if not self._go_on.is_set():
                self.reached.set()
                assert self._go_on.wait(DEADLINE)
            self.steps += 1
            return schedule()

        patch.setattr(engine.scheduler, "schedule", watched)

    def close(self) -> None:
        self.reached.clear()
        self._go_on.clear()

    def open(self) -> None:
        self._go_on.set()


# -- clients that leave ------------------------------------------------------------------------------------


def schema(name: str, modules: int = 12) -> str:
    texts = "".join(
        f'<module name="m{number}">{name} module {number} says a little</module>' for number in range(modules)
    )
    return f'<schema name="{name}">{texts}</schema>'


def test_clients_that_have_schemas_encoded_and_leave(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their modules are computed no more, nothing is registered, and the threads are there for others."""
    gate = Gate(site.engine, monkeypatch)
    for attempt in range(3):
        gate.close()
        with ExitStack() as clients:
            for number in range(6):
                connection = clients.enter_context(site.connect())
                body = {"pml": schema(f"s{attempt}-{number}"), "encode": True}
                site.send(connection, "mallory", SCHEMAS, body)
            assert gate.reached.wait(DEADLINE)
            wait_until(lambda: site.limits.known == 1)
            # Nobody needs the engine's step to be let in, or one of the threads that they wait on.
            for path in ("/v1/models", SCHEMAS, "/v1/documents"):
                answer = httpx.get(site.url + path, headers=site.headers("alice"), timeout=DEADLINE)
                assert answer.status_code == 200
        # They have left.
        wait_until(lambda: site.limits.known == 0)
        gate.open()
        site.all_is_over()
        before = gate.steps
        assert site.ask("alice").status_code == 200
        assert gate.steps - before < 12, "nothing but the request was computed"
    listed = httpx.get(site.url + SCHEMAS, headers=site.headers("mallory"), timeout=DEADLINE).json()
    assert listed["data"] == []


LEAVING: list[tuple[str, Json]] = [
    (COMPLETIONS, {"prompt": "x" * 300, "max_tokens": 1_000, "n": 8}),
    (COMPLETIONS, {"prompt": "x" * 300, "max_tokens": 1_000, "stream": True}),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1_000, "n": 128}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1_000}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1_000, "stream": True}),
]


@pytest.mark.parametrize(("path", "fields"), LEAVING)
def test_whatever_a_client_has_begun_ends_when_it_leaves(
    site: Site, monkeypatch: pytest.MonkeyPatch, path: str, fields: Json
) -> None:
    gate = Gate(site.engine, monkeypatch)
    body = {"model": site.engine.model_name, "ignore_eos": True} | fields
    if path == "/v1/messages":
        del body["ignore_eos"]
    gate.close()
    with site.connect() as connection:
        site.send(connection, "mallory", path, body)
        assert gate.reached.wait(DEADLINE)
    wait_until(lambda: site.limits.known == 0)
    before = gate.steps
    gate.open()
    site.all_is_over()
    assert gate.steps - before < 40, "of a thousand tokens"
    assert site.ask("alice").status_code == 200


# -- issuers -----------------------------------------------------------------------------------------------


@contextmanager
def dripping(beginning: bytes, drop: bytes) -> Generator[tuple[str, threading.Event]]:
    """A key set that never comes whole; its address, and whether it was asked for."""
    asked, end = threading.Event(), threading.Event()

    def answer(line: socket.socket) -> None:
        with line, suppress(OSError):
            line.recv(65_536)
            line.sendall(beginning)
            asked.set()
            while not end.wait(0.01):
                line.sendall(drop)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/jwks.json", asked
        finally:
            end.set()


@pytest.mark.parametrize(
    ("beginning", "drop"),
    [(b"HTTP/1.1 200 OK\r\nX-Long: ", b"x"), (b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", b" ")],
)
def test_forged_tokens_of_an_issuer_whose_keys_drip(site: Site, beginning: bytes, drop: bytes) -> None:
    with dripping(beginning, drop) as (url, asked), ThreadPoolExecutor(6) as pool:
        site.access.issuers.add(Issuer(ISSUER, AUDIENCE, url))

        def forge(number: int) -> httpx.Response:
            headers = {"Authorization": f"Bearer {token(kid=f'no such key {number}')}"}
            return httpx.get(f"{site.url}/v1/models", headers=headers, timeout=DEADLINE)

        forged = [pool.submit(forge, number) for number in range(6)]
        assert asked.wait(DEADLINE)
        for _ in range(3):
            assert site.ask("alice").status_code == 200
        assert not any(each.done() for each in forged), "they still wait for their keys"
        assert {each.result().status_code for each in forged} == {401}


# -- bodies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("size", [200_000, 1_000_000])
def test_lists_of_what_is_wrong_are_answered_by_the_first(site: Site, path: str, size: int) -> None:
    content = b'{"model": "x", "max_tokens": 1, "messages": [' + b"1, " * (size // 3) + b"1]}"
    headers = site.headers("mallory") | {"Content-Type": "application/json"}
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(httpx.post, site.url + path, content=content, headers=headers, timeout=DEADLINE)
            for _ in range(4)
        ]
        assert site.ask("alice").status_code == 200
        for each in asked:
            answer = each.result()
            assert answer.status_code == 400
            assert len(answer.content) < 1_000, "one error, and not one for each"
            assert "messages[0]" in answer.json()["error"]["message"]


def test_a_chunked_body_that_overflows_in_its_last_message(site: Site) -> None:
    with site.connect() as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {site.keys['mallory']}\r\n"
        head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + b"100000\r\n" + b" " * 2**20 + b"\r\n")
        connection.sendall(b"1\r\n \r\n0\r\n\r\n")
        assert received(connection).startswith(b"HTTP/1.1 413 ")
    assert site.ask("alice").status_code == 200


def received(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65_536):
            data += piece
    return data


def test_half_open_connections(engine: Engine) -> None:
    """They are closed in their time, and meanwhile take nobody's place but their sender's."""
    with site_of(engine, headers_within=2.0, body_within=2.0) as site, ExitStack() as opened:
        begun = (
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {site.keys['mallory']}\r\n"
        ).encode()
        halves = (b"", begun, begun + b'Content-Length: 1000\r\n\r\n{"model": "')
        connections: list[tuple[bytes, socket.socket]] = []
        for number in range(99):
            connection = opened.enter_context(site.connect())
            connection.sendall(halves[number % 3])
            connections.append((halves[number % 3], connection))
        for _ in range(3):
            assert site.ask("alice").status_code == 200
        for half, connection in connections:
            last = received(connection)
            assert last.startswith(b"HTTP/1.1 408 ") if half is halves[2] else last == b""
        assert site.ask("alice").status_code == 200
        site.all_is_over()


# -- floods ------------------------------------------------------------------------------------------------


def test_a_neighbour_of_a_request_for_128_answers(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reply ends long before the 128, though it came after them."""
    gate = Gate(site.engine, monkeypatch)
    ended: list[str] = []

    def ask(who: str, **fields: Any) -> int:
        answer = site.ask(who, **fields)
        ended.append(who)
        return answer.status_code

    with ThreadPoolExecutor(2) as pool:
        gate.close()
        hog = pool.submit(ask, "mallory", prompt="y" * 200, n=128, max_tokens=120)
        assert gate.reached.wait(DEADLINE)
        neighbour = pool.submit(ask, "alice", max_tokens=16)
        wait_until(lambda: site.limits.known == 2)
        gate.open()
        assert (neighbour.result(), hog.result()) == (200, 200)
    assert ended == ["alice", "mallory"]


def test_a_neighbour_of_64_that_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is answered before most of another's that were there before it."""
    gate = Gate(site.engine, monkeypatch)
    ended: list[str] = []

    def ask(who: str, number: int) -> None:
        assert site.ask(who, prompt=f"{number} " * 30, max_tokens=60).status_code == 200
        ended.append(who)

    with ThreadPoolExecutor(65) as pool:
        gate.close()
        many = [pool.submit(ask, "mallory", number) for number in range(64)]
        assert gate.reached.wait(DEADLINE)
        wait_until(lambda: sum(map(site.limits.running, places(site, "evil", "mallory"))) == 64)
        one = pool.submit(ask, "alice", 64)
        wait_until(lambda: site.limits.known == 2)
        gate.open()
        for each in (*many, one):
            each.result()
    assert ended.index("alice") <= 8


def places(site: Site, org: str, name: str) -> list[Any]:
    """As what `Limits` knows a user."""
    principal = site.access.authenticate(f"Bearer {site.keys[name]}")
    assert principal.org == org
    return [principal.scope("user")]


def test_long_prompts_that_are_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(site.engine, monkeypatch)
    body: Json = {"model": site.engine.model_name, "max_tokens": 1}
    for attempt in range(3):
        gate.close()
        with ExitStack() as clients:
            for number in range(8):
                connection = clients.enter_context(site.connect())
                prompt = f"{attempt} {number} " + "word " * 80
                site.send(connection, "mallory", COMPLETIONS, body | {"prompt": prompt})
            assert gate.reached.wait(DEADLINE)
        wait_until(lambda: site.limits.known == 0)
        gate.open()
        assert site.ask("alice").status_code == 200
    site.all_is_over()


def test_over_its_limit_a_user_is_told_when_to_come_again(engine: Engine) -> None:
    with site_of(engine, Limits(requests=4)) as site, pytest.MonkeyPatch.context() as patch:
        gate = Gate(engine, patch)
        gate.close()
        with site.connect() as connection:
            body = {"model": engine.model_name, "prompt": "Hi", "max_tokens": 5, "n": 4}
            site.send(connection, "mallory", COMPLETIONS, body)
            assert gate.reached.wait(DEADLINE)
            for path in (COMPLETIONS, SCHEMAS, "/v1/forget", "/v1/documents"):
                refused = site.ask("mallory", path)
                assert refused.status_code == 429
                assert int(refused.headers["Retry-After"]) >= 1
            gate.open()
            assert site.ask("alice").status_code == 200
        site.all_is_over()
        assert site.ask("mallory").status_code == 200


def test_floods_of_forgetting_and_of_documents(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour is answered among them, and what it has cached stays."""
    gate = Gate(site.engine, monkeypatch)
    prompt = "The terns of the northern coast. " * 6
    site.ask("alice", prompt=prompt)

    def flood(number: int) -> set[int]:
        told: set[int] = set()
        for turn in range(10):
            made = post("/v1/documents", name=f"d{number}-{turn}", text="word " * 500)
            told.add(made.status_code)
            told.add(forget(document=made.json()["id"]))
            told.add(forget(session=f"s{turn}"))
            told.add(forget(user="mallory"))
        return told

    def post(path: str, **body: Any) -> httpx.Response:
        return httpx.post(site.url + path, json=body, headers=site.headers("mallory"), timeout=DEADLINE)

    def forget(**what: str) -> int:
        return post("/v1/forget", **what).status_code

    with ThreadPoolExecutor(4) as pool:
        flooding = [pool.submit(flood, number) for number in range(4)]
        for _ in range(5):
            usage = site.ask("alice", prompt=prompt).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
        # Documents of one that another of its clients forgets meanwhile are not found.
        assert set[int]().union(*(each.result() for each in flooding)) <= {200, 201, 404}
    assert gate.steps > 0
