"""Schemas as clients use them: registered, replaced and removed, over raw HTTP, against the real model."""

from __future__ import annotations

import asyncio
import json
import time
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
from schema_fixtures import BOMB, PROMPT, TRAVEL, cached, chat, find, named, post, put, refused
from server_fixtures import CHAT, DEADLINE, MODEL


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


# -- bad input ------------------------------------------------------------------------------------------

MANY = 10_000
DEEP = "".join(f'<module name="m{i}">' for i in range(100)) + "</module>" * 100
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
    assert "refuses (404)" in capsys.readouterr().err + refused_first.output
    assert put(http, "shown", pml, params={"encode": "true"}).status_code == 201
    shown = CliRunner().invoke(app, [*show, "--json"])
    assert shown.exit_code == 0, shown.output
    trip = next(child for child in json.loads(shown.stdout)["tree"]["children"] if child["name"] == "trip")
    assert trip["cached_tokens"] > 0
    assert " cached" in CliRunner().invoke(app, show).stdout
    file.write_text(pml.replace("cats", "dogs"))
    assert CliRunner().invoke(app, show).exit_code == 1  # another version
