"""Who may reuse what, against an independent model of the rules: random principals, documents, grants and forgettings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import Engine, SamplingParams
from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope, narrower
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.scopes import Asker, scoped
from ostinato.prompt.schema import SchemaPrompt, Turn
from ostinato.prompt.span import Span, plain
from ostinato.server.library import Library
from ostinato.server.openai import ChatCompletionRequest

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
    access.resources.forget(lambda _: True)
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
    resolved = Library(engine, access).resolve(prompt, principal, mode=mode, link_tokens=16)  # type: ignore[arg-type]
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
    assert any(each.resource for block in tiny.index.store.blocks.values() for each in scopes_of(block.lineage))
    for block in tiny.index.store.blocks.values():
        if any(each.resource in documents for each in scopes_of(block.lineage)):
            assert block.scope.level == "user", str(block.scope)
        assert block.scope.level == "user" or b"harbour" not in tiny.tokenizer.decode(block.token_ids).encode()


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
        ({"content": [DOCUMENT, {"type": "text", "text": "a", "cache_control": {"scope": "user"}}, {"type": "text", "text": "b"}]}, "user"),
        ({"content": [DOCUMENT, {"type": "text", "text": "a", "cache_control": {"ttl": "1h"}}], "cache_control": {"scope": "session"}}, "session"),
        ({"content": [DOCUMENT, {"type": "text", "text": "a"}]}, "org"),
    ],
)
def test_a_message_beside_documents_has_the_narrowest_scope_of_its_parts(message: Any, levels: str) -> None:
    """Also where the whole request asks for a wider one, or a part says only how long it may stay."""
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
        tiny.generate([{"role": role, "content": "What is shown begins behind what all begin with."}], ONE, principal=BOB)
    chat = [{"role": "user", "content": "My secret is a session's."}]
    tiny.generate(chat, ONE, principal=ALICE, session="s", scope="session", request_id="r1")
    prompt = ChatCompletionRequest(
        model="m",
        messages=[
            {"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": made.id}}]}
        ],
    ).prompts()[0]
    resolved = Library(tiny, access).resolve(prompt, ALICE, link_tokens=16)  # type: ignore[arg-type]
    tiny.generate(resolved.prompt, ONE, principal=ALICE, request_id="r2")
    assert "secret" in repr(tiny.explain("r1", ALICE))
    assert "The plan is" in repr(tiny.explain("r2", ALICE))
    tiny.forget(lambda scope: scope.level == "session")
    assert tiny.explain("r1", ALICE) is None
    assert tiny.explain("r2", ALICE) is not None
    tiny.forget(lambda scope: scope.resource == made.id)
    assert tiny.explain("r2", ALICE) is None
