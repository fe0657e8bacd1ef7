"""What sharing saves, counted: one document, many users, a new question each time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from families import build
from ostinato import Engine, SamplingParams
from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.prompt.span import Span, plain
from server_fixtures import CHAT, DEADLINE, MODEL, serving

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
USERS = REQUESTS = 10


@pytest.mark.parametrize(("scope", "hits"), [("user", 900_000), ("org", 990_000)])
def test_ten_users_with_ten_questions_each(tmp_path: Path, scope: Any, hits: int) -> None:
    """10,000 tokens of a document, 500 of a question: 85.7 % in user scope, 94.3 % in one trusted scope."""
    build("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    sizes = {"max_position_embeddings": 10_512}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    document = Span(tuple(2 + i * i % 317 for i in range(10_000)), "document", scope)
    cached = prompt = 0
    with Engine(str(tmp_path), dtype="float32", kv_tokens=200_000, max_batch_tokens=2_048) as engine:
        for number in range(USERS * REQUESTS):
            who = Principal("acme", f"user-{number % USERS}", permissions=frozenset({"publish:org"}))
            # No two questions have a beginning in common.
            question = Span((2 + number, *(2 + (number * i) % 317 for i in range(499))), "user")
            usage = engine.generate(plain(document, question), ONE, principal=who).usage
            cached += usage.cached_tokens
            prompt += usage.prompt_tokens
    assert prompt == 1_050_000
    assert cached == hits


TEXT = " ".join(
    f"On day {day} the keeper counted {day * day % 89} terns and {day * 7 % 31} gulls." for day in range(60)
)


def test_the_same_on_the_server(engine: Engine) -> None:
    """A document that each user sends along is computed once a user; one registered for all, once."""

    def inline(_: httpx.Client) -> dict[str, Any]:
        return {"type": "text", "media_type": "text/plain", "data": TEXT}

    def registered(http: httpx.Client) -> dict[str, Any]:
        made = http.post("/v1/documents", json={"text": TEXT, "scope": "org"})
        assert made.status_code == 201
        return {"type": "file", "file_id": made.json()["id"]}

    hits = {source.__name__: document_hits(engine, source) for source in (inline, registered)}
    assert hits == {"inline": (90, 0), "registered": (99, 0)}


def document_hits(engine: Engine, source: Callable[[httpx.Client], dict[str, Any]]) -> tuple[int, int]:
    """How many requests found the whole document cached, and how many some of it."""
    engine.clear_cache()
    whole = some = 0
    with Access(":memory:") as access, serving(engine, access) as url:
        keys = [access.keys.create("acme", f"user-{i}", permissions=["publish:org"])[1] for i in range(USERS)]
        clients = [
            httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE)
            for key in keys
        ]
        document = {"type": "document", "source": source(clients[0])}
        for number in range(USERS * REQUESTS):
            question = {"type": "text", "text": f"What did the keeper count on day {number}?"}
            body = {"model": MODEL, "max_tokens": 1, "explain": True}
            messages = [{"role": "user", "content": [document, question]}]
            reply = clients[number % USERS].post(CHAT, json=body | {"messages": messages})
            assert reply.status_code == 200, reply.text
            told = reply.json()["ostinato"]["cache"]
            spans = [span for span in told["spans"] if span["kind"] == "document"]
            hit, tokens = (sum(span[name] for span in spans) for name in ("hit_tokens", "tokens"))
            assert tokens > 800
            whole += hit == tokens
            some += 0 < hit < tokens
        for client in clients:
            client.close()
    return whole, some
