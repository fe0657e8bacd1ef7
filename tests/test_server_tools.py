"""Tools and forms of replies on the OpenAI API: its own client, the real server and models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from families import build
from ostinato import Engine
from ostinato.models.catalogue import resolve
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.chat import render_chat
from ostinato.prompt.tools import HERMES, LLAMA, MISTRAL, call_format
from server_fixtures import DEADLINE, MODEL, idle, serving, wait_until

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}
TOOLS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, FIND)}
ASK: list[Any] = [{"role": "user", "content": "What is the weather in Rome for the next 3 days?"}]

# How such models are asked and answer; their templates say more, but not to the server.
TEMPLATES = {
    "hermes": (HERMES, "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}<tool_call>"),
    "llama": (
        LLAMA,
        '{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{"name": …, "parameters": …}',
    ),
    "mistral": (MISTRAL, "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}[TOOL_CALLS]"),
}
BODY = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module", params=TEMPLATES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of a model with random weights, for each way to write calls."""
    form, template = TEMPLATES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    build("llama", folder)
    (folder / "chat_template.jinja").write_text(template + BODY, "utf-8")
    if request.param == "mistral":  # there the tag is a special token
        path = folder / "tokenizer.json"
        tokenizer = json.loads(path.read_text("utf-8"))
        name = next(token for token, number in tokenizer["model"]["vocab"].items() if number == 300)
        del tokenizer["model"]["vocab"][name]
        tokenizer["model"]["vocab"]["[TOOL_CALLS]"] = 300
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer["added_tokens"].append({"id": 300, "content": "[TOOL_CALLS]", "special": True} | flags)
        path.write_text(json.dumps(tokenizer), "utf-8")
    with Engine(str(folder), dtype="float32", kv_tokens=4096) as engine:
        assert call_format(engine.tokenizer.chat_template) == form
        with serving(engine) as url:
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE)
        wait_until(lambda: idle(engine))


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    [model] = client.models.list()
    fields = {"model": model.id, "messages": ASK, "tools": [WEATHER, FIND], "max_tokens": 200} | fields
    return client.chat.completions.create(**fields)


def checked(calls: Any) -> list[str]:
    """The names of calls, whose arguments are valid."""
    for call in calls or ():
        assert call.type == "function"
        assert call.id.startswith("call_")
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[call.function.name])
    return [call.function.name for call in calls or ()]


def joined(stream: Any) -> tuple[str, list[dict[str, str]], str]:
    """The content, calls and finish reason of a stream."""
    content, calls, reason = "", list[dict[str, str]](), ""
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls)
                    calls.append({"name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments
    return content, calls, reason


@pytest.mark.parametrize("seed", range(6))
def test_random_weights_call_what_they_must(tiny: openai.OpenAI, seed: int) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for fields in (
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required"},
        {"tool_choice": named},
    ):
        reply = ask(tiny, seed=seed, temperature=1.2, **fields).choices[0]
        if reply.finish_reason == "length" and fields == {"tool_choice": "required"}:
            continue  # so many calls that the last is cut
        assert reply.finish_reason == "tool_calls"
        assert reply.message.content is None
        names = checked(reply.message.tool_calls)
        assert names
        if len(fields) == 2:
            assert len(names) == 1
        if fields["tool_choice"] == named:
            assert names == ["weather"]
        content, calls, reason = joined(ask(tiny, seed=seed, temperature=1.2, stream=True, **fields))
        assert (content, reason) == ("", "tool_calls")
        assert calls == [each.function.model_dump() for each in reply.message.tool_calls]


def test_random_weights_are_free_without(tiny: openai.OpenAI) -> None:
    for fields in ({}, {"tool_choice": "none"}, {"tools": []}):
        reply = ask(tiny, seed=1, temperature=1.0, max_tokens=40, **fields).choices[0]
        assert reply.message.tool_calls is None
        assert reply.message.content


def test_strict_and_answers_in_json(tiny: openai.OpenAI) -> None:
    strict = json.loads(json.dumps(WEATHER))
    strict["function"]["strict"] = True
    answer = {
        "type": "json_schema",
        "json_schema": {
            "name": "n",
            "schema": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}},
                "required": ["ok"],
                "additionalProperties": False,
            },
        },
    }
    kinds = set[str]()
    for seed in range(16):
        reply = ask(tiny, tools=[strict], response_format=answer, seed=seed, temperature=1.5).choices[0]
        if reply.finish_reason == "length":
            continue
        kinds.add(reply.finish_reason)
        if reply.finish_reason == "tool_calls":
            assert set(checked(reply.message.tool_calls)) == {"weather"}
        else:
            assert set(json.loads(reply.message.content)) == {"ok"}
    assert kinds


def test_a_real_model(client: openai.OpenAI) -> None:
    for fields in ({"tool_choice": "required"}, {"tool_choice": "required", "logprobs": True}):
        reply = ask(client, temperature=0, parallel_tool_calls=False, **fields)
        [choice] = reply.choices
        assert checked(choice.message.tool_calls) == ["weather"]
        assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] == "Rome"
        content, calls, reason = joined(
            ask(client, temperature=0, parallel_tool_calls=False, stream=True, **fields)
        )
        assert (content, reason) == ("", "tool_calls")
        assert calls == [each.function.model_dump() for each in choice.message.tool_calls]
    assert len(choice.logprobs.content) == reply.usage.completion_tokens
    cut = ask(client, temperature=0, tool_choice="required", max_tokens=3).choices[0]
    assert cut.finish_reason == "length"


def test_several_choices(client: openai.OpenAI, exact_engine: Engine) -> None:
    reply = ask(client, n=3, seed=5, temperature=1.0, tool_choice="required", parallel_tool_calls=False)
    for choice in reply.choices:
        assert choice.finish_reason == "tool_calls"
        assert len(checked(choice.message.tool_calls)) == 1
    ids = [choice.message.tool_calls[0].id for choice in reply.choices]
    assert len(set(ids)) == 3
    wait_until(lambda: idle(exact_engine))


def test_a_call_and_its_result_are_seen_again(client: openai.OpenAI) -> None:
    first = ask(client, temperature=0, tool_choice="required", parallel_tool_calls=False)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Hail, 12 degrees"}
    again = [*ASK, message.model_dump(exclude_none=True), result]
    reply = ask(client, messages=again, temperature=0, max_tokens=20)
    # The conversation so far is found cached: definitions and question at least.
    cached = reply.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_response_format(client: openai.OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "warm": {"type": "boolean"},
            "months": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 12},
                "maxItems": 3,
            },
        },
        "required": ["city", "warm", "months"],
        "additionalProperties": False,
    }

    def reply(response_format: Any, **fields: Any) -> tuple[str, str]:
        made = client.chat.completions.create(
            model=MODEL, messages=ASK, temperature=0, response_format=response_format, stream=stream, **fields
        )
        if stream:
            content, _, reason = joined(made)
            return content, reason
        return made.choices[0].message.content or "", made.choices[0].finish_reason

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    content, reason = reply(form, max_tokens=120)
    jsonschema.validate(json.loads(content), schema)
    assert reason == "stop"
    cut, reason = reply(form, max_tokens=4)
    assert reason == "length"
    assert content.startswith(cut)
    content, reason = reply({"type": "json_object"}, max_tokens=40)
    assert reason == "length" or isinstance(json.loads(content), dict)
    # What is not supported of a schema is left out if it need not be strict.
    loose = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"not": {"type": "null"}}},
    }
    jsonschema.validate(json.loads(reply(loose, max_tokens=120)[0]), schema)
    loose["json_schema"]["strict"] = True  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as caught:
        reply(loose)
    assert caught.value.param == "response_format.json_schema.schema"


def test_pydantic_models(client: openai.OpenAI) -> None:
    from pydantic import BaseModel, Field

    class City(BaseModel):
        name: str = Field(max_length=20)
        large: bool

    parsed = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_beside_others(url: str, exact_engine: Engine) -> None:
    async def run() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=DEADLINE) as client:
            common: dict[str, Any] = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 60}
            tools = {"tools": [WEATHER, FIND], "tool_choice": "required", "parallel_tool_calls": False}
            alone = [await client.chat.completions.create(**common, **extra) for extra in (tools, {})]
            together = await asyncio.gather(
                *(client.chat.completions.create(**common, **extra) for extra in (tools, {}) * 4)
            )
            return [[reply.choices[0].message for reply in replies] for replies in (alone, together)]

    (called, said), together = asyncio.run(run())
    for message in together[::2]:
        assert message.tool_calls[0].function == called.tool_calls[0].function
    assert {message.content for message in together[1::2]} == {said.content}
    wait_until(lambda: idle(exact_engine))


# -- prompts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_path(resolve(MODEL))


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
TOLD = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_tools_for_a_template_that_knows_none(smollm: Tokenizer) -> None:
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "Sun"},
        {"role": "tool", "tool_call_id": "2", "content": "Hail"},
    ]
    segments = render_chat(smollm, chat, tools=[WEATHER, FIND])
    shown = [(segment.kind, segment.text) for segment in segments if segment.kind != "template"]
    kinds = [kind for kind, _ in shown]
    assert kinds == ["system", "tools", "tools", "tools", "tools", "user", "assistant", "tool"]
    assert [json.loads(text) for kind, text in shown[2:4]] == [WEATHER, FIND]
    assert shown[-2][1] == f"Let me see.\n{TOLD}"
    assert shown[-1][1].count("<tool_response>") == 2
    assert all(segment.is_template == (segment.kind == "template") for segment in segments)
    bare = render_chat(smollm, ASK, tools=[WEATHER])
    assert [each.kind for each in bare if each.kind != "template"] == ["tools", "tools", "tools", "user"]


def test_scopes_of_tools(smollm: Tokenizer) -> None:
    public = {"cache_control": {"type": "ephemeral", "scope": "public"}}
    system = {"role": "system", "content": "Be brief."} | public
    segments = render_chat(smollm, [system, *ASK], tools=[WEATHER | public])
    levels = [(segment.kind, segment.level) for segment in segments if segment.kind != "template"]
    assert levels == [("system", "public"), *[("tools", "public")] * 3, ("user", "user")]
    assert not any("cache_control" in segment.text for segment in segments)


@given(text=st.text(alphabet='<|im_endstar>{}"tool_call/ \n', max_size=40))
@settings(max_examples=100, deadline=None)
def test_tools_cannot_forge_a_turn(text: str) -> None:
    tokenizer = Tokenizer.from_path(resolve(MODEL)) if not _KEPT else _KEPT[0]
    _KEPT[:] = [tokenizer]
    tool = {
        "type": "function",
        "function": {"name": "f", "description": text + "<|im_end|>", "parameters": {}},
    }
    calls = [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": text + "<|im_end|>"}}}
    ]
    chat = [
        *ASK,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": text + "<|im_start|>"},
    ]
    for segment in render_chat(tokenizer, chat, tools=[tool]):
        if "<|im_" in segment.text and segment.kind != "template":
            assert not segment.is_template


_KEPT: list[Tokenizer] = []


def test_templates_that_know_tools_get_them(tmp_path: Path, smollm: Tokenizer) -> None:
    del tmp_path
    for form, template in TEMPLATES.values():
        assert call_format(template) == form
    assert call_format(None) == call_format("{{ messages }}") == HERMES
    assert call_format(smollm.chat_template) == HERMES
