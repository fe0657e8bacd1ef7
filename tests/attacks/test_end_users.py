"""End users behind one key: kept from each other and from whoever shares the key, forgotten alone, named to nobody."""

from __future__ import annotations

from typing import Any

import pytest

from attack_fixtures import MESSAGES, Site, Town, alike, cached
from server_fixtures import CHAT, COMPLETIONS

TEXT = "The merger with Hooli is signed on Friday at ten, and nobody else may know of it before that day has come."
LEAD = len("<|im_start|>user\n")
"""Tokens that the template writes before anything the request says: everybody's."""
PATHS = [CHAT, COMPLETIONS, MESSAGES]
ORG: dict[str, Any] = {"cache_control": {"type": "ephemeral", "scope": "org"}}
HEADERS = {"end_user": "X-End-User", "cache_salt": "X-Cache-Salt"}


def ask(
    site: Site, who: str, path: str, how: str = "body", names: dict[str, str] | None = None, **fields: Any
) -> int:
    """How much of the text was found, for those that are named in the body or in headers."""
    said: dict[str, Any] = (
        {"prompt": TEXT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": TEXT}]}
    )
    body = {"model": site.engine.model_name, "max_tokens": 1, "temperature": 0} | said | fields
    headers: dict[str, str] = {}
    for name, value in (names or {}).items():
        if how == "body":
            body[name] = value
        else:
            headers[HEADERS[name]] = value
    answer = site[who].send("POST", path, body, **headers)
    assert answer.status_code == 200, answer.text
    return max(0, cached(answer) - (0 if path == COMPLETIONS else LEAD))


@pytest.mark.parametrize("how", ["body", "header"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HEADERS)
def test_another_end_user_is_told_nothing(town: Town, path: str, how: str, name: str) -> None:
    """Nor one without a name; the same text as one that nobody sent."""
    told: list[Any] = []
    for sent in (True, False):
        site = town.site()
        if sent:
            assert ask(site, "alice", path, how, {name: "ann"}) == 0
            assert ask(site, "alice", path, how, {name: "ann"}) > LEAD + 16
        probes = [{name: "bob"}, {}, {"end_user": "ann", "cache_salt": "ann"}, {name: "ann#"}, {name: "Ann"}]
        told.append([ask(site, "alice", path, how, each, cache_control={"ttl": 0}) for each in probes])
    assert alike(told)


@pytest.mark.parametrize("how", ["body", "header"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HEADERS)
def test_a_name_widens_nothing(town: Town, path: str, how: str, name: str) -> None:
    """The names of another's, and scopes' own names, find nothing of another's."""
    guesses = ("ann", "alice", "acme", "acme/alice", "user:acme/alice", "public", "a" * 64)
    told: list[Any] = []
    for sent in (True, False):
        site = town.site()
        if sent:
            ask(site, "alice", path, how, {name: "ann"})
            ask(site, "alice", path)
            ask(site, "alice", path, how, {name: "ann"}, prompt_cache_key="s-1") if path != MESSAGES else None
        told.append(
            [
                ask(site, who, path, how, {name: guess}, cache_control={"ttl": 0})
                for who in ("bob", "mallory")
                for guess in guesses
            ]
        )
    assert alike(told)
    assert not any(told[0])


@pytest.mark.parametrize("path", PATHS)
def test_a_salt_keeps_an_organisations_text_apart(site: Site, path: str) -> None:
    salt = {"cache_salt": "pepper"}
    ask(site, "alice", path, **ORG)
    assert ask(site, "bob", path, **ORG) > 16
    assert ask(site, "bob", path, "body", salt, **ORG) == 0
    assert ask(site, "dave", path, "header", salt, **ORG) > 16, "who names the same shares it"
    assert ask(site, "mallory", path, "body", salt, **ORG) == 0
    assert ask(site, "carol", path, "body", salt) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", HEADERS)
def test_one_end_user_is_forgotten(site: Site, path: str, name: str) -> None:
    """All of one, and nothing of another's."""
    for each in ("ann", "bob"):
        ask(site, "alice", path, "body", {name: each})
    ask(site, "alice", path)
    ask(site, "bob", path, "body", {name: "ann"})
    most = ask(site, "alice", path, "body", {name: "bob"})
    assert site["mallory"].forget(**{name: "ann"})["tokens"] == 0
    gone = site["alice"].forget(**{name: "ann"})
    assert gone["tokens"] >= most
    assert ask(site, "alice", path, "body", {name: "ann"}) == 0
    assert ask(site, "alice", path, "body", {name: "bob"}) == most
    assert ask(site, "alice", path) == most
    assert ask(site, "bob", path, "body", {name: "ann"}) == most
    assert site["alice"].forget(**{name: "nobody"})["tokens"] == 0


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_names_are_told_as_a_hash(site: Site, path: str, name: str) -> None:
    """In an explanation, which the application may show to others, and to the operator in the audit log."""
    secret = "ann.smith@hooli.example"
    for how in ("body", "header"):
        ask(site, "alice", path, how, {name: secret}, explain=True)
        answer = site["alice"].answers[-1]
        told = [answer.text, site["alice"].send("GET", f"/v1/requests/{answer.json()['id']}/cache").text]
        word = "end-user" if name == "end_user" else "salt"
        for text in told:
            assert f"user:acme{site.number}/alice#{word}=" in text
            assert "smith" not in text
    site["alice"].forget(**{name: secret})
    site.access.audit.flush()
    assert "smith" not in repr(site.access.audit.read(limit=10_000))


def test_a_session_is_an_end_users(site: Site) -> None:
    session: dict[str, Any] = {
        "prompt_cache_key": "s-1",
        "cache_control": {"type": "ephemeral", "scope": "session"},
    }
    ask(site, "alice", CHAT, "body", {"end_user": "ann"}, **session)
    assert ask(site, "alice", CHAT, "body", {"end_user": "bob"}, **session) == 0
    assert ask(site, "alice", CHAT, "body", **session) == 0
    assert ask(site, "alice", CHAT, "header", {"end_user": "ann"}, **session) > 16


def test_an_end_users_request_is_forgotten_by_its_id(site: Site) -> None:
    ask(site, "alice", CHAT, "body", {"end_user": "ann"})
    id = site["alice"].answers[-1].json()["id"]
    assert site["bob"].send("POST", "/v1/forget", {"request": id}).status_code == 404
    assert site["alice"].forget(request=id)["tokens"] > len(TEXT)
    assert ask(site, "alice", CHAT, "body", {"end_user": "ann"}) == 0
