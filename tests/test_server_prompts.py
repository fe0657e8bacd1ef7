"""Prompts over schemas and documents as clients use them: OpenAI's own client, and raw HTTP, against the real model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from ostinato import Engine
from schema_fixtures import BOMB, PROMPT, TRAVEL, cached, chat, find, named, post, put, refused
from server_fixtures import CHAT, COMPLETIONS, MODEL


def test_modules_are_cached_whatever_stands_before_them(http: httpx.Client, client: openai.OpenAI) -> None:
    tree = post(http, named(TRAVEL, "order")).json()["tree"]
    chat(client, named(PROMPT, "order"))
    other = '<prompt schema="order"><trip><rome/></trip><budget/><user>And where do I sleep?</user></prompt>'
    reply = chat(client, other)
    assert cached(reply) >= find(tree, "budget")["tokens"]
    [choice] = reply.choices
    assert choice.message.content


def test_placements_are_reported(http: httpx.Client, client: openai.OpenAI) -> None:
    tree = post(http, named(TRAVEL, "places")).json()["tree"]
    pml = named(PROMPT, "places")
    whole = chat(client, pml).model_extra["ostinato"]["placements"]
    budget = next(each for each in whole if each["name"] == "budget")
    assert budget == {
        "kind": "module",
        "name": "budget",
        "start": find(tree, "budget")["start"],
        "end": find(tree, "budget")["end"],
        "place": "fixed",
        "cached": True,
    }
    assert whole[-1]["place"] == "end"
    for options in (None, {"include_usage": True}):
        *chunks, last = chat(client, pml, stream=True, stream_options=options, n=2)
        assert last.model_extra["ostinato"]["placements"] == whole
        assert not any("ostinato" in chunk.model_extra for chunk in chunks)
    plain = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    assert plain.model_extra == {} or "ostinato" not in plain.model_extra


def test_json_prompts_and_completions(http: httpx.Client, client: openai.OpenAI) -> None:
    post(http, named(TRAVEL, "asjson"))
    pml = named(PROMPT, "asjson")
    value = {
        "schema": "asjson",
        "items": [
            {
                "type": "import",
                "name": "trip",
                "arguments": {"days": "three"},
                "items": [{"type": "import", "name": "paris"}],
            },
            {"type": "import", "name": "budget"},
            {"type": "turn", "role": "user", "text": "What shall I see?"},
        ],
    }
    said = chat(client, pml).choices[0].message.content
    assert chat(client, value).choices[0].message.content == said
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    for prompt in (None, ""):
        reply = client.completions.create(prompt=prompt, extra_body={"pml": value}, **fields)  # type: ignore[arg-type]
        assert reply.choices[0].text == said
    bare = {"model": MODEL, "pml": pml, "max_tokens": 8, "temperature": 0}
    assert http.post(COMPLETIONS, json=bare).json()["choices"][0]["text"] == said
    assert http.post(CHAT, json=bare).json()["choices"][0]["message"]["content"] == said


def test_the_text_of_prompt_ends_the_prompt(http: httpx.Client, client: openai.OpenAI) -> None:
    http.post(
        "/v1/schemas", json={"name": "notes", "children": ["The notes: ", {"type": "module", "name": "n"}]}
    )
    text = client.completions.create(
        model=MODEL,
        prompt="One, two, three,",
        max_tokens=4,
        temperature=0,
        extra_body={"pml": '<prompt schema="notes"/>'},
    )
    plain = client.completions.create(
        model=MODEL, prompt="The notes: One, two, three,", max_tokens=4, temperature=0
    )
    assert text.choices[0].text == plain.choices[0].text


def test_a_conversation_goes_on_from_the_cache(http: httpx.Client, client: openai.OpenAI) -> None:
    post(http, named(TRAVEL, "talk"))
    pml = '<prompt schema="talk"><trip days="two"/><budget/></prompt>'
    first = [{"role": "user", "content": "What shall I see first?"}]
    reply = chat(client, pml, first)
    assert reply.usage.completion_tokens == 8
    second = [
        *first,
        {"role": "assistant", "content": reply.choices[0].message.content},
        {"role": "user", "content": [{"type": "text", "text": "And then?"}]},
    ]
    longer = chat(client, pml, second)
    assert cached(longer) >= reply.usage.prompt_tokens
    whole = pml.replace("</prompt>", f"<user>{first[0]['content']}</user></prompt>")
    assert chat(client, whole).choices[0].message.content == reply.choices[0].message.content


def test_modes(http: httpx.Client, client: openai.OpenAI, exact_engine: Engine) -> None:
    post(http, named(TRAVEL, "modes"))
    pml = named(PROMPT, "modes")
    chat(client, pml)
    by_mode = {
        mode: chat(client, pml, extra_body={"reuse_mode": mode, "link_tokens": 4})
        for mode in ("exact", "modular", "linked")
    }
    assert cached(by_mode["exact"]) < cached(by_mode["linked"])
    exact_engine.register(named(TRAVEL, "modes"))
    exact = exact_engine.encode(pml, mode="exact")
    exact_engine.unregister("modes")
    assert by_mode["exact"].usage.prompt_tokens == len(exact.token_ids)
    for fields in ({"reuse_mode": "fast"}, {"link_tokens": 0}):
        response = http.post(CHAT, json={"model": MODEL, "pml": pml} | fields)
        assert refused(response)["param"] == next(iter(fields))


def test_text_that_looks_like_pml_is_text(client: openai.OpenAI, exact_engine: Engine) -> None:
    text = named(PROMPT, "nothing-registered")
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    reply = client.completions.create(prompt=text, **fields)
    assert reply.usage
    assert reply.usage.prompt_tokens == len(exact_engine.tokenizer.encode(text))
    both = client.completions.create(prompt=[text, text], **fields)
    assert both.usage
    assert both.usage.prompt_tokens == 2 * reply.usage.prompt_tokens
    echoed = client.completions.create(prompt=text, echo=True, **fields)
    assert echoed.choices[0].text.startswith(text)
    message = client.chat.completions.create(messages=[{"role": "user", "content": text}], **fields)
    assert message.usage
    assert message.usage.prompt_tokens > reply.usage.prompt_tokens


DOCUMENTS = {
    "moths": "Moths fly to lamps because they keep the brightest light above them, as they do with the moon.",
    "tides": "Tides follow the moon: the sea bulges towards it, and on the far side of the earth too.",
}


def document(name: str, **fields: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": DOCUMENTS[name]}
    return {"type": "document", "source": source, "title": name} | fields


def test_documents_in_any_order(http: httpx.Client, exact_engine: Engine) -> None:
    def ask(*names: str, question: str = "Why?") -> Any:
        content = [*map(document, names), {"type": "text", "text": question}]
        messages = [{"role": "user", "content": content}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 2, "temperature": 0}
        response = http.post(CHAT, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    tokens = sum(len(exact_engine.tokenizer.encode(text)) for text in DOCUMENTS.values())
    ask("moths", "tides")
    reply = ask("tides", "moths", question="What else?")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens
    placed = [each for each in reply["ostinato"]["placements"] if each["kind"] == "module"]
    assert len(placed) == 2


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "document"}, "messages[0].content[0].source"),
        (
            {"type": "document", "source": {"type": "base64", "data": ""}},
            "messages[0].content[0].source.type",
        ),
        (document("moths", citations={"enabled": True}), "messages[0].content.citations"),
        (document("moths", title="\ud800"), "messages[0].content[0].title"),
    ],
)
def test_documents_that_cannot_be_read(http: httpx.Client, part: Any, param: str) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": [part]}]})
    response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert refused(response)["param"] == param


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "malformed": ('<prompt schema="good"><trip></prompt>', "<trip>"),
    "a schema": ('<schema name="good"/>', "<prompt"),
    "plain text": ("Hello", "<prompt"),
    "no such schema": ('<prompt schema="god"/>', "'good'"),
    "no such module": ('<prompt schema="good"><bugdet/></prompt>', "'budget'"),
    "two of a union": ('<prompt schema="good"><trip><rome/><paris/></trip></prompt>', "'paris'"),
    "long argument": (
        '<prompt schema="good"><trip days="one two three four five six seven eight nine"/></prompt>',
        "'days'",
    ),
    "bomb": (BOMB, "DOCTYPE"),
    "surrogate": ({"schema": "good", "items": ["\ud800"]}, "surrogate"),
    "JSON": ({"schema": "good", "items": [{"type": "import"}]}, "prompt.items[0]"),
    "too long": (f'<prompt schema="good">{"word " * 9000}</prompt>', "tokens"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompts(http: httpx.Client, path: str, case: str) -> None:
    pml, says = BAD_PROMPTS[case]
    put(http, "good", named(TRAVEL, "good"))
    for stream in (False, True):
        body = json.dumps({"model": MODEL, "pml": pml, "stream": stream, "max_tokens": 1})
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        error = refused(response)
        assert says in error["message"]
        if case != "surrogate":
            assert error["param"] == "pml"


def test_fields_that_do_not_go_with_pml(http: httpx.Client) -> None:
    put(http, "good", named(TRAVEL, "good"))
    pml = '<prompt schema="good"/>'
    for path, fields, param in (
        (COMPLETIONS, {"prompt": ["a", "b"]}, "pml"),
        (COMPLETIONS, {"prompt": [1, 2]}, "pml"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "name": "Ann"}]}, "messages[0].name"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"pml": 5}, "pml"),
    ):
        response = http.post(path, json={"model": MODEL, "pml": pml, "max_tokens": 1} | fields)
        assert refused(response)["param"] == param
