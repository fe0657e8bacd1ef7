"""Attacks on the server over HTTP: what another tenant says it is, guesses, forges or injects, and what comes of it."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.access.tokens import Issuer
from ostinato.cli import app
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, serving

Json = dict[str, Any]

MESSAGES = "/v1/messages"
ISSUER, AUDIENCE = "https://login.acme.com", "ostinato"
PROMPT = "The merger with Hooli is signed on Friday at ten, and nobody else may know of it before."
TEXT = "Umbrella pays nineteen million for the laboratory, and the chief leaves in March."
"""Of a document; only its readers ever send it."""
LEAD = len("<|im_start|>user\n")
"""Tokens that the template writes before anything the request says: everybody's."""
DOCUMENT_LEAD = len("<|im_start|>system\n")
"""The same, around documents."""
ABSENT = "doc_" + "0" * 32


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=16_384) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny(small: Engine) -> Engine:
    return small


@dataclass
class Site:
    """A server with two organisations, and what was sent to it and came back."""

    engine: Engine
    access: Access
    url: str
    clients: dict[str, httpx.Client] = field(default_factory=dict[str, httpx.Client])
    keys: dict[str, str] = field(default_factory=dict[str, str])
    ids: dict[str, str] = field(default_factory=dict[str, str])
    answers: list[httpx.Response] = field(default_factory=list[httpx.Response])
    """What the other organisation was answered."""

    def join(self, org: str, user: str, *permissions: str) -> None:
        info, key = self.access.keys.create(org, user, permissions=permissions)
        self.keys[user], self.ids[user] = key, info.id
        self.clients[user] = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {key}"}, timeout=DEADLINE
        )
        if org == "evil":
            self.clients[user].event_hooks = {"response": [self.answers.append]}

    def refusals(self, kind: str) -> list[tuple[str | None, str | None, str]]:
        """Who was refused, and what it wanted."""
        self.access.audit.flush()
        rows = self.access.audit.read(action="refused", limit=1_000)
        return [(row.actor_org, row.actor_user, row.target) for row in rows if row.detail["kind"] == kind]


@contextmanager
def site_of(engine: Engine) -> Generator[Site]:
    engine.clear_cache()
    with Access(":memory:") as access, serving(engine, access) as url:
        made = Site(engine, access, url)
        made.join("acme", "alice", "publish:org")
        made.join("acme", "bob")
        made.join("evil", "mallory", "publish:org", "admin:org")
        yield made
        for client in made.clients.values():
            client.close()


@pytest.fixture
def site(tiny: Engine, caplog: pytest.LogCaptureFixture) -> Iterator[Site]:
    """A site; whatever a test does to it, nothing secret is in the audit log, the logs or the attacker's answers."""
    caplog.set_level(logging.DEBUG)
    with site_of(tiny) as site:
        yield site
        site.access.audit.flush()
        rows = repr(site.access.audit.read(limit=10_000))
        logs = "\n".join(record.getMessage() for record in caplog.get_records("call"))
        for secret in (*site.keys.values(), PROMPT[:30], TEXT[:30]):
            assert secret not in rows
            assert secret not in logs
        for answer in site.answers:
            told = answer.text + repr(answer.headers.multi_items())
            for theirs in ("Umbrella", site.keys["alice"], site.ids["alice"], "acme/alice"):
                assert theirs not in told


def body_of(path: str, engine: Engine, prompt: str = PROMPT, **fields: Any) -> Json:
    """A request of any of the APIs that asks the same."""
    said: Json = (
        {"prompt": prompt} if path == COMPLETIONS else {"messages": [{"role": "user", "content": prompt}]}
    )
    return {"model": engine.model_name, "max_tokens": 1, "temperature": 0} | said | fields


def hits(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def ask(site: Site, who: str, path: str = CHAT, headers: Json | None = None, **fields: Any) -> httpx.Response:
    body = body_of(path, site.engine, **fields)
    return site.clients[who].post(path, json=body, headers=headers or {})


def document(file_id: str) -> Json:
    return {"type": "document", "source": {"type": "file", "file_id": file_id}}


def about(file_id: str) -> list[Json]:
    return [{"role": "user", "content": [document(file_id), {"type": "text", "text": "When?"}]}]


# -- claims ----------------------------------------------------------------------------------------------

CLAIMS: dict[str, tuple[Json, dict[str, str]]] = {
    "nothing": ({}, {}),
    "salt": ({"cache_salt": "acme-salt"}, {}),
    "user": ({"user": "alice"}, {}),
    "session": ({"metadata": {"session_id": "s-1", "user_id": "s-1"}}, {}),
    "cache key": ({"prompt_cache_key": "s-1"}, {}),
    "organisation": ({"org": "acme", "organization": "acme", "user_id": "alice", "tenant": "acme"}, {}),
    "principal": ({"principal": {"org": "acme", "user": "alice"}, "scope": "public"}, {}),
    "headers": (
        {},
        {
            "X-Org": "acme",
            "X-User": "alice",
            "X-User-Id": "alice",
            "X-Forwarded-User": "alice",
            "X-Session-Id": "s-1",
            "X-Cache-Salt": "acme-salt",
            "OpenAI-Organization": "acme",
            "OpenAI-Project": "acme",
            "anthropic-workspace-id": "acme",
            "Forwarded": "for=127.0.0.1;host=localhost",
        },
    ),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES])
def test_no_claim_finds_what_another_has_computed(site: Site, path: str) -> None:
    """Neither in its user scope nor in the scope of a session, whatever the attacker and a colleague say they are."""
    salted = {"cache_salt": "acme-salt", "user": "alice"} if path != MESSAGES else {"cache_salt": "acme-salt"}
    named = {"metadata": {"user_id": "s-1"}} if path == MESSAGES else {"prompt_cache_key": "s-1"}
    ask(site, "alice", path, **salted)
    ask(site, "alice", path, **named, cache_control={"type": "ephemeral", "scope": "session"})
    lead = 0 if path == COMPLETIONS else LEAD
    for who in ("mallory", "bob"):
        for number, (name, (fields, headers)) in enumerate(CLAIMS.items()):
            for scope in ("user", "session"):
                # An ending of its own for each: what an attempt finds of the attempts before it is the prober's own.
                own = f"{PROMPT} {name} {scope}"
                fresh = {"cache_control": {"scope": scope, "ttl": 0}}
                if scope == "session" and not names_a_session(path, fields):
                    continue
                answer = ask(site, who, path, headers, prompt=own, explain=True, **fields, **fresh)
                assert hits(answer) <= lead, (who, name, number)
                told = answer.json().get("ostinato", {}).get("cache", {"spans": []})
                for span in told["spans"]:
                    assert "alice" not in span["scope"]
                    assert "cached" not in (span.get("miss") or {})
                    assert span["hit_tokens"] == 0 or span["scope"] == "public"
    assert hits(ask(site, "alice", path, **salted)) >= len(PROMPT) - 1


def names_a_session(path: str, fields: Json) -> bool:
    if path == MESSAGES:
        return "user_id" in fields.get("metadata", {})
    return bool({"prompt_cache_key", "user", "metadata"} & set(fields))


def test_a_document_sent_along_is_its_senders(site: Site) -> None:
    """The same text, sent by another, is computed anew."""
    part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": PROMPT}}
    said = [{"role": "user", "content": [part, {"type": "text", "text": "When?"}]}]
    for path in (CHAT, MESSAGES):
        ask(site, "alice", path, messages=said)
        assert hits(ask(site, "alice", path, messages=said)) > len(PROMPT)
        for who in ("mallory", "bob"):
            assert hits(ask(site, who, path, messages=said, cache_control={"ttl": 0})) <= DOCUMENT_LEAD


def test_the_length_of_anothers_documents_is_not_told(site: Site) -> None:
    """What the template writes behind documents stands where they end, for those alone who may read them."""

    def said(text: str) -> list[Json]:
        part = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": text}}
        return [{"role": "user", "content": [part, {"type": "text", "text": "When?"}]}]

    ask(site, "alice", messages=said("a" * 50))
    for who in ("mallory", "bob"):
        found = {
            hits(ask(site, who, messages=said("b" * n), cache_control={"ttl": 0})) for n in range(48, 53)
        }
        assert len(found) == 1


# -- credentials -----------------------------------------------------------------------------------------


@cache
def private_key(name: str) -> ec.EllipticCurvePrivateKey:
    del name
    return ec.generate_private_key(ec.SECP256R1())


def token(signer: str = "ours", algorithm: str = "ES256", **changed: Any) -> str:
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "org": "acme", "exp": now + 600, "iat": now}
    key: Any = private_key(signer)
    if algorithm == "none":
        key = None
    if algorithm == "HS256":
        key = jwks("ours")["keys"][0]["x"]  # what is public, used as if it were a shared secret
    return jwt.encode(claims | changed, key, algorithm, {"kid": "ours"})


def jwks(name: str) -> Json:
    key: Json = jwt.algorithms.ECAlgorithm.to_jwk(private_key(name).public_key(), as_dict=True)
    return {"keys": [key | {"kid": name, "alg": "ES256", "use": "sig"}]}


FORGED = {
    "another key": lambda: token("theirs"),
    "expired": lambda: token(exp=int(time.time()) - 3600),
    "no algorithm": lambda: token(algorithm="none"),
    "the public key as a secret": lambda: token(algorithm="HS256"),
    "another audience": lambda: token(aud="elsewhere"),
    "another issuer": lambda: token(iss="https://login.evil.com"),
    "cut off": lambda: token().rpartition(".")[0] + ".",
    "changed": lambda: token()[:-6] + "AAAAAA",
    "an unknown key": lambda: "ost_" + "0" * 16 + "_" + "0" * 64,
    "not a key": lambda: "' OR 1=1 --",
    "nothing": lambda: "",
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_credential(site: Site, tmp_path: Path, how: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(jwks("ours")))
    site.access.issuers.add(Issuer(ISSUER, AUDIENCE, str(path)))
    forged = FORGED[how]()
    body = body_of(CHAT, site.engine)
    with httpx.Client(base_url=site.url, timeout=DEADLINE) as http:
        good = http.post(CHAT, json=body, headers={"authorization": f"Bearer {token()}"})
        assert good.status_code == 200, "the same, unforged"
        before = len(site.refusals("credential"))
        for headers in ({"authorization": f"Bearer {forged}".strip()}, {"x-api-key": forged}):
            for method, url in (
                ("POST", CHAT),
                ("POST", MESSAGES),
                ("GET", "/v1/documents"),
                ("GET", "/metrics"),
            ):
                answer = http.request(method, url, json=body if method == "POST" else None, headers=headers)
                assert answer.status_code == 401, url
                assert answer.headers["www-authenticate"] == "Bearer"
                assert not forged or forged not in answer.text
        assert http.post(CHAT, json=body).status_code == 401
    entries = site.refusals("credential")
    assert len(entries) > before
    assert {entry[:2] for entry in entries} == {(None, None)}, "nobody was authenticated"
    secret = re.split("[._]", forged)[-1]
    assert len(secret) < 20 or secret not in repr(site.access.audit.read(limit=1_000))


# -- documents and schemas of others -----------------------------------------------------------------------

SCHEMA = '<schema name="plan"><module name="m">{}</module></schema>'


def uses(engine: Engine, id: str) -> list[tuple[str, str, Json | None]]:
    """All that can be done with a document of that id."""
    asked: list[tuple[str, str, Json | None]] = [
        ("POST", path, body_of(path, engine, messages=about(id))) for path in (CHAT, MESSAGES)
    ]
    asked.append(("POST", f"{MESSAGES}/count_tokens", {"model": engine.model_name, "messages": about(id)}))
    asked.append(("POST", CHAT, body_of(CHAT, engine, messages=about(id), stream=True)))
    return [
        *asked,
        ("GET", f"/v1/documents/{id}", None),
        ("PUT", f"/v1/documents/{id}/readers", {"readers": ["user:mallory"]}),
        ("DELETE", f"/v1/documents/{id}", None),
        ("POST", "/v1/forget", {"document": id}),
    ]


def answered(answer: httpx.Response, id: str) -> tuple[int, str, list[str]]:
    """An answer but for the ids of what was asked for and of the request."""
    request = answer.headers.get("request-id") or answer.headers["x-request-id"]
    return (
        answer.status_code,
        answer.text.replace(id, "ID").replace(request, "REQUEST"),
        sorted(answer.headers),
    )


@pytest.mark.parametrize("number", range(8))
def test_a_document_of_another_might_as_well_not_exist(site: Site, number: int) -> None:
    made = site.clients["alice"].post("/v1/documents", json={"text": TEXT, "name": "plan", "scope": "org"})
    id = made.json()["id"]
    ask(site, "alice", messages=about(id))
    told = [
        answered(site.clients["mallory"].request(method, url, json=body), each)
        for each in (id, ABSENT)
        for method, url, body in [uses(site.engine, each)[number]]
    ]
    assert told[0] == told[1]
    assert told[0][0] == 404
    assert site.refusals("not_found") == [("evil", "mallory", id), ("evil", "mallory", ABSENT)]
    assert hits(ask(site, "alice", messages=about(id))) > len(TEXT)
    assert hits(ask(site, "bob", messages=about(id))) > len(TEXT)
    assert site.clients["mallory"].get("/v1/documents").json()["data"] == []


def test_a_colleague_without_the_right_is_told_no_more(site: Site) -> None:
    """A document of one user, and one shared with another: the same 404 in the same organisation."""
    own = site.clients["alice"].post("/v1/documents", json={"text": TEXT}).json()["id"]
    shared = {"text": TEXT, "readers": ["group:finance"]}
    others = site.clients["alice"].post("/v1/documents", json=shared).json()["id"]
    for id in (own, others):
        for (method, url, body), (_, other_url, other_body) in zip(
            uses(site.engine, id), uses(site.engine, ABSENT), strict=True
        ):
            told = answered(site.clients["bob"].request(method, url, json=body), id)
            assert told == answered(site.clients["bob"].request(method, other_url, json=other_body), ABSENT)
            assert told[0] == 404
            assert "Umbrella" not in told[1]
    assert {entry[:2] for entry in site.refusals("not_found")} == {("acme", "bob")}


def test_a_schema_of_another_might_as_well_not_exist(site: Site) -> None:
    created = site.clients["alice"].post("/v1/schemas?scope=org", content=SCHEMA.format(TEXT))
    id = created.json()["id"]
    for reference, absent in ((id, "sch_" + "0" * 32), ("plan", "nalp")):
        for method, url, body in (
            ("GET", "/v1/schemas/{}", None),
            ("PUT", "/v1/schemas/{}/readers", {"readers": ["user:mallory"]}),
            ("DELETE", "/v1/schemas/{}", None),
            ("POST", CHAT, {"pml": '<prompt schema="{}"><m/></prompt>'}),
        ):
            told: list[tuple[int, str, list[str]]] = []
            for name in (reference, absent):
                said = body
                if body is not None and "pml" in body:
                    said = {"model": site.engine.model_name, "max_tokens": 1, "pml": body["pml"].format(name)}
                answer = site.clients["mallory"].request(method, url.format(name), json=said)
                told.append(answered(answer, name))
            assert told[0] == told[1]
            assert told[0][0] == (400 if body is not None and "pml" in body else 404)
    assert ("evil", "mallory", id) in site.refusals("not_found")
    assert site.clients["alice"].get(f"/v1/schemas/{id}").status_code == 200


def test_a_name_of_anothers_is_ones_own(site: Site) -> None:
    """Registering what another has registered changes nothing for the other, nor tells of it."""
    for who, text in (("alice", TEXT), ("mallory", "Mine.")):
        made = site.clients[who].post("/v1/documents", json={"text": text, "name": "plan", "scope": "org"})
        assert made.status_code == 201
        assert site.clients[who].post("/v1/schemas", content=SCHEMA.format(text)).status_code == 201
    assert site.clients["bob"].get("/v1/documents/plan").json()["text"] == TEXT
    assert site.clients["mallory"].get("/v1/documents/plan").json()["text"] == "Mine."


# -- escalation --------------------------------------------------------------------------------------------


def control(level: str) -> Json:
    return {"cache_control": {"type": "ephemeral", "scope": level}}


def escalations(path: str, level: str) -> dict[str, Json]:
    """Bodies that ask for a scope in every place that has one."""
    text = {"type": "text", "text": PROMPT}
    inline = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": PROMPT}}
    wide = control(level)
    user = {"role": "user", "content": [text]}
    function = {"name": "f", "description": PROMPT}
    found: dict[str, Json] = {
        "part": {"messages": [{"role": "user", "content": [text | wide]}]},
        "part behind the user's own": {"messages": [{"role": "user", "content": [text, text | wide]}]},
        "document": {"messages": [{"role": "user", "content": [inline | wide, text]}]},
        "part beside a document": {"messages": [{"role": "user", "content": [inline, text | wide]}]},
        "top level": {"messages": [user]} | wide,
        "top level, all of it named": {"messages": [{"role": "user", "content": [text | control("user")]}]}
        | wide,
        "exact": {"messages": [{"role": "user", "content": [inline | wide, text]}], "reuse_mode": "exact"},
        "stream": {"messages": [user], "stream": True} | wide,
    }
    if path == MESSAGES:
        tool = {"name": "f", "input_schema": {"type": "object"}, "description": PROMPT}
        answered = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
        result = {"type": "tool_result", "tool_use_id": "t", "content": PROMPT}
        found |= {
            "system": {"messages": [user], "system": [text | wide]},
            "tool": {"messages": [user], "tools": [tool | wide]},
            "tool result": {
                "messages": [
                    user,
                    {"role": "assistant", "content": answered},
                    {"role": "user", "content": [result | wide]},
                ]
            },
        }
    else:
        found |= {
            "message": {"messages": [user | wide]},
            "system": {"messages": [{"role": "system", "content": PROMPT} | wide, user]},
            "tool": {"messages": [user], "tools": [{"type": "function", "function": function} | wide]},
        }
    return found


@pytest.mark.parametrize("level", ["org", "public"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_wider_scope_than_the_key_may(site: Site, path: str, level: str) -> None:
    for where, fields in escalations(path, level).items():
        answer = ask(site, "bob", path, **fields)
        assert answer.status_code == 403, where
        assert "publish:" in answer.text
        entries = site.refusals("escalation")
        assert entries[-1] == ("acme", "bob", "cache_control.scope"), where
    assert len(site.engine.index) == 0, "nothing of it was computed"
    assert (
        level == "public" or ask(site, "alice", path, **escalations(path, level)["part"]).status_code == 200
    )


def test_a_wider_scope_of_a_completion(site: Site) -> None:
    assert ask(site, "bob", COMPLETIONS, **control("org")).status_code == 403
    assert ask(site, "mallory", COMPLETIONS, **control("public")).status_code == 403
    assert [entry[1] for entry in site.refusals("escalation")] == ["bob", "mallory"]
    assert len(site.engine.index) == 0


@pytest.mark.parametrize("level", ["org", "public"])
def test_registering_for_more_than_the_key_may(site: Site, level: str) -> None:
    bob = site.clients["bob"]
    tried = [
        bob.post("/v1/documents", json={"text": TEXT, "name": "d1", "scope": level}),
        bob.post("/v1/schemas", json={"pml": SCHEMA.format(TEXT), "scope": level}),
        bob.post(f"/v1/schemas?scope={level}", content=SCHEMA.format(TEXT)),
        bob.put(f"/v1/schemas/plan?scope={level}&encode=true", content=SCHEMA.format(TEXT)),
    ]
    assert [answer.status_code for answer in tried] == [403] * 4
    assert site.refusals("escalation") == [("acme", "bob", name) for name in ("d1", "plan", "plan", "plan")]
    assert bob.get("/v1/documents").json()["data"] == bob.get("/v1/schemas").json()["data"] == []
    assert len(site.engine.index) == 0
    # One's own cannot be replaced by what everyone reads.
    assert bob.post("/v1/schemas", content=SCHEMA.format(TEXT)).status_code == 201
    assert bob.put(f"/v1/schemas/plan?scope={level}", content=SCHEMA.format(TEXT)).status_code == 403
    assert site.clients["alice"].get("/v1/schemas/plan").status_code == 404


# -- injection ---------------------------------------------------------------------------------------------

NAMES = (
    "../../etc/passwd",
    "..",
    ".",
    "/etc/passwd",
    "%2e%2e%2fetc%2fpasswd",
    "x'; DROP TABLE resources; --",
    "' OR '1'='1",
    'say "hi"',
    "a\0b",
    "plan\0",
    "a\nb",
    "doc_%",
    "_lan",
    "*",
    "<script>",
    "{{7*7}}",
    "\u202enalp",
    "x" * 5_000,
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name(site: Site, name: str) -> None:
    """No name reads a file, changes a query, or stands for another's document."""
    mallory, alice = site.clients["mallory"], site.clients["alice"]
    id = alice.post("/v1/documents", json={"text": TEXT, "name": "plan", "scope": "org"}).json()["id"]
    alice.post("/v1/schemas?scope=org", content=SCHEMA.format(TEXT))
    rows = site.access.state.row("SELECT count(*) FROM resources")[0]
    url = quote(name, safe="")
    model = site.engine.model_name
    schema = {"name": name, "children": [{"type": "text", "text": "x"}]}
    tried = [
        mallory.post("/v1/documents", json={"text": "Mine.", "name": name}),
        mallory.post("/v1/documents", json={"text": "Mine.", "readers": [f"user:{name}", f"group:{name}"]}),
        mallory.post("/v1/documents", json={"text": "Mine.", "scope": "session", "session": name}),
        mallory.post("/v1/schemas", json=schema),
        mallory.post(
            "/v1/schemas", json={"pml": f'<schema name="{name}"><module name="m">x</module></schema>'}
        ),
        mallory.get(f"/v1/documents/{url}"),
        mallory.put(f"/v1/documents/{url}/readers", json={"readers": [name]}),
        mallory.get(f"/v1/schemas/{url}"),
        mallory.delete(f"/v1/schemas/{url}"),
        mallory.get(f"/v1/requests/{url}/cache"),
        mallory.post("/v1/forget", json={"document": name}),
        mallory.post("/v1/forget", json={"request": name}),
        mallory.post("/v1/forget", json={"session": name}),
        mallory.post("/v1/forget", json={"org": "evil", "user": name}),
        ask(site, "mallory", messages=about(name)),
        ask(site, "mallory", MESSAGES, messages=about(name)),
        ask(site, "mallory", prompt_cache_key=name[:256], cache_control={"scope": "session"}),
        mallory.post(CHAT, json={"model": model, "max_tokens": 1, "pml": {"schema": name}}),
        mallory.get(f"/v1/models/{url}"),
        mallory.delete(f"/v1/documents/{url}"),
    ]
    for answer in tried:
        assert answer.status_code < 500, answer.text
        assert "root:" not in answer.text
    assert site.access.state.row("SELECT count(*) FROM resources WHERE org = 'acme'")[0] == rows
    assert alice.get(f"/v1/documents/{id}").json()["text"] == TEXT
    site.access.audit.flush()
    assert all(row.target.isprintable() for row in site.access.audit.read(limit=1_000))
    assert hits(ask(site, "alice", messages=about(id))) <= DOCUMENT_LEAD, "nobody has computed it"


@pytest.mark.parametrize(
    "src", ["secret.txt", "../secret.txt", "{folder}/secret.txt", "file://{folder}/secret.txt", "/etc/passwd"]
)
def test_a_schema_with_a_file_of_anothers(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, src: str
) -> None:
    (tmp_path / "secret.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    pml = f'<schema name="s"><module name="m" src="{src.format(folder=tmp_path)}"/></schema>'
    children = [{"type": "module", "name": "m", "src": src, "children": []}]
    tried = [
        site.clients["mallory"].post("/v1/schemas", content=pml),
        site.clients["mallory"].post("/v1/schemas", json={"pml": pml}),
        site.clients["mallory"].put("/v1/schemas/s", content=pml),
        site.clients["mallory"].post("/v1/schemas", json={"name": "s", "children": children}),
    ]
    for answer in tried:
        assert answer.status_code == 400, answer.text
    assert site.refusals("file") == [("evil", "mallory", "")] * 3
    assert site.clients["mallory"].get("/v1/schemas").json()["data"] == []


# -- explaining and forgetting -------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["mallory", "bob"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_explanation_is_the_askers(site: Site, path: str, who: str) -> None:
    id = ask(site, "alice", path).json()["id"]
    assert site.clients["alice"].get(f"/v1/requests/{id}/cache").status_code == 200
    told = [
        answered(site.clients[who].get(f"/v1/requests/{each}/cache"), each) for each in (id, "chatcmpl-0")
    ]
    assert told[0] == told[1]
    assert told[0][0] == 404
    assert [entry[1:] for entry in site.refusals("not_found")] == [(who, id), (who, "chatcmpl-0")]


FORGETTING: list[tuple[str, Json, int]] = [
    ("mallory", {"org": "acme"}, 403),
    ("mallory", {"org": "acme", "user": "alice"}, 403),
    ("mallory", {"org": "acme", "user": "alice", "session": "s-1"}, 403),
    ("bob", {"org": "acme"}, 403),
    ("bob", {"user": "alice"}, 403),
    ("bob", {"user": "alice", "session": "s-1"}, 403),
    ("bob", {"org": "evil"}, 403),
    ("mallory", {"request": "ID"}, 404),
    ("bob", {"request": "ID"}, 404),
    ("mallory", {"org": "acme", "session": "s-1"}, 400),
    # What it may forget has the same name, and is its own organisation's.
    ("mallory", {"user": "alice"}, 200),
    ("mallory", {"session": "s-1"}, 200),
    ("bob", {"session": "s-1"}, 200),
]


@pytest.mark.parametrize(("who", "body", "status"), FORGETTING)
def test_forgetting_what_is_anothers(site: Site, who: str, body: Json, status: int) -> None:
    session = {"prompt_cache_key": "s-1"} | control("session")
    id = ask(site, "alice").json()["id"]
    ask(site, "alice", **session)
    made = site.clients["alice"].post("/v1/documents", json={"text": TEXT}).json()["id"]
    blocks = len(site.engine.index)
    answer = site.clients[who].post("/v1/forget", json={k: id if v == "ID" else v for k, v in body.items()})
    assert answer.status_code == status, answer.text
    assert answer.json().get("blocks", 0) == 0
    assert len(site.engine.index) == blocks
    assert hits(ask(site, "alice")) > len(PROMPT)
    assert hits(ask(site, "alice", **session)) > len(PROMPT)
    assert site.clients["alice"].get(f"/v1/documents/{made}").status_code == 200
    if status in (403, 404):
        kind = "escalation" if status == 403 else "not_found"
        assert [entry[1] for entry in site.refusals(kind)] == [who]
    else:
        forgot = [row.actor_user for row in site.access.audit.read(action="forget")]
        assert forgot == ([who] if status == 200 else [])


# -- revoked rights --------------------------------------------------------------------------------------------


def test_a_right_that_is_taken_away_is_gone_at_the_next_request(site: Site) -> None:
    alice, access = site.clients["alice"], site.access
    shared = {"text": TEXT, "readers": ["group:finance", "user:carol"]}
    id = alice.post("/v1/documents", json=shared).json()["id"]
    site.join("acme", "carol")
    access.groups.add("acme", "bob", "finance")
    for who in ("bob", "carol"):
        assert ask(site, who, messages=about(id)).status_code == 200
        assert hits(ask(site, who, MESSAGES, messages=about(id))) > len(TEXT)
    access.groups.remove("acme", "bob", "finance")
    for path in (CHAT, MESSAGES):
        assert ask(site, "bob", path, messages=about(id)).status_code == 404
        assert ask(site, "carol", path, messages=about(id)).status_code == 200
    readers = {"readers": ["group:finance"]}
    assert alice.put(f"/v1/documents/{id}/readers", json=readers).status_code == 200
    for path in (CHAT, MESSAGES):
        assert ask(site, "carol", path, messages=about(id)).status_code == 404
    assert {entry[1:] for entry in site.refusals("not_found")} == {("bob", id), ("carol", id)}
    access.keys.revoke(site.ids["alice"])
    for path in (CHAT, MESSAGES):
        assert ask(site, "alice", path, messages=about(id)).status_code == 401
    assert alice.get(f"/v1/documents/{id}").status_code == 401
    assert [entry[2] for entry in site.refusals("credential")] == [site.ids["alice"]] * 3
    told = {row.action: (row.actor_user, row.target) for row in access.audit.read(limit=1_000)}
    assert told["group.remove"] == ("local", "finance")
    assert told["revoke"] == ("alice", id)
    assert told["key.revoke"] == ("local", site.ids["alice"])


def test_a_permission_that_is_taken_away(site: Site) -> None:
    """A key without the permission does what the revoked one did no more."""
    site.access.keys.revoke(site.ids["alice"])
    site.join("acme", "alice")
    assert ask(site, "alice", **control("org")).status_code == 403
    assert ask(site, "alice").status_code == 200


# -- without authentication ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["evil.com", "127.0.0.1.evil.com", "localhost.evil.com", "10.0.0.1", "[::2]", "0.0.0.0", ""]
)
def test_without_keys_only_this_machine_is_answered(tiny: Engine, host: str) -> None:
    with serving(tiny) as url, httpx.Client(base_url=url, timeout=DEADLINE) as http:
        for path in (CHAT, MESSAGES):
            answer = http.post(path, json=body_of(path, tiny), headers={"host": host})
            assert answer.status_code in ((403,) if host else (400, 403)), answer.text
            assert answer.status_code == 400 or "localhost alone" in answer.text
        for name in ("localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"):
            assert http.get("/v1/models", headers={"host": name}).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_no_other_address_is_served(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("OSTINATO_ACCESS", str(tmp_path / "access.db"))
    result = CliRunner().invoke(app, ["serve", str(tiny_model), "--host", host, "--port", "0"])
    assert result.exit_code == 2
    assert "Nobody has a key yet" in result.stderr
