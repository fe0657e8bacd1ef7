"""`cache_salt` and `end_user` over HTTP: what narrows the caller's own scopes, and never widens them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato import Engine
from ostinato.access.access import Access
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, serving

Json = dict[str, Any]

MESSAGES = "/v1/messages"
TEXT = "The merger with Hooli is signed on Friday at ten, and nobody else may know of it before. " * 2
LEAD = len("<|im_start|>user\n")
"""Tokens that the template writes before anything the request says: everybody's."""
ORG: Json = {"cache_control": {"type": "ephemeral", "scope": "org"}}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


@pytest.fixture
def people(tiny: Engine) -> Iterator[dict[str, httpx.Client]]:
    """Two applications of an organisation."""
    tiny.clear_cache()
    with Access(":memory:") as access, serving(tiny, access) as url:
        made = {
            user: httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE)
            for user in ("app", "other")
            for _, key in [access.keys.create("acme", user, permissions=("publish:org",))]
        }
        yield made
        for client in made.values():
            client.close()


def cached(
    client: httpx.Client, engine: Engine, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> int:
    """How much of what a prompt says was found cached."""
    said: Json = (
        {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    )
    body = {"model": engine.model_name, "max_tokens": 1, "temperature": 0} | said | fields
    answer = client.post(path, json=body, headers=headers or {})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == COMPLETIONS:
        return int(usage["prompt_tokens_details"]["cached_tokens"])
    found = (
        usage["cache_read_input_tokens"]
        if path == MESSAGES
        else usage["prompt_tokens_details"]["cached_tokens"]
    )
    return max(0, int(found) - LEAD)


def narrowed(how: str, **names: str) -> Json:
    """`end_user` and `cache_salt` in the fields of a body, or in headers."""
    if how == "body":
        return dict(names)
    headers = {"end_user": "X-End-User", "cache_salt": "X-Cache-Salt"}
    return {"headers": {headers[name]: value.encode() for name, value in names.items()}}


@pytest.mark.parametrize("how", ["body", "headers"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_end_users_behind_one_key(people: dict[str, httpx.Client], tiny: Engine, path: str, how: str) -> None:
    app = people["app"]
    ann, bob = (narrowed(how, end_user=name) for name in ("ann", "Bärbel"))
    assert [cached(app, tiny, path, **each) for each in (ann, bob)] == [0, 0]
    most = cached(app, tiny, path, **ann)
    assert most > 40
    assert cached(app, tiny, path, **bob) == most
    assert cached(app, tiny, path) == 0, "nor does the application itself find what its users sent"
    assert cached(app, tiny, path) == most
    assert cached(people["other"], tiny, path, **ann) == 0


@pytest.mark.parametrize("how", ["body", "headers"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_a_salt_isolates_what_an_organisation_shares(
    people: dict[str, httpx.Client], tiny: Engine, path: str, how: str
) -> None:
    app, other, salted = people["app"], people["other"], narrowed(how, cache_salt="s-1")
    assert cached(app, tiny, path, **ORG) == 0
    most = cached(other, tiny, path, **ORG)
    assert most > 40, "without a salt as before"
    assert cached(app, tiny, path, **ORG, **salted) == 0
    assert cached(app, tiny, path, **ORG, **salted) == most
    assert cached(app, tiny, path, **ORG, **narrowed(how, cache_salt="s-2")) == 0


def test_an_end_user_shares_what_the_organisation_does(people: dict[str, httpx.Client], tiny: Engine) -> None:
    assert cached(people["app"], tiny, CHAT, **ORG, end_user="ann") == 0
    assert cached(people["other"], tiny, CHAT, **ORG, end_user="bob") > 40


def test_the_same_salt_of_another_finds_nothing(people: dict[str, httpx.Client], tiny: Engine) -> None:
    assert cached(people["app"], tiny, CHAT, cache_salt="s") == 0
    assert cached(people["app"], tiny, CHAT, cache_salt="s") > 40
    assert cached(people["other"], tiny, CHAT, cache_salt="s") == 0


def test_the_body_is_believed_before_the_headers(people: dict[str, httpx.Client], tiny: Engine) -> None:
    app = people["app"]
    assert cached(app, tiny, CHAT, {"X-End-User": "bob"}, end_user="ann") == 0
    assert cached(app, tiny, CHAT, {"X-End-User": "ann"}) > 40
    assert cached(app, tiny, CHAT, {"X-End-User": "bob"}) == 0
    # The same name is the same in either place.
    assert cached(app, tiny, CHAT, end_user="Bärbel") == 0
    assert cached(app, tiny, CHAT, narrowed("headers", end_user="Bärbel")["headers"]) > 40


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, "/v1/messages/count_tokens"])
@pytest.mark.parametrize("name", ["cache_salt", "end_user"])
@pytest.mark.parametrize("value", ["", "x" * 513, 7, ["s"]])
def test_names_that_are_none(
    people: dict[str, httpx.Client], tiny: Engine, path: str, name: str, value: Any
) -> None:
    said: Json = (
        {"prompt": "Hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    body = {"model": tiny.model_name, "max_tokens": 1, name: value} | said
    answer = people["app"].post(path, json=body)
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


@pytest.mark.parametrize("header", ["X-Cache-Salt", "X-End-User"])
@pytest.mark.parametrize("value", [b"", b"x" * 513, b"\xff\xfe"])
def test_headers_that_are_no_names(
    people: dict[str, httpx.Client], tiny: Engine, header: str, value: bytes
) -> None:
    body = {"model": tiny.model_name, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    answer = people["app"].post(CHAT, json=body, headers={header.encode(): value})
    assert answer.status_code == 400
    assert header in answer.json()["error"]["message"]
