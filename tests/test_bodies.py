"""Bodies made to be expensive: refused at the first fault, within bounds, and away from the event loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from ostinato import Engine
from ostinato.server import bodies
from ostinato.server.anthropic import MessagesRequest
from ostinato.server.app import create_app
from ostinato.server.bodies import AT_ONCE, NESTED, BodyRoute, parsed_json
from ostinato.server.openai import ChatCompletionRequest, CompletionRequest
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, serving

Json = dict[str, Any]

MESSAGES = "/v1/messages"
MANY = 50_000
USER: Json = {"role": "user", "content": "Hi"}
MODELS: dict[str, type[BaseModel]] = {
    CHAT: ChatCompletionRequest,
    COMPLETIONS: CompletionRequest,
    MESSAGES: MessagesRequest,
}


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(tiny: Engine) -> Iterator[str]:
    with serving(tiny) as url:
        yield url


COSTLY: list[tuple[str, Json, str]] = [
    (CHAT, {"messages": [1] * MANY}, "messages[0]"),
    (CHAT, {"messages": [{}] * MANY}, "messages[0].role"),
    (CHAT, {"messages": [USER] * 5_000}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages[0].content[0]"),
    (CHAT, {"messages": [USER | {"tool_calls": [{}] * MANY}]}, "messages[0].tool_calls[0].id"),
    (CHAT, {"messages": [USER], "tools": [1] * MANY}, "tools[0]"),
    (CHAT, {"messages": [USER], "stop": [1] * MANY}, "stop[0]"),
    (CHAT, {"messages": [USER], "stop": ["a"] * MANY}, "stop"),
    (CHAT, {"messages": [USER], "stop_token_ids": ["a"] * MANY}, "stop_token_ids[0]"),
    (CHAT, {"messages": [USER], "logit_bias": {str(key): "a" for key in range(MANY)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": [1] * MANY + ["a"]}, "prompt[0]"),
    (COMPLETIONS, {"prompt": ["a"] * MANY}, "prompt"),
    (COMPLETIONS, {"prompt": [[1]] * MANY}, "prompt"),
    (COMPLETIONS, {"prompt": [["a"] * MANY]}, "prompt[0][0]"),
    (COMPLETIONS, {"prompt": [{}] * MANY}, "prompt[0]"),
    (MESSAGES, {"messages": [1] * MANY}, "messages[0]"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{}] * MANY}]}, "messages[0].content[0].type"),
    (MESSAGES, {"messages": [USER], "system": [1] * MANY}, "system[0]"),
    (MESSAGES, {"messages": [USER], "tools": [{}] * MANY}, "tools[0].name"),
    (MESSAGES, {"messages": [USER], "stop_sequences": [1] * MANY}, "stop_sequences[0]"),
]


@pytest.mark.parametrize(("path", "fields", "at"), COSTLY)
def test_the_first_fault_is_enough(url: str, path: str, fields: Json, at: str) -> None:
    body = {"model": "tiny", "max_tokens": 1} | fields
    with pytest.raises(ValidationError) as caught:
        MODELS[path].model_validate(body)
    # One for each form that a field may have.
    assert caught.value.error_count() <= 4
    answer = httpx.post(url + path, json=body, timeout=DEADLINE)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{at}: ")
    assert len(error["message"]) < 300


def lists(schema: object) -> Iterator[Mapping[str, Any]]:
    """The lists in a pydantic core schema."""
    if isinstance(schema, Mapping):
        found = cast("Mapping[str, Any]", schema)
        if found.get("type") == "list":
            yield found
        for each in found.values():
            yield from lists(each)
    elif isinstance(schema, Sequence) and not isinstance(schema, str | bytes):
        for each in cast("Sequence[object]", schema):
            yield from lists(each)


def routes(engine: Engine) -> list[APIRoute]:
    """All that a server has."""
    found: list[APIRoute] = []
    waiting: list[Any] = [create_app(engine).router]
    while waiting:
        router = waiting.pop()
        for each in router.routes:
            if isinstance(each, APIRoute):
                found.append(each)
            elif hasattr(each, "original_router"):  # FastAPI keeps those that are included whole
                waiting.append(each.original_router)
    return found


def test_no_list_of_any_body_is_looked_through_for_faults(tiny: Engine) -> None:
    checked = 0
    for route in routes(tiny):
        if route.body_field is None:
            continue
        model = cast("type[BaseModel]", route.body_field.field_info.annotation)
        for found in lists(model.__pydantic_core_schema__):
            checked += 1
            assert found.get("fail_fast"), (route.path, found.get("items_schema"))
            assert found.get("max_length"), (route.path, found.get("items_schema"))
    assert checked > 20


def test_every_route_reads_its_body_so(tiny: Engine) -> None:
    found = routes(tiny)
    assert len(found) > 15
    assert [route.path for route in found if not isinstance(route, BodyRoute)] == []


def test_long_bodies_are_parsed_on_a_thread(url: str, tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def watched(data: bytes, model: type[BaseModel]) -> BaseModel:
        threads.append(threading.current_thread().name)
        return parse(data, model)

    parse = bodies.parsed
    monkeypatch.setattr(bodies, "parsed", watched)
    body = {"model": tiny.model_name, "messages": [USER], "max_tokens": 1}
    for pad in (0, AT_ONCE):
        answer = httpx.post(url + CHAT, json=body | {"pad": "x" * pad}, timeout=DEADLINE)
        assert answer.status_code == 200
    assert [name.startswith("ostinato-worker") for name in threads] == [False, True]


DEEP = 400_000


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, "/v1/messages/count_tokens"])
@pytest.mark.parametrize(
    "deep",
    [
        "[" * DEEP + "]" * DEEP,
        '{"a":' * (DEEP // 4) + "1" + "}" * (DEEP // 4),
        "[" * DEEP,
        "[" * (NESTED + 1) + "]" * (NESTED + 1),
    ],
)
def test_deep_bodies(url: str, path: str, deep: str) -> None:
    body = f'{{"model": "tiny", "max_tokens": 1, "messages": [{{"role": "user", "content": "Hi"}}], "pad": {deep}}}'
    answer = httpx.post(
        url + path, content=body, headers={"content-type": "application/json"}, timeout=DEADLINE
    )
    assert answer.status_code == 400
    assert "nested too deep" in answer.json()["error"]["message"]


def test_what_is_nested_within_bounds_is_read() -> None:
    deep = "[" * NESTED + "1" + "]" * NESTED
    assert json.dumps(parsed_json(deep.encode())) == deep


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"{", "Expecting property name"),
        (b"\xff", "UTF-8"),
        (b'{"model": ' + b"9" * 5_000 + b"}", "too many digits"),
        (b"[" * 99_999, "nested too deep"),
    ],
)
def test_what_is_no_json_is_told_why(url: str, data: bytes, says: str) -> None:
    answer = httpx.post(url + CHAT, content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "limit"), [(CHAT, 2**20), (COMPLETIONS, 2**20), ("/v1/forget", 2**20), ("/v1/documents", 2**23)]
)
def test_limits_of_bodies(url: str, path: str, limit: int) -> None:
    headers = {"content-type": "application/json"}
    over = httpx.post(url + path, content=b" " * (limit + 1), headers=headers, timeout=DEADLINE)
    assert over.status_code == 413
    within = httpx.post(url + path, content=b" " * limit, headers=headers, timeout=DEADLINE)
    assert within.status_code == 400


def test_no_page_loads_scripts_from_elsewhere(url: str) -> None:
    assert [httpx.get(url + path).status_code for path in ("/docs", "/redoc")] == [404, 404]
    described = httpx.get(f"{url}/openapi.json").json()
    body = described["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    assert "messages" in described["components"]["schemas"]["ChatCompletionRequest"]["properties"]
