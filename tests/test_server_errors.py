"""What the server refuses, and how: OpenAI's error shape for everything, and never a word of internals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import httpx
import openai
import pytest

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.engine.explain import MissReason
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, MODEL, serving


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with serving(engine) as url:
        yield url


USER = {"role": "user", "content": "Hi"}
BAD: list[tuple[str, dict[str, Any], int, str | None, str | None]] = [
    (CHAT, {"messages": []}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": "Hi"}, 400, "messages", "invalid_value"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content", None),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content", "invalid_value"),
    (CHAT, {"messages": [USER, {"role": "wizard", "content": ""}]}, 400, "messages[1].role", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        400,
        "messages[0].content[0].type",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]},
        400,
        "messages[0].tool_calls[0].function",
        "invalid_value",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "\ud800"}]},
        400,
        "messages[0].content",
        "invalid_value",
    ),
    (CHAT, {"model": "gpt-5", "messages": [USER]}, 404, "model", "model_not_found"),
    (CHAT, {"model": None, "messages": [USER]}, 400, "model", "invalid_value"),
    (CHAT, {"temperature": "hot", "messages": [USER]}, 400, "temperature", "invalid_value"),
    (CHAT, {"temperature": 3, "messages": [USER]}, 400, "temperature", None),
    (CHAT, {"temperature": True, "messages": [USER]}, 400, "temperature", "invalid_value"),
    (CHAT, {"max_tokens": 0, "messages": [USER]}, 400, "max_tokens", None),
    (CHAT, {"max_tokens": 1.5, "messages": [USER]}, 400, "max_tokens", "invalid_value"),
    (CHAT, {"max_tokens": 1, "max_completion_tokens": 1, "messages": [USER]}, 400, "max_tokens", None),
    (CHAT, {"top_p": 0, "messages": [USER]}, 400, "top_p", None),
    (CHAT, {"n": 0, "messages": [USER]}, 400, "n", "invalid_value"),
    (CHAT, {"n": 129, "messages": [USER]}, 400, "n", "invalid_value"),
    (CHAT, {"stop": ["x"] * 17, "messages": [USER]}, 400, "stop", "invalid_value"),
    (CHAT, {"stop": "", "messages": [USER]}, 400, "stop", "invalid_value"),
    (CHAT, {"top_logprobs": 2, "messages": [USER]}, 400, "top_logprobs", None),
    (CHAT, {"logprobs": True, "top_logprobs": 21, "messages": [USER]}, 400, "top_logprobs", "invalid_value"),
    (CHAT, {"logit_bias": {"word": 1}, "messages": [USER]}, 400, "logit_bias", None),
    (CHAT, {"logit_bias": {"999999999": 1}, "messages": [USER]}, 400, "logit_bias", None),
    (CHAT, {"logit_bias": {"1": 101}, "messages": [USER]}, 400, "logit_bias.1", "invalid_value"),
    (CHAT, {"stream_options": {"include_usage": True}, "messages": [USER]}, 400, "stream_options", None),
    (CHAT, {"stream": True, "temperature": -1, "messages": [USER]}, 400, "temperature", None),
    (CHAT, {"tools": [{"type": "function"}], "messages": [USER]}, 400, "tools[0].function", "invalid_value"),
    (CHAT, {"functions": [{}], "messages": [USER]}, 400, "functions", "unsupported_parameter"),
    (CHAT, {"tool_choice": "required", "messages": [USER]}, 400, "tool_choice", "invalid_value"),
    (CHAT, {"messages": [{"role": "tool", "content": "4"}]}, 400, "messages[0].tool_call_id", None),
    (
        CHAT,
        {"response_format": {"type": "xml"}, "messages": [USER]},
        400,
        "response_format.type",
        "invalid_value",
    ),
    (
        CHAT,
        {"response_format": {"type": "json_schema"}, "messages": [USER]},
        400,
        "response_format.json_schema",
        "invalid_value",
    ),
    (
        CHAT,
        {
            "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}},
            "messages": [USER],
        },
        400,
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    (CHAT, {"prompt_cache_retention": "soon", "messages": [USER]}, 400, "prompt_cache_retention", None),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "unsupported_parameter",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "word " * 9000}]},
        400,
        "messages",
        "context_length_exceeded",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "word " * 9000}], "stream": True},
        400,
        "messages",
        "context_length_exceeded",
    ),
    (CHAT, {"prompt_cache_key": "k" * 513, "messages": [USER]}, 400, "prompt_cache_key", "invalid_value"),
    (CHAT, {"prompt_cache_key": 7, "messages": [USER]}, 400, "prompt_cache_key", "invalid_value"),
    (CHAT, {"user": "u" * 513, "messages": [USER]}, 400, "user", "invalid_value"),
    (CHAT, {"user": "\ud800", "messages": [USER]}, 400, "user", "invalid_value"),
    (CHAT, {"metadata": {"session_id": 7}, "messages": [USER]}, 400, "metadata.session_id", "invalid_value"),
    (CHAT, {"metadata": "s", "messages": [USER]}, 400, "metadata", "invalid_value"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "Hm."}]}]},
        400,
        "messages[0].content",
        None,
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "content": [{"type": "reasoning"}]}, USER]},
        400,
        "messages[0].content[0].text",
        None,
    ),
    (CHAT, {"messages": [USER | {"reasoning": 5}]}, 400, "messages[0].reasoning", "invalid_value"),
    (COMPLETIONS, {"prompt": "a", "user": ["u"]}, 400, "user", "invalid_value"),
    (COMPLETIONS, {}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": 5}, 400, "prompt", "invalid_value"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": ["a", 1]}, 400, "prompt[1]", "invalid_value"),
    (COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt[1]", "invalid_value"),
    (COMPLETIONS, {"prompt": [1, 10**6]}, 400, "prompt", None),
    (COMPLETIONS, {"prompt": ["a"] * 200}, 400, "n", None),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, 400, "echo", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "a", "best_of": 3}, 400, "best_of", "unsupported_parameter"),
    (COMPLETIONS, {"prompt": "a", "suffix": "z"}, 400, "suffix", "unsupported_parameter"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "code"), BAD)
def test_bad_input(
    url: str, path: str, fields: dict[str, Any], status: int, param: str | None, code: str | None
) -> None:
    # Not httpx's json=, which cannot write half a surrogate pair.
    content = json.dumps({"model": MODEL, "max_tokens": 1} | fields)
    response = httpx.post(
        url + path, content=content, headers={"content-type": "application/json"}, timeout=DEADLINE
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (status, param, code), error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b"3", b"\xff", b'{"model": ' + b"9" * 5000 + b"}", b"[" * 99999]
)
def test_body_that_is_no_request(url: str, body: bytes) -> None:
    response = httpx.post(url + CHAT, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_body_that_is_not_json(url: str) -> None:
    response = httpx.post(url + CHAT, data={"model": MODEL})
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("declared", [True, False])
def test_large_body(url: str, declared: bool) -> None:
    body = json.dumps({"model": MODEL, "prompt": "x" * 10_000_000}).encode()
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    headers = {"content-type": "application/json"}
    response = httpx.post(
        url + COMPLETIONS, content=body if declared else pieces, headers=headers, timeout=DEADLINE
    )
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_unknown_url_and_method(url: str) -> None:
    response = httpx.get(f"{url}/v1/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
    response = httpx.get(url + CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_internal_error_shows_nothing(url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("secret detail")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "prepare", broken)
        for stream in (False, True):
            response = httpx.post(url + CHAT, json={"model": MODEL, "messages": [USER], "stream": stream})
            assert response.status_code == 500
            assert response.json()["error"]["type"] == "server_error"
            assert "secret" not in response.text
    fine = httpx.post(
        url + CHAT, json={"model": MODEL, "messages": [USER], "max_tokens": 1}, timeout=DEADLINE
    )
    assert fine.status_code == 200


def test_api_keys(engine: Engine) -> None:
    with Access(":memory:") as access, serving(engine, access) as url:
        assert httpx.get(f"{url}/v1/models").status_code == 200, "nobody has a key, so this machine may"
        for headers in ({"host": "rebound.example"}, {"origin": "https://evil.example"}, {"origin": "null"}):
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 403
        for origin in ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:8080"):
            assert httpx.get(f"{url}/v1/models", headers={"origin": origin}).status_code == 200
        keys = [access.keys.create("acme", user)[1] for user in ("ann", "bob")]
        assert httpx.get(f"{url}/health").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {keys[0]}"}):
            response = httpx.get(f"{url}/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
        for key in keys:
            assert openai.OpenAI(base_url=f"{url}/v1", api_key=key).models.list().data
            assert httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).status_code == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{url}/v1", api_key=keys[0][:-1] + "x").models.list()


def test_metrics_need_a_permission(engine: Engine) -> None:
    with Access(":memory:") as access, serving(engine, access) as url:
        open_to_all = httpx.get(f"{url}/metrics")
        assert open_to_all.status_code == 200, "nobody has a key, so this machine may"
        for reason in get_args(MissReason):
            assert f'ostinato_miss_tokens_total{{reason="{reason}"}}' in open_to_all.text
        keys = {
            permission: access.keys.create("acme", "ann", permissions=[permission] if permission else [])[1]
            for permission in ("", "publish:org", "admin:org", "metrics", "admin")
        }
        told = {
            permission: httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {key}"})
            for permission, key in keys.items()
        }
        refused = told["admin:org"].json()["error"]
        assert (refused["code"], refused["type"]) == ("metrics_not_permitted", "invalid_request_error")
        statuses = {permission: answer.status_code for permission, answer in told.items()}
        assert statuses == {"": 403, "publish:org": 403, "admin:org": 403, "metrics": 200, "admin": 200}
        assert httpx.get(f"{url}/metrics").status_code == 401
        access.audit.flush()
        rows = access.audit.read(action="refused", limit=100)
        assert len([row for row in rows if row.target == "metrics"]) == 3
