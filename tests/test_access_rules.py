"""Who may reuse what, against an independent model of the rules: random principals, documents, grants and forgettings."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ostinato import Engine, SamplingParams
from ostinato.access.access import Access
from ostinato.access.principal import Permission, Principal
from ostinato.access.scope import Scope, narrower
from ostinato.cache.block import Block
from ostinato.cache.use import Use
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.schema import SchemaPrompt, Turn
from ostinato.prompt.scopes import Asker, scoped
from ostinato.prompt.span import Span, plain
from ostinato.server.lookup import Lookup
from ostinato.server.openai import ChatCompletionRequest
from server_fixtures import CHAT, DEADLINE, serving

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
PUBLISHING = frozenset({"publish:org", "publish:public"})
ALICE = Principal("acme", "alice", permissions=PUBLISHING)
BOB = Principal("acme", "bob", permissions=PUBLISHING)
PLAN = "The plan is to buy the harbour before the autumn, and to tell nobody. "
MODES: list[ReuseMode] = ["exact", "modular", "linked"]


@pytest.fixture(scope="module")
def access() -> Iterator[Access]:
    with Access(":memory:") as access:
        yield access


@pytest.fixture(scope="module")
def small(tiny_model: Path, access: Access) -> Iterator[Engine]:
    secrets = access.secrets
    with Engine(str(tiny_model), dtype="float32", kv_tokens=65_536, secrets=secrets) as engine:
        yield engine


@pytest.fixture
def tiny(small: Engine, access: Access) -> Engine:
    small.clear_cache()
    access.resources.forget(org="acme")
    return small


def over_documents(engine: Engine, access: Access, principal: Principal, ids: list[str], **said: Any) -> Any:
    """Ask a question over registered documents as the server does; the engine's reply."""
    mode, scope = said.get("mode", "modular"), said.get("scope", "user")
    documents = [{"type": "document", "source": {"type": "file", "file_id": each}} for each in ids]
    question = {"type": "text", "text": said.get("question", "When?")} | said.get("part", {})
    messages = [{"role": "user", "content": [*documents, question]}]
    if "system" in said:
        messages.insert(0, {"role": "system", "content": said["system"]})
    prompt = ChatCompletionRequest(model="m", messages=messages).prompts()[0]
    resolved = Lookup(engine, access).resolve(prompt, principal, mode=mode, link_tokens=16)  # type: ignore[arg-type]
    return engine.generate(resolved.prompt, ONE, principal=principal, scope=scope)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("system", [None, "You are my own helper, and you know what I like."])
@pytest.mark.parametrize("level", ["public", "org", "user"])
def test_a_forgotten_document_is_gone_from_narrower_scopes_too(
    tiny: Engine, access: Access, level: Any, system: str | None, mode: ReuseMode
) -> None:
    """Behind a private beginning a shared document is computed in the private scope; it is to be found there."""
    made = access.resources.add(ALICE, "document", "plan", "ZZ" * 40, level)
    front = {} if system is None else {"system": system}
    over_documents(tiny, access, ALICE, [made.id], mode=mode, **front)
    tiny.forget(lambda scope: scope.resource == made.id)
    (mark,) = tiny.tokenizer.encode("Z")
    for block in tiny.index.store.blocks.values():
        assert mark not in block.token_ids, "some of the document's text is still there"
        assert not any(isinstance(each, Scope) and each.resource == made.id for each in block.lineage)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_asked_about_a_shared_document_is_the_askers(
    tiny: Engine, access: Access, mode: ReuseMode
) -> None:
    """The owner's question about a document of its own does not get the document's readers."""
    made = access.resources.add(ALICE, "document", "plan", PLAN * 2, readers=["user:bob"])
    question = "Will our chief resign over this before the year ends, or after?"
    over_documents(tiny, access, ALICE, [made.id], question=question, mode=mode)
    guess = over_documents(tiny, access, BOB, [made.id], question=question, scope="org", mode=mode)
    other = over_documents(tiny, access, BOB, [made.id], question="?", scope="org", mode=mode)
    assert guess.usage.prompt_tokens - guess.usage.cached_tokens > len(question)
    assert other.usage.cached_tokens >= guess.usage.cached_tokens


@pytest.mark.parametrize("mode", MODES)
def test_a_private_document_is_not_published_by_asking_in_a_wider_scope(
    tiny: Engine, access: Access, mode: ReuseMode
) -> None:
    """However a request wants it shared, no block that saw a document is of a scope wider than the document's."""
    ids = [
        access.resources.add(ALICE, "document", name, text, readers=["user:bob"]).id
        for name, text in (("long", PLAN * 3), ("short", "The harbour."))
    ]
    own = access.resources.add(BOB, "document", "own", "Bob's harbour.").id
    over_documents(tiny, access, BOB, [*ids, own], scope="org", mode=mode)
    over_documents(tiny, access, BOB, ids[::-1], scope="org", mode=mode)
    documents = {*ids, own}
    assert any(
        each.resource for block in tiny.index.store.blocks.values() for each in scopes_of(block.lineage)
    )
    for block in tiny.index.store.blocks.values():
        if any(each.resource in documents for each in scopes_of(block.lineage)):
            assert block.scope.level == "user", str(block.scope)
        assert (
            block.scope.level == "user" or b"harbour" not in tiny.tokenizer.decode(block.token_ids).encode()
        )


def scopes_of(lineage: Any) -> Iterator[Scope]:
    return (each for each in lineage if isinstance(each, Scope))


def test_the_narrower_of_a_shared_document_and_its_owner() -> None:
    own, document = Scope("user", "acme", "alice"), Scope("user", "acme", "alice", resource="doc_1")
    assert not document.within(own), "it may have readers"
    assert document.within(Scope("org", "acme"))
    assert narrower(document, own, asker=own) == own
    wide = Asker(ALICE, level="org")
    theirs = [Span((n,) * 20, scope=Scope("user", "acme", f"user-{n}", resource=f"doc_{n}")) for n in (1, 2)]
    assert scoped(plain(*theirs), wide, smallest=1).chains[-1].scope == own


DOCUMENT = {"type": "document", "source": {"type": "text", "data": "A document."}}


@pytest.mark.parametrize(
    ("message", "levels"),
    [
        (
            {
                "content": [
                    DOCUMENT,
                    {"type": "text", "text": "a", "cache_control": {"scope": "user"}},
                    {"type": "text", "text": "b"},
                ]
            },
            "user",
        ),
        (
            {
                "content": [DOCUMENT, {"type": "text", "text": "a", "cache_control": {"ttl": "1h"}}],
                "cache_control": {"scope": "session"},
            },
            "session",
        ),
        ({"content": [DOCUMENT, {"type": "text", "text": "a"}]}, None),
    ],
)
def test_a_message_beside_documents_has_the_narrowest_scope_of_its_parts(
    message: Any, levels: str | None
) -> None:
    """Also where the whole request asks for a wider one, or a part says only how long it may stay; a message that says
    nothing has the request's."""
    asked = {"model": "m", "messages": [{"role": "user"} | message], "cache_control": {"scope": "org"}}
    prompt = ChatCompletionRequest(**asked).prompts()[0]
    assert isinstance(prompt, SchemaPrompt)
    turn = prompt.items[-1]
    assert isinstance(turn, Turn)
    assert turn.control.level == levels


def test_what_is_not_kept_takes_nothing_away(tiny: Engine) -> None:
    """A prompt with ttl 0 that goes on from a kept one leaves it whole, to the last token."""
    prompt = list(range(3, 43))
    tiny.generate(prompt, ONE, principal=ALICE)
    tiny.generate([*prompt, *range(50, 60)], ONE, principal=ALICE, ttl=0)
    assert tiny.generate([*prompt, 99], ONE, principal=ALICE).usage.cached_tokens == len(prompt)


def test_what_is_not_released_takes_nothing_away(tiny_model: Path) -> None:
    """With `release_once` nobody senses that another has gone on from the same text."""
    with Engine(str(tiny_model), dtype="float32", kv_tokens=8192, release_once=True) as engine:
        prompt = list(range(3, 43))
        engine.generate(prompt, ONE, principal=ALICE, scope="org")
        engine.generate([*prompt, *range(50, 60)], ONE, principal=BOB, scope="org")
        again = engine.generate([*prompt, 99], ONE, principal=ALICE, scope="org")
        assert again.usage.cached_tokens == len(prompt)


def test_explanations_of_what_is_forgotten_are_gone(tiny: Engine, access: Access) -> None:
    made = access.resources.add(ALICE, "document", "plan", PLAN)
    for role in ("user", "system"):
        tiny.generate(
            [{"role": role, "content": "What is shown begins behind what all begin with."}],
            ONE,
            principal=BOB,
        )
    chat = [{"role": "user", "content": "My secret is a session's."}]
    tiny.generate(chat, ONE, principal=ALICE, session="s", scope="session", request_id="r1")
    prompt = ChatCompletionRequest(
        model="m",
        messages=[
            {
                "role": "user",
                "content": [{"type": "document", "source": {"type": "file", "file_id": made.id}}],
            }
        ],
    ).prompts()[0]
    resolved = Lookup(tiny, access).resolve(prompt, ALICE, link_tokens=16)  # type: ignore[arg-type]
    tiny.generate(resolved.prompt, ONE, principal=ALICE, request_id="r2")
    assert "secret" in repr(tiny.explain("r1", ALICE))
    assert "The plan is" in repr(tiny.explain("r2", ALICE))
    tiny.forget(lambda scope: scope.level == "session")
    assert tiny.explain("r1", ALICE) is None
    assert tiny.explain("r2", ALICE) is not None
    tiny.forget(lambda scope: scope.resource == made.id)
    assert tiny.explain("r2", ALICE) is None


# The rules once more, written from docs/security.md and without a look at the code. Texts are bytes here (a token of the
# tiny model is a byte), scopes are places, and what is cached is a shelf of pieces of up to 16 bytes.

ORGS, USERS = 5, 6
SESSIONS = ("morning", "evening")
GROUPS = ("finance", "legal")
LEVELS = ("public", "org", "user", "session")
RIGHTS: tuple[Permission, ...] = ("publish:org", "publish:public", "admin:org")
LINES = (
    "You are kind.",
    "You are kind and brief.",
    "You are kind and brief, and you say so when you do not know.",
    "You are stern, and count every word of the answer.",
    "Answer in French.",
)
QUESTIONS = (
    "How far?",
    "How far does a swift fly in a year?",
    "How far does a swift fly in a year, there and back again?",
    "What do you make of the weather on the coast in the spring?",
    "Why?",
)
PAPERS = (
    "Swifts fly ten months without a landing.",
    "Swifts fly ten months without a landing, and sleep in the air.",
    "Terns see two summers a year.",
    "The budget of the harbour for the year to come is not yet agreed on by anybody.",
)
BLOCK = 16


@dataclass(frozen=True)
class Place:
    """Who may reuse a text: a level, whose, and the registered document whose readers they are."""

    level: str
    org: str = ""
    user: str = ""
    session: str = ""
    paper: str = ""


EVERYWHERE = Place("public")


def inside(a: Place, b: Place) -> bool:
    """Whether whoever may read what lies in `a` may certainly read what lies in `b`."""
    if a == b or b == EVERYWHERE:
        return True
    if b.paper or LEVELS.index(a.level) < LEVELS.index(b.level) or a.org != b.org:
        return False
    if b.level == "org":
        return True
    # A user's document may have readers beside the user; a session's has none.
    return a.user == b.user and a.level == "session" and b.session in ("", a.session)


def meet(a: Place, b: Place, me: Place) -> Place:
    """Where something lies that was computed from texts in `a` and `b`."""
    if inside(a, b):
        return a
    if inside(b, a):
        return b
    low = max(a, b, key=lambda place: LEVELS.index(place.level))
    if low.level == "session":
        return replace(low, paper="")
    return me if low.paper or a.level == b.level else low


@dataclass(eq=False)
class Person:
    org: str
    user: str
    groups: set[str]
    rights: set[str]
    key_id: str = ""
    key: str = ""
    alive: bool = True

    def place(self, level: str, session: str = "") -> Place:
        match level:
            case "public":
                return EVERYWHERE
            case "org":
                return Place("org", self.org)
            case "user":
                return Place("user", self.org, self.user)
            case _:
                return Place("session", self.org, self.user, session)

    def may_publish(self, level: str) -> bool:
        return level not in ("public", "org") or f"publish:{level}" in self.rights


@dataclass(eq=False)
class Paper:
    """A registered document."""

    id: str
    org: str
    user: str
    level: str
    session: str
    text: str
    readers: set[str]

    @property
    def place(self) -> Place:
        org = "" if self.level == "public" else self.org
        user = self.user if self.level in ("user", "session") else ""
        return Place(self.level, org, user, self.session, self.id)

    def open_to(self, who: Person) -> bool:
        if (who.org, who.user) == (self.org, self.user):
            return True
        if self.readers:
            badges = {f"user:{who.user}", *(f"group:{group}" for group in who.groups)}
            return who.org == self.org and bool(badges & self.readers)
        return self.level == "public" or (self.level == "org" and who.org == self.org)

    def ruled_by(self, who: Person) -> bool:
        return who.org == self.org and (who.user == self.user or "admin:org" in who.rights)


Traces = frozenset[Place | str]
"""What something was computed from: places of texts, and ids of requests."""


@dataclass(frozen=True)
class Piece:
    """A stretch of a prompt in one place, and what identifies it: all that it sees."""

    place: Place
    papers: frozenset[Place]
    text: bytes
    root: Any
    seen: tuple[Piece, ...]
    home: Piece | None = None

    @property
    def identity(self) -> Any:
        return self.root, self.text

    @property
    def private(self) -> bool:
        return self.place.level in ("user", "session") and not self.place.paper

    @property
    def claimed(self) -> bool:
        """Whether it is shared, and somebody's text: not a document's that is registered, nor the template's alone."""
        said = re.sub(r"<\|im_(start|end)\|>(system|user|assistant)?\n?", "", self.text.decode())
        return not self.private and not self.place.paper and bool(said.strip())


@dataclass(eq=False)
class Kept:
    text: bytes
    traces: Traces
    claimed: bool = False
    """Whether all of it is somebody's text."""
    claims: set[str] = field(default_factory=set)
    """Of a shared place: the requests that have sent the text. It goes with the last of them."""


@dataclass(eq=False)
class Ask:
    """A request for text, as it is drawn."""

    system: list[tuple[str, str | None]]
    turns: list[list[tuple[str, str | None]]]
    papers: list[Paper | tuple[str, str | None]]
    """Registered documents, and texts of documents that the request brings along."""
    session: str = ""
    default: str | None = None
    keep: bool = True

    def body(self, model: str) -> dict[str, Any]:
        def control(level: str | None) -> dict[str, Any]:
            return {} if level is None else {"cache_control": {"type": "ephemeral", "scope": level}}

        def texts(parts: list[tuple[str, str | None]]) -> list[dict[str, Any]]:
            return [{"type": "text", "text": text} | control(level) for text, level in parts]

        documents: list[dict[str, Any]] = []
        for paper in self.papers:
            if isinstance(paper, Paper):
                documents.append({"type": "document", "source": {"type": "file", "file_id": paper.id}})
            else:
                source = {"type": "text", "media_type": "text/plain", "data": paper[0]}
                documents.append({"type": "document", "source": source} | control(paper[1]))
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": texts(self.system)})
        for number, parts in enumerate(self.turns):
            messages.append({"role": "user", "content": [*(() if number else documents), *texts(parts)]})
            if number < len(self.turns) - 1:
                messages.append({"role": "assistant", "content": "Far."})
        whole = control(self.default)
        if not self.keep:
            whole = {"cache_control": {"ttl": 0} | whole.get("cache_control", {})}
        sampling = {"model": model, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        named = {"prompt_cache_key": self.session} if self.session else {}
        return sampling | {"messages": messages} | whole | named

    def levels(self) -> set[str]:
        """The levels that it names, or has by default."""
        asked = [level for parts in (self.system, *self.turns) for _, level in parts]
        asked += [paper[1] for paper in self.papers if not isinstance(paper, Paper)]
        return {self.default or "user", *(level for level in asked if level is not None)}


class World:
    """A server, the people who use it, and what the rules say of them."""

    def __init__(self, engine: Engine, access: Access, http: httpx.Client, name: str) -> None:
        self.engine, self.access, self.http = engine, access, http
        engine.clear_cache()
        self.read: list[Block] = []
        self.people = [
            Person(f"{name}-{org}", f"user-{user}", set(), set())
            for org in range(ORGS)
            for user in range(USERS)
        ]
        self.papers: list[Paper] = []
        self.gone: list[str] = ["doc_" + "0" * 32]
        self.shelf: dict[Any, list[Kept]] = {}
        self.requests: dict[str, tuple[Person, Traces]] = {}
        self.lengths: dict[str, tuple[Person, int]] = {}
        self.forgotten: set[str] = set()
        self.asked = self.refused = self.hits = 0

    # -- what a prompt is, by the rules -----------------------------------------------------------------

    def line(
        self,
        at: int,
        seen: tuple[Piece, ...],
        texts: Sequence[tuple[str, Place | None]],
        me: Place,
        behind: Sequence[Piece] = (),
    ) -> list[Piece]:
        """Texts from position `at` on in pieces of one place each; None is the template's, and goes with what is before."""
        place: Place | None = None
        for other in (*seen, *behind):
            place = other.place if place is None else meet(place, other.place, me)
        groups: list[tuple[Place, set[Place], str]] = []
        for text, wanted in texts:
            own = wanted or place
            assert own is not None
            place = own if place is None else meet(place, own, me)
            papers = {own} if wanted and own.paper else set[Place]()
            if groups and groups[-1][0] == place:
                groups[-1] = place, groups[-1][1] | papers, groups[-1][2] + text
            else:
                groups.append((place, papers, text))
        made: list[Piece] = []
        for place, papers, text in groups:
            before = (*seen, *made)
            others = frozenset(papers) - {place}
            root = place, others, at, tuple(piece.identity for piece in before)
            made.append(Piece(place, others, text.encode(), root, before))
            at += len(made[-1].text)
        return made

    def pieces(self, who: Person, ask: Ask) -> list[Piece]:
        """The pieces that the reply sees, in order."""
        session = hidden(ask.session)
        default = ask.default or "user"
        me = who.place("session", session) if default == "session" else who.place("user")

        def wanted(level: str | None) -> Place:
            return who.place(level or default, session)

        def narrowest(parts: list[tuple[str, str | None]]) -> Place:
            return wanted(max((level or default for _, level in parts), key=LEVELS.index))

        last = "<|im_end|>\n<|im_start|>assistant\n"
        between = f"{last}Far.<|im_end|>\n<|im_start|>user\n"
        if not ask.papers:
            texts: list[tuple[str, Place | None]] = []
            if ask.system:
                texts = [
                    ("<|im_start|>system\n", EVERYWHERE),
                    *((text, wanted(level)) for text, level in ask.system),
                ]
                texts.append(("<|im_end|>\n<|im_start|>user\n", None))
            else:
                texts = [("<|im_start|>user\n", EVERYWHERE)]
            for number, parts in enumerate(ask.turns):
                texts += [(text, wanted(level)) for text, level in parts]
                texts += answered(between, wanted(None)) if number < len(ask.turns) - 1 else [(last, None)]
            return self.line(0, (), texts, me)
        # Documents stand behind the system text, each with nothing but that text in sight.
        system = "".join(text for text, _ in ask.system) + "\n\n" if ask.system else ""
        of_front = narrowest(ask.system) if ask.system else EVERYWHERE
        front = tuple(self.line(0, (), [(f"<|im_start|>system\n{system}", of_front)], me))
        home = at = sum(len(piece.text) for piece in front)
        documents: list[Piece] = []
        for paper in ask.papers:
            text, place = (
                (paper.text, paper.place) if isinstance(paper, Paper) else (paper[0], wanted(paper[1]))
            )
            (piece,) = self.line(home, front, [(f"{text}\n\n", place)], me)
            if at != home:
                moved = piece.place, piece.papers, at, ("moved", piece.identity)
                piece = Piece(piece.place, piece.papers, piece.text, moved, (), piece)
            documents.append(piece)
            at += len(piece.text)
        # Where that stands tells how long the documents are: it is for nobody who may not read them.
        end = self.line(at, front, [("<|im_end|>\n", of_front)], me, documents)
        texts = [("<|im_start|>user\n", None)]
        for number, parts in enumerate(ask.turns):
            texts.append(("".join(text for text, _ in parts), narrowest(parts)))
            texts += answered(between, wanted(None)) if number < len(ask.turns) - 1 else [(last, None)]
        seen = (*front, *documents, *end)
        return [*seen, *self.line(at + len(end[0].text), seen, texts, me)]

    # -- what is cached, by the rules -------------------------------------------------------------------

    def found(self, piece: Piece, limit: int | None = None) -> tuple[int, Traces]:
        """How much of a piece is cached, and what that was computed from."""
        text = piece.text[:limit]
        at, traces = 0, frozenset[Place | str]()
        while len(text) - at >= BLOCK:
            whole = next((k for k in self.kept(piece, at) if k.text == text[at : at + BLOCK]), None)
            if whole is None:
                break
            at += BLOCK
            traces |= whole.traces
        best = Kept(b"", frozenset())
        for kept in self.kept(piece, at):
            if common(kept.text, text[at:]) > common(best.text, text[at:]):
                best = kept
        return at + common(best.text, text[at:]), traces | best.traces

    def keep(self, piece: Piece, traces: Traces, request: str, *, last: bool) -> None:
        """The blocks of a piece that a request has sent, found or computed; the end of a prompt is none of its own if
        there is a longer one."""
        for at in range(0, len(piece.text), BLOCK):
            chunk, kept = piece.text[at : at + BLOCK], self.kept(piece, at)
            same = next((other for other in kept if other.text == chunk), None)
            longer = any(other.text.startswith(chunk) for other in kept)
            if same is None and longer and last and len(chunk) < BLOCK:
                continue
            if same is None:
                # What others have sent, and will find when this request is forgotten, stays beside it.
                kept[:] = [
                    other
                    for other in kept
                    if not chunk.startswith(other.text)
                    or (piece.claimed and not (other.claimed and other.claims <= {request}))
                ]
                same = Kept(chunk, traces, piece.claimed)
                kept.append(same)
            same.claimed = same.claimed and piece.claimed
            if piece.claimed:
                same.claims.add(request)

    def kept(self, piece: Piece, at: int) -> list[Kept]:
        return self.shelf.setdefault((piece.root, piece.text[:at]), [])

    def computed(self, request: str, pieces: list[Piece], keep: bool) -> tuple[int, Traces]:
        """What a request finds, and everything that it was computed from; it is on the shelf from now on."""
        total, all_traces = 0, frozenset[Place | str]((request,))
        known: dict[int, Traces] = {}
        for piece in pieces:
            last = piece is pieces[-1]
            hit, found = self.found(piece, len(piece.text) - 1 if last else None)
            own = frozenset[Place | str]((piece.place,)) | piece.papers
            own |= frozenset((request,)) if piece.private else frozenset()
            all_traces |= own
            home, at_home = piece.home, 0
            if home is not None and hit < len(piece.text):
                at_home, of_home = self.found(home)
                of_home = (of_home if piece.private else frozenset()) | own
                of_home |= frozenset().union(*(known[id(other)] for other in home.seen))
                found |= of_home
                if keep:
                    self.keep(home, of_home, request, last=False)
            # What is shared is computed from nothing that is a request's.
            traces = own.union(*(known[id(other)] for other in piece.seen), found if piece.private else ())
            if home is not None and not piece.private:
                traces |= frozenset().union(*(known[id(other)] for other in home.seen))
            known[id(piece)] = traces
            if keep:
                self.keep(piece, traces, request, last=last)
            total += max(hit, at_home)
        return total, all_traces

    def forget(self, gone: Callable[[Place | str], bool]) -> None:
        """Take what has a trace of what is gone from the shelf, and see that the server has done so too."""
        lost = cache(lambda traces: any(map(gone, traces)))
        for kept in self.shelf.values():
            kept[:] = [each for each in kept if not lost(each.traces)]
            for each in list(kept):
                held = bool(each.claims)
                each.claims.difference_update([request for request in each.claims if gone(request)])
                if each.claimed and held and not each.claims:
                    kept[:] = [other for other in kept if other is not each]
        for request, (_, traces) in list(self.requests.items()):
            if lost(traces):
                del self.requests[request]
        assert not self.slots(gone)

    # -- what people do ---------------------------------------------------------------------------------

    def call(self, who: Person, method: str, path: str, body: Any = None) -> httpx.Response:
        """What the server answers; with a key that is revoked it answers 401, whatever is asked."""
        if not who.key:
            self.new_key(who, {*RIGHTS[:1]})
        headers = {"authorization": f"Bearer {who.key}"}
        answer = self.http.request(method, path, json=body, headers=headers)
        assert (answer.status_code == 401) == (not who.alive), answer.text
        return answer

    def new_key(self, who: Person, rights: set[str]) -> None:
        info, who.key = self.access.keys.create(who.org, who.user, permissions=sorted(rights))
        who.key_id, who.rights, who.alive = info.id, rights, True

    def ask(self, who: Person, ask: Ask) -> None:
        settle(self.engine)
        self.read.clear()
        answer = self.call(who, "POST", CHAT, ask.body(self.engine.model_name))
        self.asked += 1
        wrong = {403} if not all(map(who.may_publish, ask.levels())) else set[int]()
        if "session" in ask.levels() and not ask.session:
            wrong.add(400)
        for paper in ask.papers:
            if isinstance(paper, Paper) and (paper not in self.papers or not paper.open_to(who)):
                wrong.add(404)
        if not who.alive:
            wrong = {401}
        if wrong:
            assert answer.status_code in wrong, answer.text
            assert not self.read
            self.refused += 1
            return
        assert answer.status_code == 200, answer.text
        told = answer.json()
        hits, traces = self.computed(told["id"], self.pieces(who, ask), ask.keep)
        self.requests[told["id"]] = who, traces | {who.place("user")}
        self.lengths[told["id"]] = who, told["usage"]["prompt_tokens"]
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == hits
        self.hits += hits > 60
        settle(self.engine)
        sessions = {hidden(ask.session), *(p.session for p in ask.papers if isinstance(p, Paper))}
        for block in self.read:
            for each in (block.scope, *block.lineage):
                assert self.may_read(who, sessions, traced(each)), f"{who} must not read {block}"

    def may_read(self, who: Person, sessions: set[str], trace: Place | str) -> bool:
        if isinstance(trace, str):
            return trace not in self.forgotten
        if trace.paper:
            return any(paper.id == trace.paper and paper.open_to(who) for paper in self.papers)
        org, user = trace.org in ("", who.org), trace.user in ("", who.user)
        return org and user and (not trace.session or trace.session in sessions)

    def register(self, who: Person, level: str, session: str, text: str, readers: set[str]) -> None:
        body = {"text": text, "scope": level, "readers": sorted(readers)}
        session = session if level == "session" else ""
        answer = self.call(who, "POST", "/v1/documents", body | ({"session": session} if session else {}))
        if not who.alive:
            return
        if readers and level in ("public", "session"):
            assert answer.status_code == 400
        elif not who.may_publish(level):
            assert answer.status_code == 403
        else:
            assert answer.status_code == 201, answer.text
            id = answer.json()["id"]
            self.papers.append(Paper(id, who.org, who.user, level, hidden(session), text, readers))

    def set_readers(self, who: Person, paper: Paper, readers: set[str]) -> None:
        answer = self.call(who, "PUT", f"/v1/documents/{paper.id}/readers", {"readers": sorted(readers)})
        status = self.status_of_change(who, paper)
        if status == 200 and readers and paper.level in ("public", "session"):
            status = 400
        if status == 200 and paper.level == "org" and paper.readers and not readers:
            status = 200 if who.may_publish("org") or "admin:org" in who.rights else 403
        assert answer.status_code == status, answer.text
        if status == 200:
            paper.readers = readers

    def remove(self, who: Person, paper: Paper, *, by_forgetting: bool) -> None:
        slots = self.slots(lambda trace: isinstance(trace, Place) and trace.paper == paper.id)
        if by_forgetting:
            answer = self.call(who, "POST", "/v1/forget", {"document": paper.id})
        else:
            answer = self.call(who, "DELETE", f"/v1/documents/{paper.id}")
        status = self.status_of_change(who, paper)
        assert answer.status_code == status, answer.text
        if status == 200:
            self.removed(lambda each: each is paper)
            self.forget(lambda trace: isinstance(trace, Place) and trace.paper == paper.id)
            self.erased(slots)

    def status_of_change(self, who: Person, paper: Paper) -> int:
        if not who.alive:
            return 401
        if paper not in self.papers or not (paper.open_to(who) or paper.ruled_by(who)):
            return 404
        return 200 if paper.ruled_by(who) else 403

    def removed(self, gone: Callable[[Paper], bool]) -> set[str]:
        ids = {paper.id for paper in self.papers if gone(paper)}
        self.papers = [paper for paper in self.papers if paper.id not in ids]
        return ids

    def forget_someone(self, who: Person, org: str, user: str, session: str) -> None:
        """`user` "" is the whole organisation, `session` "" all of the user."""
        body = {"org": org} | ({"user": user} if user else {}) | ({"session": session} if session else {})
        session = hidden(session)
        may = who.org == org and (who.user == user or "admin:org" in who.rights)
        ids = {
            paper.id
            for paper in self.papers
            if paper.org == org and user in ("", paper.user) and session in ("", paper.session)
        }

        def theirs(trace: Place | str) -> bool:
            if isinstance(trace, str):
                return False
            whose = trace.org == org and user in ("", trace.user) and session in ("", trace.session)
            return whose or trace.paper in ids

        slots = self.slots(theirs)
        answer = self.call(who, "POST", "/v1/forget", body)
        if not who.alive:
            return
        assert answer.status_code == (200 if may else 403), answer.text
        if may:
            assert set(answer.json()["documents"]) == ids
            self.removed(lambda paper: paper.id in ids)
            self.forget(theirs)
            self.erased(slots)

    def forget_request(self, who: Person, request: str) -> None:
        slots = self.slots(lambda trace: trace == request)
        answer = self.call(who, "POST", "/v1/forget", {"request": request})
        if not who.alive:
            return
        known = self.requests.get(request)
        may = known is not None and (known[0].org, known[0].user) == (who.org, who.user)
        assert answer.status_code == (200 if may else 404), answer.text
        if may:
            self.forgotten.add(request)
            own = sum(count for person, count in self.lengths.values() if person is who)
            # What is moved is there twice.
            assert answer.json()["tokens"] <= 2 * own, "no more than it has sent itself"
            self.forget(lambda trace: trace == request)
            self.erased(slots)

    def slots(self, gone: Callable[[Place | str], bool]) -> list[int]:
        """The slots of all blocks that have to do with something."""
        settle(self.engine)
        lost = cache(lambda lineage: any(gone(traced(each)) for each in lineage))
        blocks = list(self.engine.index.store.blocks.values())

        def held(block: Block) -> bool:
            requests = [each for claim in block.claims.values() for each in claim.requests]
            return not requests or not block.claimed or not all(gone(traced(each)) for each in requests)

        numbers = [b.number for b in blocks if lost(b.lineage) or gone(traced(b.scope)) or not held(b)]
        return [number * BLOCK + i for number in numbers for i in range(BLOCK)]

    def erased(self, slots: list[int]) -> None:
        assert not torch.count_nonzero(self.engine.index.pool.kv[:, :, :, slots])

    # -- what happens next ------------------------------------------------------------------------------

    def happen(self, chance: Random) -> None:
        """Anything, as chance has it; requests for text most of the time."""
        who = chance.choice(self.people)
        if not who.key or (not who.alive and chance.random() < 0.3):
            self.new_key(who, {right for right in RIGHTS if chance.random() < 0.6})
        match chance.choices(range(10), (60, 8, 5, 3, 3, 3, 3, 3, 4, 2))[0]:
            case 1:
                some = {
                    *chance.sample([f"user:user-{n}" for n in range(USERS)], 2),
                    f"group:{chance.choice(GROUPS)}",
                }
                readers = some if chance.random() < 0.5 else set[str]()
                self.register(
                    who, chance.choice(LEVELS), chance.choice(SESSIONS), chance.choice(PAPERS), readers
                )
            case 2 if self.papers:
                paper = chance.choice(self.papers)
                who = who if chance.random() < 0.3 else self.owner(paper)
                self.set_readers(
                    who,
                    paper,
                    set(
                        chance.sample(
                            [f"user:{who.user}", "group:finance", "group:legal"], chance.randint(0, 2)
                        )
                    ),
                )
            case 3 if self.papers:
                paper = chance.choice(self.papers)
                who = who if chance.random() < 0.5 else self.owner(paper)
                self.remove(who, paper, by_forgetting=chance.random() < 0.5)
            case 4:
                other = chance.choice([p for p in self.people if p.org == who.org])
                self.forget_someone(who, who.org, other.user, chance.choice(("", *SESSIONS)))
            case 5:
                self.forget_someone(who, chance.choice(self.people).org, "", "")
            case 6 if self.requests:
                request = chance.choice(list(self.requests))
                self.forget_request(who if chance.random() < 0.3 else self.requests[request][0], request)
            case 7 if who.alive:
                self.access.keys.revoke(who.key_id)
                who.alive = False
            case 8:
                group = chance.choice(GROUPS)
                change = self.access.groups.remove if group in who.groups else self.access.groups.add
                change(who.org, who.user, group)
                who.groups ^= {group}
            case 9:
                self.forget_someone(who, who.org, who.user, chance.choice(("", *SESSIONS)))
            case _:
                self.ask(who, self.drawn(who, chance))

    def owner(self, paper: Paper) -> Person:
        return next(p for p in self.people if (p.org, p.user) == (paper.org, paper.user))

    def drawn(self, who: Person, chance: Random) -> Ask:
        """A request: mostly of what the person may ask for, and of texts that others use too."""
        levels: list[str | None] = [None, None, "session", "user"]
        levels += [
            level for level in ("org", "org", "public") if who.may_publish(level) or chance.random() < 0.05
        ]

        def parts(texts: Sequence[str], count: int) -> list[tuple[str, str | None]]:
            return [(chance.choice(texts), chance.choice(levels)) for _ in range(count)]

        system = parts(LINES, chance.choice((0, 1, 1, 2)))
        if chance.random() < 0.5:
            system = sorted(system, key=lambda part: LEVELS.index(part[1] or "user"))
        papers: list[Paper | tuple[str, str | None]] = []
        if chance.random() < 0.5 and self.papers:
            papers += [p for p in chance.sample(self.papers, min(6, len(self.papers))) if p.open_to(who)][:2]
            if chance.random() < 0.1:
                papers = [chance.choice(self.papers)]
        if chance.random() < 0.15:
            papers.append(parts(PAPERS, 1)[0])
            chance.shuffle(papers)
        turns = [parts(QUESTIONS, chance.choice((1, 1, 2))) for _ in range(chance.choice((1, 1, 2)))]
        ask = Ask(system, turns, papers, keep=chance.random() < 0.9)
        if chance.random() < 0.2:
            ask.default = chance.choice(levels)
        if "session" in ask.levels() or chance.random() < 0.2:
            ask.session = chance.choice(SESSIONS) if chance.random() < 0.97 else ""
        return ask


def answered(text: str, place: Place) -> list[tuple[str, Place | None]]:
    """The template's text between two turns of the user, and the assistant's answer in it."""
    before, said, after = text.partition("Far.")
    return [(before, None), (said, place), (after, None)]


def hidden(session: str) -> str:
    """What a session is called inside, where its name is not to be read."""
    return hashlib.sha256(session.encode()).hexdigest() if session else ""


def common(a: bytes, b: bytes) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@cache
def traced(each: Scope | str) -> Place | str:
    """A scope as a place, and the tag of a request as its id."""
    if isinstance(each, Scope):
        return Place(each.level, each.org, each.user, each.session, each.resource)
    return each.rpartition(" ")[2]


def settle(engine: Engine) -> None:
    """Wait for the engine's thread to have finished what it does."""
    engine.cached_tokens(plain(Span((3,))))


@pytest.fixture(scope="module")
def server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Access, httpx.Client]]:
    folder = tmp_path_factory.mktemp("long") / "tiny"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    with (
        Access(":memory:") as access,
        Engine(str(folder), dtype="float32", kv_tokens=393_216, secrets=access.secrets) as engine,
        serving(engine, access) as url,
        httpx.Client(base_url=url, timeout=DEADLINE) as http,
    ):
        yield engine, access, http


@pytest.fixture
def fresh(
    server: tuple[Engine, Access, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], World]:
    engine, access, http = server
    worlds: list[World] = []
    acquire = engine.index.store.acquire

    def noting(block: Block, use: Use) -> None:
        worlds[-1].read.append(block)
        acquire(block, use)

    monkeypatch.setattr(engine.index.store, "acquire", noting)

    def made(name: str) -> World:
        worlds.append(World(engine, access, http, name))
        return worlds[-1]

    return made


def test_a_thousand_requests(fresh: Callable[[str], World]) -> None:
    """30 principals of 5 organisations: each answer, and each count of hits, is what the rules say."""
    world, chance = fresh("org"), Random(5)
    while world.asked < 1_000:
        world.happen(chance)
    stats = world.engine.stats()
    assert stats.evicted_blocks == 0, "what is evicted would be a miss that the model does not know of"
    assert world.refused > 30
    assert world.hits > 100
    assert len(world.papers) > 10
    assert len(world.forgotten) > 10


numbers = itertools.count()


@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_whatever_happens(fresh: Callable[[str], World]) -> None:
    """The same, with the events drawn by hypothesis, which shortens what goes wrong."""

    class Events(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = fresh(f"org-{next(numbers)}")

        @rule(chance=st.randoms(use_true_random=False))
        def happen(self, chance: Random) -> None:
            self.world.happen(chance)

    run_state_machine_as_test(  # pyright: ignore[reportUnknownMemberType]
        Events, settings=settings(max_examples=40, stateful_step_count=50, deadline=None)
    )
