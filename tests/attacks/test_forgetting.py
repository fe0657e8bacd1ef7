"""Forgetting as an oracle and as a weapon, and what it leaves behind: in the pool, in the file, in what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attack_fixtures import PEOPLE, Json, Person, Site, Town, alike, cached
from ostinato import Engine, SamplingParams
from ostinato.access.access import Access
from ostinato.access.principal import Principal
from ostinato.access.scope import Scope
from ostinato.cache.block import Block
from ostinato.server.lookup import Lookup
from server_fixtures import CHAT, DEADLINE, idle, serving, wait_until

RULES = "Answer in one short sentence, and say so when you do not know. Hooli is never to be named to anyone at all. "
QUESTION = (
    "When is the merger signed, and who of us knows about it by now? Tell me no more than that, please."
)
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ANN = Principal("acme", "ann", permissions=frozenset({"publish:org"}))
BOB = Principal("acme", "bob", permissions=frozenset({"publish:org"}))


def said(question: str = QUESTION, rules: str = RULES) -> list[Json]:
    system = {"role": "system", "content": rules, "cache_control": {"type": "ephemeral", "scope": "org"}}
    return [system, {"role": "user", "content": question}]


def ask(site: Site, who: str, question: str = QUESTION, **fields: Any) -> httpx.Response:
    return site[who].ask(CHAT, **({"messages": said(question)} | fields))


def slots(engine: Engine, *blocks: Block) -> list[int]:
    size = engine.index.pool.block_size
    return [block.number * size + place for block in blocks for place in range(size)]


def blank(engine: Engine, places: list[int]) -> bool:
    return not torch.count_nonzero(engine.index.pool.kv[:, :, :, places])


def free_slots_are_blank(engine: Engine) -> bool:
    """Whether nothing is left in slots that hold nothing now. The engine must be idle."""
    held = set(slots(engine, *engine.index.store.blocks.values()))
    return blank(engine, sorted(set(range(engine.index.pool.slots)) - held))


# -- counts, and others' work ---------------------------------------------------------------------------------


@pytest.mark.parametrize("once", [False, True])
def test_the_count_is_of_ones_own(town: Town, town_once: Town, once: bool) -> None:
    """Who first computed an organisation's prompt does not learn how much others have built on it."""
    told: list[Any] = []
    for sent in (True, False):
        site = (town_once if once else town).site()
        first = ask(site, "alice").json()["id"]
        if sent:
            for who in ("bob", "dave"):
                ask(site, who, QUESTION + " And where?")
                ask(
                    site, who, "Something else altogether, and rather long, so that it has blocks of its own."
                )
        second = ask(site, "alice", "And then?").json()["id"]
        counts = [site["alice"].forget(request=each) for each in (first, second)]
        told.append([counts, site["alice"].forget(user="alice")])
        assert counts[0]["tokens"] <= len(site.engine.encode(said()).token_ids)
        assert counts[0]["tokens"] > 0
    assert alike(told)


@pytest.mark.parametrize("once", [False, True])
def test_a_colleague_keeps_what_it_has_built_on_it(town: Town, town_once: Town, once: bool) -> None:
    told: list[Any] = []
    for forgets in (True, False):
        site = (town_once if once else town).site()
        first = ask(site, "alice").json()["id"]
        ask(site, "bob")
        if forgets:
            assert site["alice"].forget(request=first)["tokens"] > 0
        told.append(cached(ask(site, "bob")))
        assert told[-1] == len(site.engine.encode(said()).token_ids) - 1
    assert alike(told)


def test_what_nobody_else_holds_is_erased(site: Site) -> None:
    engine = site.engine
    first = ask(site, "alice").json()["id"]
    shared = [block for block in engine.index.store.blocks.values() if block.scope.level == "org"]
    assert shared
    mine = [block for block in engine.index.store.blocks.values() if block.scope.user == "alice"]
    ask(site, "bob")
    site["alice"].forget(request=first)
    assert blank(engine, slots(engine, *mine))
    assert not blank(engine, slots(engine, *shared))
    site["bob"].forget(request=site["bob"].answers[-1].json()["id"])
    assert blank(engine, slots(engine, *shared))
    left = {block.scope for block in engine.index.store.blocks.values()}
    assert not any(scope.org.startswith("acme") for scope in left)


def test_forgetting_the_same_twice_tells_and_takes_nothing(site: Site) -> None:
    first = ask(site, "alice").json()["id"]
    ask(site, "bob")
    assert site["alice"].forget(request=first)["tokens"] > 0
    again = site["alice"].send("POST", "/v1/forget", {"request": first})
    assert again.status_code == 404 or again.json()["tokens"] == 0
    assert cached(ask(site, "bob")) == len(site.engine.encode(said()).token_ids) - 1


def test_what_a_user_forgets_of_itself_is_not_its_organisations(site: Site) -> None:
    ask(site, "alice")
    rules = cached(ask(site, "bob"))
    site["alice"].forget(user="alice")
    assert cached(ask(site, "dave")) == rules


def test_a_shorter_text_beside_ones_own_longer(town_once: Town) -> None:
    """A tail that somebody else has sent is not one's own to count, though one's own longer text begins with it."""
    told: list[Any] = []
    for sent in (True, False):
        site = town_once.site()
        if sent:
            site["alice"].complete(QUESTION[:55], "org")
        site["bob"].complete(QUESTION[:60], "org")
        shorter = site["bob"].complete(QUESTION[:55], "org").json()["id"]
        told.append(site["bob"].forget(request=shorter))
    assert alike(told)


def document(site: Site, who: str, **fields: Any) -> str:
    answer = site[who].send("POST", "/v1/documents", {"text": RULES, "name": "plan", "scope": "org"} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def about(id: str, question: str = QUESTION) -> list[Json]:
    file = {"type": "document", "source": {"type": "file", "file_id": id}}
    return [{"role": "user", "content": [file, {"type": "text", "text": question}]}]


@pytest.mark.parametrize("how", ["delete", "forget"])
@pytest.mark.parametrize("used", [False, True])
def test_deleting_a_document_does_not_tell_how_much_was_asked(town: Town, how: str, used: bool) -> None:
    """Neither whether colleagues have asked about it, nor the length of what they asked; and all of that goes."""
    told: list[Any] = []
    for questions in ([QUESTION, QUESTION * 2], []):
        site = town.site()
        alice, id = site["alice"], document(site, "alice", readers=["user:bob"])
        if used:
            ask(site, "alice", messages=about(id))
        for question in questions:
            assert cached(ask(site, "bob", messages=about(id, question))) >= 0
        left = len(site.engine.index)
        if how == "delete":
            told.append(site.told(alice.send("DELETE", f"/v1/documents/{id}")))
        else:
            told.append(site.anywhere(str(alice.forget(document=id))).replace(id, "ID"))
        assert not any(id in str(block.lineage) for block in site.engine.index.store.blocks.values())
        assert not questions or left > len(site.engine.index)
        wait_until(lambda site=site: idle(site.engine))
        assert free_slots_are_blank(site.engine)
    assert alike(told)


# -- what is left ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def little(tiny_model: Path) -> Iterator[Engine]:
    """With a pool that a few requests fill."""
    with Engine(str(tiny_model), dtype="float32", kv_tokens=768, max_batch_tokens=64) as engine:
        engine.index.pool.kv.zero_()  # memory is given as it is
        yield engine


def asked(engine: Engine, prompt: list[int], who: Principal = ANN, **options: Any) -> int:
    return engine.generate(prompt, ONE, principal=who, **options).usage.cached_tokens


def test_what_was_evicted_before_it_is_forgotten(little: Engine) -> None:
    prompt = list(range(3, 131))
    asked(little, prompt)
    mine = [block for block in little.index.store.blocks.values() if block.scope.user == "ann"]
    places = slots(little, *mine)
    kept = little.index.pool.kv[:, :, :, places].clone()
    evicted = little.index.evicted_blocks
    for start in range(3, 13):
        asked(little, [start, *range(140, 280)], BOB)
    assert little.index.evicted_blocks > evicted
    wait_until(lambda: idle(little))
    assert free_slots_are_blank(little)
    now = little.index.pool.kv[:, :, :, places]
    assert not (now == kept).all(dim=(0, 1, 2, 4)).any(), "its slots are others' now, or blank"
    little.forget(lambda scope: scope.user == "ann")
    assert free_slots_are_blank(little)


def test_what_a_longer_block_has_replaced(little: Engine) -> None:
    """A tail goes when a block is published that begins with it."""
    little.forget(lambda _: True)
    stream = little.stream(list(range(3, 24)), SamplingParams(max_tokens=40, ignore_eos=True), principal=ANN)
    assert sum(len(chunk.token_ids) for chunk in stream) == 40
    asked(little, list(range(3, 24)))
    asked(little, list(range(3, 60)))
    wait_until(lambda: idle(little))
    assert free_slots_are_blank(little)
    little.forget(lambda scope: scope.user == "ann")
    assert not torch.count_nonzero(little.index.pool.kv)


requests = st.tuples(
    st.sampled_from((3, 3, 3, 50)),  # where the prompt begins, so that many share one
    st.integers(1, 150),
    st.integers(1, 12),
    st.sampled_from(("user", "session", "org")),
    st.sampled_from((None, None, 0, 0.001, 3600)),
    st.sampled_from((ANN, BOB)),
)
whats = st.sampled_from(("ask", "ask", "ask", "leave", "forget user", "forget request", "forget org"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(whats, requests), min_size=2, max_size=10))
def test_free_slots_are_blank_whatever_happens(little: Engine, traffic: list[tuple[str, Any]]) -> None:
    """Evicted, expired, replaced, cancelled, forgotten, preempted: the KV of none of it stays."""
    streams: list[Any] = []
    for number, (what, (start, size, answer, scope, ttl, who)) in enumerate(traffic):
        if what == "forget user":
            little.forget(lambda scope, who=who: scope.user == who.user, principal=who)
        elif what == "forget request":
            little.forget(lambda _: False, request_id=f"r-{number - 1}", principal=who)
        elif what == "forget org":
            little.forget(lambda scope: scope == Scope("org", "acme"), principal=who)
        else:
            options: Any = {} if ttl is None else {"ttl": ttl}
            params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
            stream = little.stream(
                list(range(start, start + size)),
                params,
                principal=who,
                scope=scope,
                session="s",
                request_id=f"r-{number}",
                **options,
            )
            streams.append(stream)
            if what == "leave":
                stream.close()
    for stream in streams:
        list(stream)
    wait_until(lambda: idle(little))
    assert free_slots_are_blank(little)
    little.forget(lambda _: True)
    assert not torch.count_nonzero(little.index.pool.kv)


def test_a_document_that_is_deleted_while_it_is_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look-up of its text and its tokens: the answer is given, and nothing of it is kept, nor its secret."""
    with (
        Access(":memory:") as access,
        Engine(str(tiny_model), dtype="float32", kv_tokens=2048, secrets=access.secrets) as engine,
        serving(engine, access) as url,
        httpx.Client(base_url=url, timeout=DEADLINE) as http,
    ):
        engine.index.pool.kv.zero_()
        site = Site(engine, access, http, 0)
        for name in ("alice", "bob"):
            site.join(name, *PEOPLE[name])
        resolve = Lookup.resolve

        def deleted(self: Lookup, *args: Any, **options: Any) -> Any:
            found = resolve(self, *args, **options)
            if deleting:
                assert deleting.pop()().status_code == 200
            return found

        monkeypatch.setattr(Lookup, "resolve", deleted)
        deleting: list[Any] = []
        for how in ("delete", "forget"):
            id = document(site, "alice", name=how)

            def delete(id: str = id, how: str = how) -> httpx.Response:
                if how == "delete":
                    return site["alice"].send("DELETE", f"/v1/documents/{id}")
                return site["alice"].send("POST", "/v1/forget", {"document": id})

            deleting.append(delete)
            answer = ask(site, "bob", messages=about(id))
            assert answer.json()["usage"]["prompt_tokens"] > len(RULES), "it was asked about in time"
            assert not deleting
            assert not any(id in str(block.lineage) for block in engine.index.store.blocks.values())
            assert not any(id.encode() in row[0] for row in access.state.rows("SELECT scope FROM secrets"))
            wait_until(lambda: idle(engine))
            assert free_slots_are_blank(engine)
            refused = site["bob"].send("GET", f"/v1/requests/{answer.json()['id']}/cache")
            assert refused.status_code == 404 or RULES[:12] not in refused.text


def test_a_prompt_that_is_forgotten_while_it_is_prepared(tiny_model: Path) -> None:
    """Neither a user's own, nor one read from somewhere before, whatever was prepared meanwhile."""
    with Engine(str(tiny_model), dtype="float32", kv_tokens=2048) as engine:
        prompt = list(range(3, 103))
        epoch = engine.epoch
        sequence = engine.prepare(prompt, ONE, principal=ANN)
        engine.forget(lambda scope: scope.user == "ann", principal=ANN)
        late = engine.prepare(prompt, ONE, principal=ANN, epoch=epoch)
        others = engine.prepare(prompt, ONE, principal=BOB, epoch=epoch)
        for each in (sequence, late, others):
            follow(engine, each)
        assert asked(engine, prompt) == 0
        assert asked(engine, prompt, BOB) == 99
        assert {block.scope.user for block in engine.index.store.blocks.values()} == {"ann", "bob"}


def follow(engine: Engine, sequence: Any) -> None:
    async def followed() -> None:
        async for _ in engine.afollow(sequence):
            pass

    asyncio.run(followed())


# -- what is kept of texts beside their KV ----------------------------------------------------------------------


def test_grammars_go_with_their_user(site: Site) -> None:
    schema = {"type": "object", "properties": {"hooli_is_the_secret": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    kept = site.engine._intake._grammars._compiled  # pyright: ignore[reportPrivateUsage]
    for who in ("alice", "bob"):
        ask(site, who, response_format=form)
    assert sorted(owner.user for owner, source, _ in kept if owner and "hooli" in source) == ["alice", "bob"]
    site["alice"].forget(user="alice")
    assert [owner.user for owner, source, _ in kept if owner and "hooli" in source] == ["bob"]


def test_layouts_go_with_their_schema(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Lookup] = []
    init = Lookup.__init__

    def noted(self: Lookup, *args: Any) -> None:
        made.append(self)
        init(self, *args)

    monkeypatch.setattr(Lookup, "__init__", noted)
    with (
        Access(":memory:") as access,
        Engine(str(tiny_model), dtype="float32", kv_tokens=2048) as engine,
        serving(engine, access) as url,
        httpx.Client(base_url=url, timeout=DEADLINE) as http,
    ):
        site = Site(engine, access, http, 0)
        site.join("alice", *PEOPLE["alice"])
        alice: Person = site["alice"]
        kept = made[0]._layouts  # pyright: ignore[reportPrivateUsage]

        def register() -> str:
            pml = '<schema name="plan"><module name="m">Hooli is the secret.</module></schema>'
            answer = alice.send("PUT", "/v1/schemas/plan", {"pml": pml})
            assert answer.status_code in (200, 201), answer.text
            alice.ask(CHAT, pml='<prompt schema="plan"><m/>When?</prompt>')
            assert any("Hooli" in content for _, (_, content), _ in kept)
            return answer.json()["id"]

        register()
        assert alice.send("DELETE", "/v1/schemas/plan").status_code == 200
        assert not len(kept)
        for what in ("user", "document"):
            id = register()
            alice.forget(**{what: "alice" if what == "user" else id})
            assert not len(kept)
