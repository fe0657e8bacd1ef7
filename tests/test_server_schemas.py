"""Schemas and prompts over them as clients use them: OpenAI's own client, and raw HTTP, against the real model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from ostinato import Engine
from ostinato.cli import app
from ostinato.prompt.pml import parse_schema
from ostinato.prompt.schema import Module, Parameter, Schema, Text, Union
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, MODEL, serving

TRAVEL = """
<schema name="NAME">
  <system>You plan trips for people who like to walk.</system>
  <module name="trip">
    The trip takes <parameter name="days" length="8" scaffold="some"/> days.
    <union scaffold="rome">
      <module name="rome">Rome has the Forum, the Pantheon, fountains, and cats among the ruins of temples.</module>
      <module name="paris">Paris has the Louvre, bridges over the Seine, and bakeries at every corner.</module>
    </union>
  </module>
  <module name="budget">The budget is small: walk, eat from the market, and sleep in a hostel.</module>
</schema>
"""
PROMPT = (
    '<prompt schema="NAME"><trip days="three"><paris/></trip><budget/><user>What shall I see?</user></prompt>'
)


def named(pml: str, name: str) -> str:
    return pml.replace("NAME", name)


@pytest.fixture(scope="module")
def url(exact_engine: Engine) -> Iterator[str]:
    with serving(exact_engine) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE) as client:
        yield client


def post(http: httpx.Client, pml: str | bytes, **options: Any) -> httpx.Response:
    return http.post("/v1/schemas", content=pml, headers={"content-type": "application/xml"}, **options)


def put(http: httpx.Client, name: str, pml: str, **options: Any) -> httpx.Response:
    headers = {"content-type": "application/xml"}
    return http.put(f"/v1/schemas/{name}", content=pml, headers=headers, **options)


def chat(client: openai.OpenAI, pml: Any, messages: Any = (), **fields: Any) -> Any:
    extra = {"pml": pml} | fields.pop("extra_body", {})
    fields = {"max_tokens": 8, "temperature": 0} | fields
    return client.chat.completions.create(model=MODEL, messages=list(messages), extra_body=extra, **fields)


def cached(reply: Any) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a response, which must have OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


def find(tree: dict[str, Any], name: str) -> dict[str, Any]:
    if tree["name"] == name:
        return tree
    return next((found for child in tree.get("children", ()) if (found := find(child, name))), {})


# -- schemas --------------------------------------------------------------------------------------------


def test_a_schema_from_registration_to_removal(http: httpx.Client) -> None:
    created = post(http, named(TRAVEL, "life"))
    assert created.status_code == 201
    schema = created.json()
    assert (schema["object"], schema["name"], schema["modules"]) == ("schema", "life", 4)
    assert schema["positions"] == schema["tree"]["end"]
    trip, rome, paris = (find(schema["tree"], name) for name in ("trip", "rome", "paris"))
    assert rome["start"] == paris["start"] > trip["start"]
    assert trip["end"] == max(rome["end"], paris["end"])
    assert find(schema["tree"], "days")["end"] - find(schema["tree"], "days")["start"] == 8

    clash = refused(post(http, named(TRAVEL, "life")), 409)
    assert clash["code"] == "schema_exists"
    assert "PUT /v1/schemas/life" in clash["message"]

    listed = {each["name"]: each for each in http.get("/v1/schemas").json()["data"]}
    assert listed["life"] == {key: schema[key] for key in schema if key != "tree"}

    same = put(http, "life", named(TRAVEL, "life"))
    assert (same.status_code, same.json()["version"]) == (200, schema["version"])
    other = put(http, "life", named(TRAVEL, "life").replace("small", "large"))
    assert (other.status_code, other.json()["version"] != schema["version"]) == (200, True)
    assert http.get("/v1/schemas/life").json()["version"] == other.json()["version"]

    assert http.delete("/v1/schemas/life").json() == {
        "object": "schema.deleted",
        "name": "life",
        "deleted": True,
    }
    assert refused(http.get("/v1/schemas/life"), 404)["code"] == "schema_not_found"
    assert refused(http.delete("/v1/schemas/life"), 404)["code"] == "schema_not_found"
    assert put(http, "life", named(TRAVEL, "life")).status_code == 201
    assert refused(put(http, "live", named(TRAVEL, "life")))["param"] == "name"


def test_json_says_the_same_as_pml(http: httpx.Client) -> None:
    pml = named(TRAVEL, "forms")
    versions = {post(http, pml).json()["version"]}
    for body in ({"pml": pml}, parse_schema(pml).to_json(), {"pml": pml, "encode": False}):
        versions.add(http.put("/v1/schemas/forms", json=body).json()["version"])
    assert len(versions) == 1


def test_encoding_and_what_is_cached(http: httpx.Client, client: openai.OpenAI, exact_engine: Engine) -> None:
    exact_engine.clear_cache()
    pml = named(TRAVEL, "eager")
    cold = post(http, pml).json()["tree"]
    tree = http.get("/v1/schemas/eager").json()["tree"]
    assert tree["cached_tokens"] == 0
    assert put(http, "eager", pml, params={"encode": True}).status_code == 200
    tree = http.get("/v1/schemas/eager").json()["tree"]
    assert tree["cached_tokens"] == tree["tokens"] == cold["tokens"]
    reply = chat(client, named(PROMPT, "eager"))
    modules = sum(find(tree, name)["tokens"] for name in ("paris", "budget"))
    assert cached(reply) > modules
    exact_engine.clear_cache()
    assert http.get("/v1/schemas/eager").json()["tree"]["cached_tokens"] == 0
    chat(client, named(PROMPT, "eager"))
    tree = http.get("/v1/schemas/eager").json()["tree"]
    assert find(tree, "paris")["cached_tokens"] == find(tree, "paris")["tokens"]
    assert find(tree, "rome")["cached_tokens"] == 0


def test_what_cannot_be_encoded_is_not_registered(http: httpx.Client, exact_engine: Engine) -> None:
    length = exact_engine.max_model_len
    text = " word" * (length - 8)
    assert len(exact_engine.tokenizer.encode(text)) == length - 8
    full = Schema("full", (Parameter("p", 8), Module("m", (Text(text),))))
    error = refused(http.post("/v1/schemas", json=full.to_json() | {"encode": True}))
    assert error["param"] == "encode"
    assert "full" not in exact_engine.schemas.names()


# -- prompts --------------------------------------------------------------------------------------------


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
    exact = exact_engine.encode(pml, mode="exact")
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


# -- bad input ------------------------------------------------------------------------------------------

MANY = 10_000
DEEP = "".join(f'<module name="m{i}">' for i in range(100)) + "</module>" * 100
BOMB = (
    '<!DOCTYPE s [<!ENTITY a "ha">'
    + "".join(f'<!ENTITY {chr(98 + i)} "{f"&{chr(97 + i)};" * 10}">' for i in range(9))
    + ']><schema name="bad">&j;</schema>'
)
BAD_SCHEMAS: dict[str, tuple[str | bytes, str]] = {
    "malformed": ('<schema name="bad">\n  <module name="a">text</schema>', "line 2, column 24"),
    "no schema": ("<prompt/>", "<schema"),
    "empty": ("", "empty"),
    "path, not text": ("/etc/passwd", "line 1"),
    "bare &": ('<schema name="bad">Tom & Jerry</schema>', "&amp;"),
    "bomb": (BOMB, "DOCTYPE"),
    "external": ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><schema name="bad"/>', "DOCTYPE"),
    "src": ('<schema name="bad"><module name="a" src="notes.txt"/></schema>', "put the text into the module"),
    "src escape": ('<schema name="bad"><module name="a" src="../../etc/passwd"/></schema>', "column 20"),
    "src absolute": ('<schema name="bad"><module name="a" src="/etc/passwd"/></schema>', "/etc/passwd"),
    "deep": (f'<schema name="bad">{DEEP}</schema>', "64 deep"),
    "twice": ('<schema name="bad"><module name="a"/><module name="a"/></schema>', "two modules 'a'"),
    "not UTF-8": ('<schema name="bad">caf\xe9</schema>'.encode("latin-1"), "line 1, column 23"),
    "too long": (f'<schema name="bad"><module name="long">{"word " * 9000}</module></schema>', "'long'"),
    "too many": (
        '<schema name="bad">' + "".join(f'<module name="m{i}"/>' for i in range(MANY + 1)) + "</schema>",
        "10,000 modules",
    ),
}


@pytest.mark.parametrize("case", BAD_SCHEMAS)
def test_bad_schemas(http: httpx.Client, exact_engine: Engine, case: str) -> None:
    pml, says = BAD_SCHEMAS[case]
    before = exact_engine.schemas.names()
    for send in (post, lambda http, pml: put(http, "bad", pml)):
        started = time.monotonic()
        assert says in refused(send(http, pml))["message"]
        assert time.monotonic() - started < DEADLINE / 4
    if isinstance(pml, str):
        assert says in refused(http.post("/v1/schemas", json={"pml": pml}))["message"]
    assert exact_engine.schemas.names() == before


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not valid JSON"),
        (b"[" * 99_999, "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "'name'"),
        (b'{"pml": 5}', "pml must be a string"),
        (b'{"pml": "<schema name=\\"bad\\"/>", "encode": 1}', "encode"),
        (b'{"pml": "<schema name=\\"bad\\"/>", "folder": "/"}', "folder"),
        (b'{"name": "bad", "children": ["\\ud800"]}', "surrogate"),
        (b'{"name": "bad", "children": [{"type": "module", "name": "a", "src": "/etc/passwd"}]}', "src"),
        (b'{"name": "bad", "children": [{"type": "modul", "name": "a"}]}', "schema.children[0]"),
        (b'{"name": "../bad"}', "../bad"),
        (
            json.dumps(
                Schema("bad").to_json()
                | {
                    "children": json.loads(
                        '[{"type":"module","name":"m","children":' * 100 + "[]" + "}]" * 100
                    )
                }
            ).encode(),
            "64 deep",
        ),
    ],
)
def test_bad_json(http: httpx.Client, exact_engine: Engine, body: bytes, says: str) -> None:
    response = http.post("/v1/schemas", content=body, headers={"content-type": "application/json"})
    assert says in refused(response)["message"]
    assert "bad" not in exact_engine.schemas.names()


def test_other_bad_requests(http: httpx.Client) -> None:
    assert refused(http.post("/v1/schemas", data={"name": "a"}), 415)
    assert refused(post(http, '<schema name="q"/>', params={"encode": "perhaps"}))["param"] == "encode"
    assert refused(http.get("/v1/schemas/a/b"), 404)["code"] == "unknown_url"
    assert refused(http.patch("/v1/schemas/a"), 405)


def test_10_000_modules(http: httpx.Client, client: openai.OpenAI) -> None:
    members = tuple(Module(f"m{i}", (Text(f"Fact {i}."),)) for i in range(MANY))
    started = time.monotonic()
    response = http.post("/v1/schemas", json=Schema("many", (Text("Facts: "), Union(members))).to_json())
    assert response.status_code == 201
    assert response.json()["modules"] == MANY
    chat(client, '<prompt schema="many"><m7777/></prompt>')
    tree = http.get("/v1/schemas/many").json()["tree"]
    assert find(tree, "m7777")["cached_tokens"] == find(tree, "m7777")["tokens"]
    assert time.monotonic() - started < DEADLINE / 2
    # One after another they do not fit the context, which is an error that comes as soon.
    too_long = Schema("long", (Text("Facts: "), *members))
    assert "context" in refused(http.post("/v1/schemas", json=too_long.to_json()))["message"]
    assert http.delete("/v1/schemas/many").status_code == 200


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


# -- at once --------------------------------------------------------------------------------------------


def test_register_replace_and_use_at_once(url: str) -> None:
    headers = {"content-type": "application/xml"}
    versions = [named(TRAVEL, "busy").replace("small", size) for size in ("small", "large", "fair")]
    body = {"model": MODEL, "pml": named(PROMPT, "busy"), "max_tokens": 2}

    async def run() -> tuple[list[int], list[int]]:
        async with httpx.AsyncClient(base_url=url, timeout=DEADLINE) as http:
            new = await asyncio.gather(
                *(http.post("/v1/schemas", content=versions[0], headers=headers) for _ in range(8))
            )
            calls: list[Any] = []
            for i in range(24):
                pml, encode = versions[i % 3], {"encode": i % 4 == 0}
                calls.append(http.post(CHAT, json=body))
                calls.append(http.put("/v1/schemas/busy", content=pml, headers=headers, params=encode))
                calls.append(http.get("/v1/schemas/busy"))
            done = await asyncio.gather(*calls)
            return [each.status_code for each in new], [each.status_code for each in done]

    new, done = asyncio.run(run())
    assert sorted(new) == [201] + [409] * 7
    assert set(done) == {200}


def test_the_command_line_shows_what_a_server_has_cached(
    url: str, http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pml = TRAVEL.replace("NAME", "shown")
    file = tmp_path / "shown.pml"
    file.write_text(pml)
    show = ["schema", "show", str(file), "--model", MODEL, "--server", url]
    refused_first = CliRunner().invoke(app, show)
    assert refused_first.exit_code == 1
    assert "cannot be read" in capsys.readouterr().err + refused_first.output
    assert put(http, "shown", pml, params={"encode": "true"}).status_code == 201
    shown = CliRunner().invoke(app, [*show, "--json"])
    assert shown.exit_code == 0, shown.output
    trip = next(child for child in json.loads(shown.stdout)["tree"]["children"] if child["name"] == "trip")
    assert trip["cached_tokens"] > 0
    assert " cached" in CliRunner().invoke(app, show).stdout
    file.write_text(pml.replace("cats", "dogs"))
    assert CliRunner().invoke(app, show).exit_code == 1  # another version
