"""What an attacker could make grow without end, and names that only look like this machine's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from access_fixtures import Clock
from ostinato import Engine, SamplingParams
from ostinato.access import audit, secrets
from ostinato.access.access import Access
from ostinato.access.grants import MAX_READERS
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope
from ostinato.cache.owned import Owned
from ostinato.engine import explain
from ostinato.prompt.span import Span, SpanKind, plain
from ostinato.server.cache import explanation_json
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, serving

ALICE, MALLORY = Principal("acme", "alice"), Principal("evil", "mallory")
ONE = SamplingParams(max_tokens=1, temperature=0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture
def access() -> Iterator[Access]:
    with Access(":memory:") as access:
        yield access


# -- readers ---------------------------------------------------------------------------------------------


def test_readers_of_a_document_and_of_a_schema(url: str) -> None:
    many = [f"user:u{number}" for number in range(300_000)]
    with httpx.Client(base_url=url, timeout=DEADLINE) as http:
        for readers in (many, many[: MAX_READERS + 1]):
            for path, body in (
                ("/v1/documents", {"text": "text"}),
                ("/v1/schemas", {"pml": '<schema name="s"><module name="m">text</module></schema>'}),
            ):
                refused = http.post(path, json=body | {"readers": readers})
                assert refused.status_code == 400
                assert len(refused.content) < 1_000
        made = http.post("/v1/documents", json={"text": "text", "readers": many[:MAX_READERS]})
        assert made.status_code == 201
        more = http.put(f"/v1/documents/{made.json()['id']}/readers", json={"readers": many})
        assert more.status_code == 400
        assert http.get("/v1/documents").status_code == 200


# -- secrets of what clients name ----------------------------------------------------------------------------


def test_sessions_salts_and_end_users_of_one(access: Access, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever names many loses its oldest, and nobody else's."""
    monkeypatch.setattr(secrets, "NAMED", 50)
    mine = Scope("session", "acme", "alice", "mine")
    kept = access.secrets.secret(mine)
    for number in range(200):
        access.secrets.secret(Scope("session", "evil", "mallory", f"s{number}"))
        access.secrets.secret(Scope("user", "evil", "mallory", salt=f"s{number}"))
        access.secrets.secret(Scope("user", "evil", "mallory", end_user=f"s{number}"))
    (count,) = access.state.row("SELECT count(*) FROM named_secrets WHERE user = 'mallory'")
    assert count <= 50
    assert access.secrets.secret(mine) == kept


def test_what_requests_name_leaves_no_rows_without_end(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "NAMED", 8)
    with Access(":memory:") as access:
        stored = engine._secrets  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(engine, "_secrets", access.secrets)
        monkeypatch.setattr(engine._intake, "_secrets", access.secrets)  # pyright: ignore[reportPrivateUsage]
        with serving(engine, access) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
            for number in range(40):
                names: dict[str, Any] = {"prompt_cache_key": f"s{number}", "cache_salt": f"c{number}"}
                body = {"model": engine.model_name, "prompt": "Hi", "max_tokens": 1} | names
                asked = http.post(COMPLETIONS, json=body | {"cache_control": {"scope": "session"}})
                assert asked.status_code == 200, asked.text
                assert http.post("/v1/forget", json={"session": f"other {number}"}).status_code == 200
        (count,) = access.state.row("SELECT count(*) FROM named_secrets")
        assert count <= 8
        assert stored is not access.secrets


# -- the audit log ---------------------------------------------------------------------------------------


def test_forgetting_nothing_is_no_row_each(engine: Engine) -> None:
    clock = Clock()
    with Access(":memory:", clock=clock) as access, serving(engine, access) as url:
        with httpx.Client(base_url=url, timeout=DEADLINE) as http:
            for number in range(60):
                assert http.post("/v1/forget", json={"session": f"none {number}"}).status_code == 200
                assert http.post("/v1/forget", json={"document": f"doc_{number:032}"}).status_code == 404
                assert http.get(f"/v1/requests/none-{number}/cache").status_code == 404
        rows = access.audit.read(limit=10_000)
        assert len(rows) <= 4 * audit.BURST
        access.audit.flush()
        told = access.audit.read(limit=10_000)[len(rows) :]
        assert sum(int(str(row.detail.get("repeated", 0))) for row in told) >= 100, "counted, not lost"


# -- explanations ----------------------------------------------------------------------------------------


def test_a_tenant_does_not_push_out_anothers_explanations(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    explainer = engine._explainer  # pyright: ignore[reportPrivateUsage]
    kept: Owned[Scope | None, str, explain.Explanation] = Owned(20)
    monkeypatch.setattr(explainer, "_kept", kept)
    for number in range(5):
        engine.generate(f"Hers {number}", ONE, principal=ALICE, request_id=f"hers-{number}")
    for number in range(100):
        engine.generate("His", ONE, principal=MALLORY, request_id=f"his-{number}")
    assert len(kept) <= 20
    assert all(engine.explain(f"hers-{number}", ALICE) for number in range(5))
    assert engine.explain("hers-0", MALLORY) is None
    assert engine.explain("his-99", MALLORY)
    assert engine.explain("his-0", MALLORY) is None


def test_explanations_are_kept_of_so_many_requests(engine: Engine) -> None:
    kept = engine._explainer._kept  # pyright: ignore[reportPrivateUsage]
    assert kept._room == explain.KEPT == 10_000  # pyright: ignore[reportPrivateUsage]


def test_an_explanation_is_small_however_many_parts_a_prompt_has(engine: Engine) -> None:
    """Its spans are told apart up to a number, and the rest as one."""
    engine.clear_cache()
    kinds: tuple[SpanKind, ...] = ("user", "assistant")
    prompt = plain(
        *(Span((5 + number % 200,), kinds[number % 2], ttl=9_000 - number) for number in range(400))
    )
    reply = engine.generate(prompt, ONE, principal=ALICE, request_id="many")
    told = engine.explain("many", ALICE)
    assert told is not None
    assert len(told.spans) <= explain.SPANS
    assert sum(span.tokens for span in told.spans) == reply.usage.prompt_tokens == told.prompt_tokens
    assert sum(span.hit_tokens for span in told.spans) == told.cached_tokens
    assert len(json.dumps(explanation_json(told))) < explain.SPANS * 600


# -- names ------------------------------------------------------------------------------------------------


def status(url: str, *lines: str) -> int:
    """What a server says to headers as they are, which a client's library would tidy."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as connection:
        connection.sendall(
            "\r\n".join(("GET /v1/models HTTP/1.1", *lines, "Connection: close", "", "")).encode()
        )
        received = b""
        while piece := connection.recv(65_536):
            received += piece
    return int(received.split(b" ", 2)[1])


HERE = "Host: localhost"


@pytest.mark.parametrize(
    "lines",
    [
        ["Host: [::1].evil.com"],
        ["Host: [::1]evil.com"],
        ["Host: localhost:80@evil.com"],
        ["Host: evil.com@localhost"],
        ["Host: localhost.evil.com"],
        ["Host: 127.0.0.1.evil.com"],
        ["Host: evil.com"],
        ["Host: evil.com:8000"],
        [HERE, "Origin: http://evil.com"],
        [HERE, "Origin: null"],
        [HERE, "Origin: http://localhost", "Origin: http://evil.com"],
        [HERE, "Origin: http://evil.com", "Origin: http://localhost"],
        [HERE, "Origin: http://[::1].evil.com"],
        [HERE, "Origin: http://localhost:80@evil.com"],
    ],
)
def test_names_that_are_not_this_machines(url: str, lines: list[str]) -> None:
    assert status(url, *lines) in (400, 403)


@pytest.mark.parametrize(
    "lines",
    [
        [HERE],
        ["Host: LOCALHOST:1"],
        ["Host: 127.0.0.1"],
        ["Host: [::1]:80"],
        [HERE, "Origin: http://localhost:3000"],
    ],
)
def test_names_that_are(url: str, lines: list[str]) -> None:
    assert status(url, *lines) == 200


def test_no_page_of_the_server_loads_anything_from_elsewhere(url: str) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        assert httpx.get(url + path, timeout=DEADLINE).status_code == 404
    described = httpx.get(f"{url}/openapi.json", timeout=DEADLINE)
    assert described.headers["content-type"] == "application/json"
    assert CHAT in described.json()["paths"]
