"""Clients that begin to say something and do not go on: they hold nothing up, and not for ever."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.server.limits import Limits
from ostinato.server.listen import raise_open_files
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, serving

HALF_HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: app"
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 1000\r\n\r\n{"model": "'
)
WITHIN = 3.0


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return received


def resident() -> int:
    """MiB of this process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


def test_a_thousand_half_open_connections(tiny: Engine) -> None:
    raise_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 3_000
    limits = Limits(requests=1_000)
    asked = {"model": tiny.model_name, "prompt": "So", "max_tokens": 2}
    with (
        ExitStack() as opened,
        serving(tiny, limits=limits, headers_within=WITHIN, body_within=WITHIN) as url,
    ):

        def answered() -> bool:
            # On a connection of its own: one that has waited may just be about to be closed.
            return httpx.post(url + COMPLETIONS, json=asked, timeout=DEADLINE).status_code == 200

        assert answered()
        before = resident()
        halves: list[tuple[bytes, socket.socket]] = []
        for number in range(1_000):
            half = (b"", HALF_HEADERS, HALF_BODY)[number % 3]
            connection = opened.enter_context(connect(url))
            connection.sendall(half)
            halves.append((half, connection))
        for _ in range(5):
            assert answered()
        assert resident() - before < 100
        for half, connection in halves:
            last = rest(connection)
            if half == HALF_BODY:
                head, _, body = last.partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 408 ")
                assert b"connection: close" in head.lower()
                assert json.loads(body)["error"]["code"] == "request_timeout"
            else:
                assert last == b""
        assert answered()


def test_a_body_that_nobody_reads_has_its_time_too(tiny: Engine) -> None:
    with Access(":memory:") as access, serving(tiny, access, headers_within=0.5) as url, connect(url) as half:
        access.keys.create("acme", "ann")
        half.sendall(HALF_BODY)
        assert half.recv(65536).startswith(b"HTTP/1.1 401 ")
        half.sendall(b"x")  # uvicorn takes this for a sign of life, and waits on
        rest(half)


def test_an_answer_may_take_longer(tiny: Engine) -> None:
    asked = {
        "model": tiny.model_name,
        "max_tokens": 1_500,
        "ignore_eos": True,
        "stream": True,
        "temperature": 0,
    }
    with serving(tiny, headers_within=0.1, body_within=0.1) as url:
        answer = httpx.post(url + COMPLETIONS, json=asked | {"prompt": "So"}, timeout=DEADLINE)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_connections_are_kept_between_requests(tiny: Engine) -> None:
    with serving(tiny) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        streams = [http.get("/health").extensions["network_stream"] for _ in range(3)]
        assert len({stream.get_extra_info("client_addr") for stream in streams}) == 1


@pytest.mark.parametrize("path", [CHAT, "/v1/documents"])
def test_a_chunked_body_that_is_too_large_by_its_last_chunk(tiny: Engine, path: str) -> None:
    limit = 2**20 if path == CHAT else 8 * 2**20
    with serving(tiny) as url, connect(url) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n{limit:x}\r\n".encode()
            + b" " * limit
            + b"\r\n"
        )
        connection.sendall(b"1\r\n \r\n0\r\n\r\n")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert f"over the limit of {limit} bytes".encode() in answer
