"""The promises of docs/security.md as one: whatever others do, one who probes is told the same as if they had not.

Hypothesis draws what two victims and a prober do, in turns. It is done twice, once without the victims: every answer to
the prober, and the number of tokens that the engine computes for it, which is what its time depends on, is the same.
Left out is what the rules share: text in the prober's organisation without `--release-once`, and of two others with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attack_fixtures import MESSAGES, Json, Person, Town, alike, town_of
from ostinato import Engine
from server_fixtures import CHAT, COMPLETIONS

BASES = (
    "The merger with Hooli is signed on Friday at ten in the morning, and nobody else may know.",
    "The merger with Initech is off. Whoever asks about it is told that there never was one at all.",
)
TAILS = ("", " When is it?", " Who knows of it, and since when?")
LEVELS = (None, "user", "session", "org", "public")
TTLS = (None, None, None, 0, 0.001, 3600)
NAMES = ("plan", "helpdesk")
SOME = ("", "", "s-1", "s-2")

ASKING = ("complete", "complete", "system", "system", "user", "message", "inline", "document", "schema")
LEAVING = ("leave",)
"""How much is computed until the server notices is anybody's guess: the prober does not."""
KEEPING = ("register", "grant", "delete", "put schema", "delete schema")
FORGETTING = (
    "forget request",
    "forget session",
    "forget user",
    "forget end user",
    "forget salt",
    "forget document",
)
EXAMPLES = 60
PROBING = (
    "explain",
    "explain theirs",
    "read theirs",
    "use theirs",
    "grant theirs",
    "delete theirs",
    "forget theirs",
    "forget their request",
    "forget another",
    "by name",
    "list",
    "count",
    "metrics",
    "wrong",
)


@dataclass(frozen=True)
class Act:
    """Something that somebody does."""

    who: str
    kind: str
    base: int = 0
    cut: int = 90
    tail: int = 0
    level: str | None = None
    ttl: float | None = None
    name: str = "plan"
    session: str = ""
    end_user: str = ""
    salt: str = ""
    number: int = 0

    @property
    def text(self) -> str:
        return BASES[self.base][: self.cut]

    @property
    def control(self) -> Json:
        said = {"scope": self.level, "ttl": self.ttl}
        said = {name: value for name, value in said.items() if value is not None}
        return {"cache_control": {"type": "ephemeral", **said}} if said else {}


@dataclass
class Player:
    """Somebody on a site, and what it has made there."""

    person: Person
    requests: list[str] = field(default_factory=list[str])
    documents: list[str] = field(default_factory=list[str])


def part(text: str, **more: Any) -> Json:
    return {"type": "text", "text": text, **more}


def of(made: list[str], number: int, absent: str) -> str:
    return made[number % len(made)] if made else absent


def play(act: Act, player: Player, others: list[Player]) -> None:
    """Have somebody do something; its answers are noted in it."""
    person, model = player.person, player.person.site.engine.model_name
    documents = [id for other in others for id in other.documents]
    requests = [id for other in others for id in other.requests]
    own = of(player.documents, act.number, "doc_" + "0" * 32)
    theirs = of(documents, act.number, "doc_" + "0" * 32)
    asked = of(player.requests, act.number, "chatcmpl-" + "0" * 32)
    their_request = of(requests, act.number, "chatcmpl-" + "0" * 32)
    question = {"role": "user", "content": act.text + TAILS[act.tail]}
    names: Json = {"cache_salt": act.salt, "end_user": act.end_user, "prompt_cache_key": act.session}
    common: Json = {"model": model, "max_tokens": 1, "temperature": 0, "explain": True}
    common |= {name: value for name, value in names.items() if value}

    def ask(path: str, **fields: Any) -> None:
        answer = person.send("POST", path, common | fields)
        if answer.status_code == 200:
            player.requests.append(answer.json()["id"])

    def about(content: Json) -> list[Json]:
        return [{"role": "user", "content": [content, part(TAILS[act.tail] or "?")]}]

    def file(id: str) -> Json:
        return {"type": "document", "source": {"type": "file", "file_id": id}}

    match act.kind:
        case "complete":
            ask(COMPLETIONS, prompt=question["content"], **act.control)
        case "system":
            system = {"role": "system", "content": [part(act.text, **act.control)]}
            ask(CHAT, messages=[system, {"role": "user", "content": TAILS[act.tail] or "?"}])
        case "user":
            ask(CHAT, messages=[question], **act.control)
        case "message":
            said = {"system": [part(act.text, **act.control)], "messages": [question]}
            session = {"metadata": {"user_id": act.session}} if act.session else {}
            body = {
                name: value for name, value in common.items() if name not in ("prompt_cache_key", "explain")
            }
            person.send("POST", MESSAGES, body | said | session)
        case "inline":
            source = {"type": "text", "media_type": "text/plain", "data": act.text}
            ask(CHAT, messages=about({"type": "document", "source": source, **act.control}))
        case "document":
            ask(CHAT, messages=about(file(own)))
        case "schema":
            ask(CHAT, pml=f'<prompt schema="{act.name}"><m/>{TAILS[act.tail]}</prompt>')
        case "leave":
            body = common | {"stream": True, "max_tokens": 64, "messages": [question]} | act.control
            del body["explain"]
            headers = {"authorization": f"Bearer {person.key}"}
            with person.site.http.stream("POST", CHAT, json=body, headers=headers) as answer:
                next(answer.iter_raw(), None)
        case "register":
            level = act.level or "user"
            readers = ["user:dave"] if level == "org" else []
            body = {"text": act.text, "name": act.name, "scope": level, "readers": readers}
            body |= {"session": act.session or "s-1"} if level == "session" else {}
            answer = person.send("POST", "/v1/documents", body)
            if answer.status_code == 201:
                player.documents.append(answer.json()["id"])
        case "grant":
            person.send("PUT", f"/v1/documents/{own}/readers", {"readers": ["user:dave"]})
        case "delete":
            person.send("DELETE", f"/v1/documents/{own}")
        case "put schema":
            pml = f'<schema name="{act.name}"><module name="m">{act.text}</module></schema>'
            person.send("PUT", f"/v1/schemas/{act.name}", {"pml": pml, "encode": True})
        case "delete schema":
            person.send("DELETE", f"/v1/schemas/{act.name}")
        case "forget request":
            person.send("POST", "/v1/forget", {"request": asked})
        case "forget session":
            person.send("POST", "/v1/forget", {"session": act.session or "s-1"})
        case "forget user":
            person.send("POST", "/v1/forget", {"user": person.name})
        case "forget end user":
            person.send("POST", "/v1/forget", {"end_user": act.end_user or "s-1"})
        case "forget salt":
            person.send("POST", "/v1/forget", {"cache_salt": act.salt or "s-1"})
        case "forget document":
            person.send("POST", "/v1/forget", {"document": own})
        case "explain":
            person.send("GET", f"/v1/requests/{asked}/cache")
        case "explain theirs":
            person.send("GET", f"/v1/requests/{their_request}/cache")
        case "read theirs":
            person.send("GET", f"/v1/documents/{theirs}")
        case "use theirs":
            ask(CHAT, messages=about(file(theirs)))
        case "grant theirs":
            person.send("PUT", f"/v1/documents/{theirs}/readers", {"readers": [f"user:{person.name}"]})
        case "delete theirs":
            person.send("DELETE", f"/v1/documents/{theirs}")
        case "forget theirs":
            person.send("POST", "/v1/forget", {"document": theirs})
        case "forget their request":
            person.send("POST", "/v1/forget", {"request": their_request})
        case "forget another":
            person.send("POST", "/v1/forget", {"user": "alice"})
        case "by name":
            person.send("GET", f"/v1/documents/{act.name}")
            person.send("GET", f"/v1/schemas/{act.name}")
        case "list":
            person.send("GET", "/v1/documents")
            person.send("GET", "/v1/schemas")
        case "count":
            person.send("POST", f"{MESSAGES}/count_tokens", {"model": model, "messages": [question]})
        case "metrics":
            person.send("GET", "/metrics")
        case _:
            person.send("POST", CHAT, common | {"messages": [question], "temperature": 9})


@st.composite
def programs(draw: st.DrawFn, *, once: bool) -> tuple[str, list[Act]]:
    """Who probes, and what all do in turn. All programs together do everything; each does little, over and over, so
    that what the prober sends is often what a victim has sent."""

    def some(values: tuple[Any, ...], least: int, most: int) -> list[Any]:
        return draw(st.lists(st.sampled_from(values), min_size=least, max_size=most))

    asking, levels, ttls = some(ASKING, 1, 2), some(LEVELS, 1, 2), some(TTLS, 1, 2)
    names = [some(SOME, 1, 2) for _ in range(3)]
    cuts, tails = some((90, 90, 70, 25), 1, 2), some(tuple(range(len(TAILS))), 1, 2)

    def acts(
        who: tuple[str, ...], kinds: list[str], allowed: tuple[str | None, ...]
    ) -> st.SearchStrategy[Act]:
        return st.builds(
            Act,
            st.sampled_from(who),
            st.sampled_from(asking * 3 + kinds),
            base=st.sampled_from((0, 0, 0, 0, 1)),
            cut=st.sampled_from(cuts),
            tail=st.sampled_from(tails),
            level=st.sampled_from([level if level in allowed else None for level in levels]),
            ttl=st.sampled_from(ttls),
            name=st.sampled_from(NAMES),
            session=st.sampled_from(names[0]),
            end_user=st.sampled_from(names[1]),
            salt=st.sampled_from(names[2]),
            number=st.integers(0, 1),
        )

    prober = draw(st.sampled_from(("bob", "bob", "carol", "mallory")))
    own = acts((prober,), some(KEEPING + FORGETTING + PROBING, 1, 3), LEVELS)
    kinds = some((*LEAVING, *KEEPING, *FORGETTING), 0, 2)
    if prober == "mallory":
        theirs = acts(("alice", "bob"), kinds, LEVELS)
    else:
        # What the organisation shares, one of it has sent at most.
        shared = LEVELS if once else (None, "user", "session")
        others = acts(("mallory",), kinds, (None, "user", "session", "org"))
        theirs = st.one_of(acts(("alice",), kinds, shared), acts(("alice",), kinds, shared), others)
    return prober, draw(st.lists(st.one_of(own, theirs), min_size=4, max_size=10))


def seen(town: Town, prober: str, program: list[Act], *, sent: bool) -> list[tuple[Any, ...]]:
    """All that the prober of a program sees."""
    site = town.site()
    players = {name: Player(person) for name, person in site.people.items()}
    theirs = [player for name, player in players.items() if name != prober]
    found: list[tuple[Any, ...]] = []
    for act in program:
        player = players[act.who]
        if act.who == prober:
            player.person.answers.clear()
            number = site.computed(partial(play, act, player, theirs))
            found.append((str(act), number, *map(site.told, player.person.answers)))
        elif sent:
            play(act, player, [])
            site.settle()
    return found


@pytest.fixture(scope="module")
def towns(tiny_model: Path) -> Iterator[dict[bool, Town]]:
    """A server as it comes, and one with `--release-once`."""
    with ExitStack() as stack:
        made: dict[bool, Town] = {}
        for once in (False, True):
            engine = Engine(str(tiny_model), dtype="float32", kv_tokens=16_384, release_once=once)
            made[once] = stack.enter_context(town_of(stack.enter_context(engine)))
        yield made


@pytest.mark.parametrize("once", [False, True])
def test_whatever_others_do_the_prober_sees_the_same(towns: dict[bool, Town], once: bool) -> None:
    town = towns[once]

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(programs(once=once))
    def holds(drawn: tuple[str, list[Act]]) -> None:
        told = [seen(town, *drawn, sent=sent) for sent in (True, False)]
        assert alike(told)

    holds()
