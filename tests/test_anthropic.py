"""Anthropic's API as its own client uses it, against the real server and model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from ostinato import Engine
from ostinato.access.access import Access
from server_fixtures import CHAT, DEADLINE, MODEL, idle, serving, wait_until

MESSAGES = "/v1/messages"
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}
QUESTION: list[Any] = [
    {"role": "user", "content": "Name the three primary colours, and say one thing about each."}
]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Rome for the next 3 days?"}]


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client


def create(client: anthropic.Anthropic, messages: Any = QUESTION, **fields: Any) -> Any:
    return client.messages.create(model=MODEL, messages=messages, **(GREEDY | {"max_tokens": 12} | fields))


def test_plain(claude: anthropic.Anthropic, client: Any) -> None:
    reply = create(claude, system="Be brief.")
    same = [{"role": "system", "content": "Be brief."}, *QUESTION]
    told = client.chat.completions.create(model=MODEL, messages=same, max_tokens=12, temperature=0)
    [block] = reply.content
    assert (block.type, block.text) == ("text", told.choices[0].message.content)
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert reply.id.startswith("msg_")
    assert (reply.stop_reason, reply.stop_sequence) == ("max_tokens", None)
    assert reply.usage.output_tokens == 12
    assert reply._request_id.startswith("req_")
    blocks = create(claude, system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}])
    assert blocks.content[0].text == block.text


def test_stops(claude: anthropic.Anthropic) -> None:
    text = create(claude).content[0].text
    word = text.split()[4]
    reply = create(claude, stop_sequences=["@@@", word])
    assert reply.content[0].text == text[: text.index(word)]
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)
    with claude.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=12, stop_sequences=[word], **GREEDY
    ) as stream:
        assert stream.get_final_message().stop_sequence == word
    ended = create(claude, [{"role": "user", "content": "Say hi."}], max_tokens=200)
    assert ended.stop_reason == "end_turn"


def test_stream_says_the_same(claude: anthropic.Anthropic, url: str) -> None:
    whole = create(claude)
    kinds: list[str] = []
    with claude.messages.stream(model=MODEL, messages=QUESTION, max_tokens=12, **GREEDY) as stream:
        text = ""
        for event in stream:
            kinds.append(event.type)
            text += event.text if event.type == "text" else ""
        last = stream.get_final_message()
    assert text == last.content[0].text == whole.content[0].text
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    body = {"model": MODEL, "messages": QUESTION, "max_tokens": 3, "temperature": 0, "stream": True}
    response = httpx.post(url + MESSAGES, json=body, timeout=DEADLINE)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["request-id"].startswith("req_")
    events = [each.split("\n") for each in response.text[:-2].split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name for name, _ in events] == [f"event: {each['type']}" for each in data]
    order = [each["type"] for each in data]
    assert order[:3] == ["message_start", "ping", "content_block_start"]
    assert order[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(order[3:-3]) == {"content_block_delta"}


def test_usage_tells_reads_from_creations(claude: anthropic.Anthropic) -> None:
    text = "The lighthouse of Alexandria was eighty metres high, and burned wood that came by sea. " * 6
    control = {"type": "ephemeral"}

    def ask(question: str, *, marked: bool = True, **fields: Any) -> Any:
        block = {"type": "text", "text": text} | ({"cache_control": control} if marked else {})
        messages = [{"role": "user", "content": [block, {"type": "text", "text": question}]}]
        return create(claude, messages, max_tokens=2, **fields).usage

    def total(usage: Any) -> int:
        return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens

    first = ask("Of what was it made?")
    length = claude.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": text + "Of what was it made?"}]
    ).input_tokens
    assert total(first) == length
    assert first.cache_creation_input_tokens > 100
    assert first.cache_creation.ephemeral_5m_input_tokens == first.cache_creation_input_tokens
    assert 0 < first.input_tokens < 30
    second = ask("And how high was it really?")
    assert second.cache_creation_input_tokens == 0
    assert second.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert 0 < second.input_tokens < 30
    # What is not asked for is cached and read all the same, and nothing counts as created.
    other = ask("Who asked?" * 20, marked=False)
    assert other.cache_creation_input_tokens == 0
    assert other.input_tokens > 40
    everything = ask(
        "Who has not asked?" * 20, marked=False, cache_control={"type": "ephemeral", "ttl": "1h"}
    )
    assert everything.input_tokens == 0
    assert everything.cache_creation_input_tokens > 40
    assert everything.cache_creation.ephemeral_1h_input_tokens == everything.cache_creation_input_tokens
    with claude.messages.stream(model=MODEL, max_tokens=2, messages=QUESTION, **GREEDY) as stream:
        events = list(stream)
    begun = next(each for each in events if each.type == "message_start").message.usage
    done = next(each for each in events if each.type == "message_delta").usage
    assert (begun.input_tokens, begun.cache_read_input_tokens) == (
        done.input_tokens,
        done.cache_read_input_tokens,
    )


def test_breakpoints_on_system_and_tools(claude: anthropic.Anthropic) -> None:
    system = [{"type": "text", "text": "You know all lighthouses of the coast. " * 8}]
    marked = [system[0] | {"cache_control": {"type": "ephemeral"}}]
    usage = create(claude, system=marked, max_tokens=1).usage
    tokens = claude.messages.count_tokens(model=MODEL, messages=QUESTION, system=system).input_tokens
    assert usage.cache_creation_input_tokens + usage.cache_read_input_tokens < tokens
    assert usage.cache_creation_input_tokens > 60
    tools = [WEATHER | {"name": f"weather{i}"} for i in range(3)]
    tools[-1] |= {"cache_control": {"type": "ephemeral"}}
    reply = create(claude, tools=tools, max_tokens=1)
    assert reply.usage.cache_creation_input_tokens > 150
    assert reply.usage.input_tokens > 5


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_tools(claude: anthropic.Anthropic, choice: Any) -> None:
    fields: dict[str, Any] = {
        "tools": [WEATHER],
        "tool_choice": choice | {"disable_parallel_tool_use": True},
        "max_tokens": 80,
    }
    reply = create(claude, ASK, **fields)
    [use] = reply.content
    assert reply.stop_reason == "tool_use"
    assert (use.type, use.name) == ("tool_use", "weather")
    assert use.id.startswith("toolu_")
    jsonschema.validate(use.input, WEATHER["input_schema"])
    with claude.messages.stream(model=MODEL, messages=ASK, **GREEDY, **fields) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message()
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == streamed.content[0].input == use.input
    assert streamed.stop_reason == "tool_use"


def test_tool_results_go_back(claude: anthropic.Anthropic, client: Any) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 3}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Hail and 12 degrees"}
    thought = {"type": "thinking", "thinking": "I should look.", "signature": "x"}
    messages = [
        *ASK,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "So, what is it?"}]},
    ]
    reply = create(claude, messages, tools=[WEATHER], max_tokens=24)
    function = {"name": "weather", "arguments": json.dumps(use["input"])}
    parameters = {"description": WEATHER["description"], "parameters": WEATHER["input_schema"]}
    same = client.chat.completions.create(
        model=MODEL,
        messages=[
            *ASK,
            {
                "role": "assistant",
                "content": "Let me look.",
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "Hail and 12 degrees"},
            {"role": "user", "content": "So, what is it?"},
        ],
        tools=[{"type": "function", "function": {"name": "weather", **parameters}}],
        max_tokens=24,
        temperature=0,
    )
    assert reply.content[0].text == same.choices[0].message.content
    details = same.usage.prompt_tokens_details
    assert details.cached_tokens == same.usage.prompt_tokens - 1, "the two prompts are not the same"
    failed = create(claude, [*messages[:2], {"role": "user", "content": [result | {"is_error": True}]}])
    assert failed.usage.output_tokens


def test_a_prompt_is_cached_without_an_answer(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Who counted the steps of the lighthouse, and when? " * 4}
    ]
    reply = create(claude, messages, max_tokens=0)
    assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "max_tokens", 0)
    again = create(claude, messages, max_tokens=1)
    assert again.usage.input_tokens == 1
    with claude.messages.stream(model=MODEL, messages=messages, max_tokens=0, **GREEDY) as stream:
        assert stream.get_final_message().content == []


def test_documents(claude: anthropic.Anthropic) -> None:
    moths = "Moths fly to lamps because they keep the brightest light above them, as they do with the moon."
    tides = "Tides follow the moon: the sea bulges towards it, and on the far side of the earth too."

    def document(text: str, title: str) -> Any:
        source = {"type": "text", "media_type": "text/plain", "data": text}
        return {"type": "document", "source": source, "title": title, "cache_control": {"type": "ephemeral"}}

    def ask(*documents: Any, **fields: Any) -> Any:
        content = [*documents, {"type": "text", "text": "Why do they do it?"}]
        return create(claude, [{"role": "user", "content": content}], max_tokens=4, **fields)

    first = ask(document(moths, "moths"), document(tides, "tides"))
    assert first.usage.cache_creation_input_tokens > 20
    second = ask(document(tides, "tides"), document(moths, "moths"))
    assert second.usage.cache_read_input_tokens >= 40
    assert second.model_extra["ostinato"]["placements"]
    with_tools = ask(
        document(moths, "moths"), tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}
    )
    assert with_tools.usage.output_tokens == 4
    with pytest.raises(anthropic.NotFoundError, match="file_1"):
        ask({"type": "document", "source": {"type": "file", "file_id": "file_1"}})


def test_output_format(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "why": {"type": "string", "maxLength": 30}},
        "required": ["colour", "why"],
        "additionalProperties": False,
    }
    reply = create(claude, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=80)
    assert reply.stop_reason == "end_turn"
    jsonschema.validate(json.loads(reply.content[0].text), schema)


def test_slots_come_back(claude: anthropic.Anthropic, exact_engine: Engine) -> None:
    with claude.messages.stream(model=MODEL, messages=QUESTION, max_tokens=2000, **GREEDY) as stream:
        next(iter(stream))
    wait_until(lambda: idle(exact_engine))


USER = {"role": "user", "content": "Hi"}
BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"model": "claude"}, 404, "not_found_error", "claude"),
    ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, 400, "invalid_request_error", "thinking"),
    ({"mcp_servers": [{}]}, 400, "invalid_request_error", "mcp_servers"),
    (
        {"messages": [USER, {"role": "assistant", "content": "I"}]},
        400,
        "invalid_request_error",
        "messages[1]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        400,
        "invalid_request_error",
        "messages[0].content[0].type",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
            ]
        },
        400,
        "invalid_request_error",
        "messages[0].content[0]",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "x", "cache_control": {"scope": "all"}}],
                }
            ]
        },
        400,
        "invalid_request_error",
        "messages[0].content[0].cache_control.scope",
    ),
    (
        {"cache_control": {"type": "ephemeral", "ttl": "soon"}},
        400,
        "invalid_request_error",
        "cache_control.ttl",
    ),
    ({"system": [{"type": "text", "text": "\ud800"}]}, 400, "invalid_request_error", "system[0].text"),
    ({"tools": [WEATHER, WEATHER]}, 400, "invalid_request_error", "'weather' twice"),
    ({"tools": [{"name": "bad name", "input_schema": {}}]}, 400, "invalid_request_error", "tools[0].name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "invalid_request_error", "tools[0]"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}},
        400,
        "invalid_request_error",
        "'other'",
    ),
    (
        {
            "tools": [{"name": "f", "input_schema": {"type": "foo"}, "strict": True}],
        },
        400,
        "invalid_request_error",
        "tools[0].input_schema",
    ),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        400,
        "invalid_request_error",
        "output_config.format.schema",
    ),
    ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "invalid_request_error", "tokens"),
]


@pytest.mark.parametrize(("fields", "status", "kind", "says"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input(url: str, fields: dict[str, Any], status: int, kind: str, says: str, stream: bool) -> None:
    body = json.dumps({"model": MODEL, "max_tokens": 1, "messages": [USER], "stream": stream} | fields)
    response = httpx.post(
        url + MESSAGES, content=body, headers={"content-type": "application/json"}, timeout=DEADLINE
    )
    error = response.json()
    assert set(error) == {"type", "error", "request_id"}
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind), error
    assert says in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]


def test_other_errors(url: str, engine: Engine) -> None:
    for response, status, kind in (
        (httpx.get(url + MESSAGES), 405, "invalid_request_error"),
        (httpx.post(f"{url}{MESSAGES}/nothing"), 404, "not_found_error"),
        (httpx.post(url + MESSAGES, content=b"x" * 9_000_000), 413, "request_too_large"),
    ):
        assert response.status_code == status
        assert response.json()["error"]["type"] == kind
    assert httpx.get(url + CHAT).json()["error"]["code"] == "method_not_allowed"
    with Access(":memory:") as access, serving(engine, access) as guarded:
        key = access.keys.create("acme", "ann")[1]
        with pytest.raises(anthropic.AuthenticationError):
            create(anthropic.Anthropic(base_url=guarded, api_key="wrong", max_retries=0))
        assert create(anthropic.Anthropic(base_url=guarded, api_key=key, max_retries=0)).content


def test_engine_closes_under_a_stream() -> None:
    with Engine(MODEL, kv_tokens=4096) as engine, serving(engine) as url:
        client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=DEADLINE)
        with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=3000, **GREEDY) as stream:
            events = iter(stream)
            next(events)
            engine.close()
            with pytest.raises(anthropic.APIStatusError, match=r"shutting down|closed"):
                list(events)
