"""Scopes in the engine: who may reuse what, for how long, and what is left when it is forgotten."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ostinato import Engine, SamplingParams
from ostinato.access.errors import ForbiddenError
from ostinato.access.principal import LOCAL, Principal
from ostinato.access.scope import PUBLIC, Level, Scope, narrower
from ostinato.errors import InvalidRequestError
from ostinato.prompt.scopes import Asker, scoped
from ostinato.prompt.span import Chain, Prompt, Span, View, plain
from server_fixtures import idle, wait_until

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ANN = Principal("acme", "ann", permissions=frozenset({"publish:org"}))
BOB = Principal("acme", "bob", permissions=frozenset({"publish:org"}))
CID = Principal("core", "ann", permissions=frozenset({"publish:org", "publish:public"}))

SYSTEM = "You know all about the birds of the coast, and you answer in one short sentence. " * 2
QUESTION = "How far does an arctic tern fly in one year, there and back?"


LEAD = 19
"""Tokens that the template writes before the system prompt: more than a block, so everybody shares them."""


def chat(system_scope: str | None = None, question: str = QUESTION, **control: Any) -> list[dict[str, Any]]:
    system: dict[str, Any] = {"role": "system", "content": SYSTEM}
    if system_scope is not None or control:
        system["cache_control"] = {"type": "ephemeral", "scope": system_scope, **control}
    return [system, {"role": "user", "content": question}]


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=8192) as engine:
        yield engine


@pytest.fixture
def tiny(small: Engine) -> Engine:
    small.clear_cache()
    return small


def cached(engine: Engine, prompt: Any, principal: Principal, **options: Any) -> int:
    return engine.generate(prompt, ONE, principal=principal, **options).usage.cached_tokens


def before_the_question(engine: Engine) -> int:
    """Tokens of `chat()` before the user's text."""
    spans = engine.encode(chat()).chains[0].spans
    return sum(len(span.token_ids) for span in spans[: [span.kind for span in spans].index("user")])


def test_a_prompt_is_its_users_unless_it_says_more(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    assert cached(tiny, prompt, ANN) == 0
    assert cached(tiny, prompt, ANN) == 99
    for other in (BOB, CID, LOCAL):
        assert cached(tiny, prompt, other) == 0
    for ours in (ANN, BOB, CID, LOCAL):
        assert cached(tiny, prompt, ours) == 99


def test_a_session_is_its_users(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    assert cached(tiny, prompt, ANN, session="s", scope="session") == 0
    assert cached(tiny, prompt, ANN, session="s", scope="session") == 99
    assert cached(tiny, prompt, ANN, session="t", scope="session") == 0
    assert cached(tiny, prompt, BOB, session="s", scope="session") == 0
    assert cached(tiny, prompt, ANN, session="s") == 0, "the session's text is not the user's"
    with pytest.raises(InvalidRequestError, match="needs a session"):
        tiny.generate(prompt, ONE, principal=ANN, scope="session")


def test_the_organisations_beginning_is_shared_and_the_rest_is_not(tiny: Engine) -> None:
    assert cached(tiny, chat("org"), ANN) == 0
    assert cached(tiny, chat("org"), BOB) == before_the_question(tiny), "to the exact token"
    assert cached(tiny, chat("org"), CID) == LEAD
    whole = len(tiny.encode(chat()).token_ids)
    assert cached(tiny, chat("org"), BOB) == whole - 1
    assert cached(tiny, chat(), BOB) == LEAD, "in his own scope it is another text"


def test_publishing_needs_a_permission(tiny: Engine) -> None:
    nobody = Principal("acme", "eve")
    for level in ("org", "public"):
        with pytest.raises(ForbiddenError, match=f"publish:{level}"):
            tiny.generate(chat(level), ONE, principal=nobody)
        with pytest.raises(ForbiddenError, match=f"publish:{level}"):
            tiny.generate("text", ONE, principal=nobody, scope=level)
    with pytest.raises(ForbiddenError, match="publish:public"):
        tiny.generate(chat("public"), ONE, principal=ANN)
    assert len(tiny.index) == 0


def test_what_the_template_writes_is_everybodys(engine: Engine) -> None:
    """256 tenants share the model's own system prompt without being asked, and nothing else."""
    engine.clear_cache()
    question = [{"role": "user", "content": QUESTION}]
    assert cached(engine, question, ANN) == 0
    lead = engine.encode(question).chains[0].spans[0]
    assert lead.kind == "template"
    assert cached(engine, question, CID) == len(lead.token_ids)
    named = [{"role": "user", "content": QUESTION, "name": "ann"}]
    assert cached(engine, named, CID) == 0, "a template may write the name anywhere"


def test_template_text_with_names_or_calls_is_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.name or '' }}{{ m.tool_calls or '' }}"
        "\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    )
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    secret = {"name": "a name that says a good deal more than anybody else should ever come to know of it"}
    control = {"cache_control": {"scope": "org"}}
    calls = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "secret"}}}]}
    for messages in (
        [{"role": "user", "content": "Hi", **secret}],
        [{"role": "system", "content": SYSTEM, **control}, calls, {"role": "user", "content": "Hi"}],
        [{"role": "system", "content": SYSTEM, **control}, {"role": "user", "content": "Hi", **secret}],
        [{"role": "system", "content": SYSTEM, **control}, {"role": "user", "content": "Hi"}, calls],
        [{"role": "user", "content": "Hi"}, calls],
    ):
        prompt = scoped(engine.encode(messages), Asker(ANN), smallest=1)
        for chain in prompt.chains:
            assert chain.scope is not None
            if chain.scope.level != "user":
                text = engine.tokenizer.decode(chain.token_ids)
                assert "secret" not in text
                assert "a name" not in text


def test_no_token_holds_text_of_two_scopes(engine: Engine) -> None:
    parts = [
        {"type": "text", "text": "The word is inter", "cache_control": {"scope": "org"}},
        {"type": "text", "text": "national, and nobody else may know."},
    ]
    org, own = scoped(engine.encode([{"role": "system", "content": parts}]), Asker(ANN), smallest=99).chains
    assert engine.tokenizer.decode(org.token_ids).endswith("The word is inter")
    assert engine.tokenizer.decode(own.token_ids).startswith("national, ")
    alone = engine.encode([{"role": "system", "content": [parts[0], {"type": "text", "text": "mittent"}]}])
    assert scoped(alone, Asker(ANN), smallest=99).chains[0].token_ids[:-6] == org.token_ids[:-6]


LEVELS: list[tuple[list[Level | Scope | None], list[str]]] = [
    (["org", None, "org"], ["org:acme", "user:acme/ann"]),
    ([None, "org"], ["user:acme/ann"]),
    ([PUBLIC, "org", None, "session"], ["public", "org:acme", "user:acme/ann", "session:acme/ann/s"]),
    (["session", "public"], ["session:acme/ann/s"]),
]


@pytest.mark.parametrize(("wanted", "made"), LEVELS)
def test_scopes_narrow_along_a_chain(wanted: list[Level | Scope | None], made: list[str]) -> None:
    permitted = Principal("acme", "ann", permissions=frozenset({"publish:org", "publish:public"}))
    spans = [Span((number,) * 20, "user", scope) for number, scope in enumerate(wanted)]
    prompt = scoped(plain(*spans), Asker(permitted, "s"), smallest=16)
    assert [str(chain.scope) for chain in prompt.chains] == made
    assert prompt.token_ids == plain(*spans).token_ids
    position = 0
    for number, chain in enumerate(prompt.chains):
        assert chain.start == position
        assert chain.sees == tuple(View(earlier) for earlier in range(number))
        position += len(chain.token_ids)


def test_views_of_a_cut_chain_see_the_same_tokens() -> None:
    spans = (Span((1,) * 20, "user", "org"), Span((2,) * 20, "user"))
    for start, end in ((0, None), (5, 30), (20, 40), (0, 20), (25, None), (3, 7)):
        later = Chain((Span((3,) * 4),), 40, (View(0, start, end),))
        *pieces, last = scoped(Prompt((Chain(spans), later)), Asker(ANN), smallest=1).chains
        whole = [token for chain in pieces for token in chain.token_ids]
        seen = [token for view in last.sees for token in pieces[view.chain].token_ids[view.start : view.end]]
        assert seen == whole[start:end]


def test_a_module_takes_the_narrower_scope_of_what_it_sees() -> None:
    document = Scope("org", "acme", resource="doc_1")
    own = ANN.scope("user")
    for front, expected in ((PUBLIC, document), ("org", document), (None, own)):
        chains = (
            Chain((Span((1,) * 20, "system", front),)),
            Chain((Span((2,) * 20, "document"),), 20, (View(0),), name="d", scope=document),
        )
        assert scoped(Prompt(chains), Asker(ANN), smallest=1).chains[1].scope == expected
    theirs = Scope("user", "acme", "bob", resource="doc_2")
    assert narrower(theirs, own, asker=own) == own
    assert narrower(theirs, document, asker=own) == own, "its readers need not be the document's"
    assert narrower(Scope("org", "acme", resource="doc_3"), document, asker=own) == own


def test_the_same_answer_whatever_the_scopes(exact_engine: Engine) -> None:
    params = SamplingParams(max_tokens=24, temperature=0)
    plain_reply = exact_engine.generate(chat(), params, principal=LOCAL)
    parts = [{"type": "text", "text": SYSTEM, "cache_control": {"scope": "org"}}]
    for _ in range(2):
        for principal in (ANN, BOB, CID):
            for messages in (chat(), chat("org"), [{"role": "system", "content": parts}, chat()[1]]):
                reply = exact_engine.generate(messages, params, principal=principal)
                assert reply.token_ids == plain_reply.token_ids


def erased(engine: Engine, slots: list[int]) -> bool:
    return not torch.count_nonzero(engine.index.pool.kv[:, :, :, slots])


def slots_of(engine: Engine, matches: Any) -> list[int]:
    size = engine.index.pool.block_size
    numbers = [block.number for block in engine.index.store.blocks.values() if matches(block)]
    return [number * size + i for number in numbers for i in range(size)]


def test_what_is_forgotten_is_gone_with_all_derived_from_it(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    cached(tiny, chat("org"), ANN)
    cached(tiny, prompt, ANN)
    cached(tiny, prompt, ANN, session="s", scope="session")
    cached(tiny, chat("org"), BOB)
    mine = slots_of(tiny, lambda block: block.scope.user == "ann")
    org = slots_of(tiny, lambda block: block.scope.level == "org")
    assert mine
    assert org
    told = tiny.forget(lambda scope: (scope.org, scope.user) == ("acme", "ann"))
    assert told.blocks == len(mine) / tiny.index.pool.block_size
    assert erased(tiny, mine)
    assert not erased(tiny, org)
    assert not slots_of(tiny, lambda block: block.scope.user == "ann")
    assert cached(tiny, prompt, ANN) == 0
    bobs = len(tiny.encode(chat()).token_ids) - 1
    assert cached(tiny, chat("org"), BOB) == bobs
    theirs = slots_of(tiny, lambda block: block.scope.user == "bob")
    tiny.forget(lambda scope: scope == Scope("org", "acme"))
    assert erased(tiny, theirs), "what saw the organisation's text goes with it"
    assert erased(tiny, org)
    assert cached(tiny, chat("org"), BOB) == LEAD


def test_a_request_is_forgotten_with_what_goes_on_from_it(tiny: Engine) -> None:
    prompt = list(range(3, 99))
    cached(tiny, prompt, ANN, request_id="first")
    cached(tiny, [*prompt, *range(200, 250)], ANN, request_id="second")
    cached(tiny, prompt[:40] + list(range(250, 300)), ANN, request_id="third")
    tiny.forget(lambda _: False, request_id="second", principal=ANN)
    assert cached(tiny, [*prompt, *range(200, 250)], ANN) == len(prompt)
    for other in (BOB, CID, LOCAL):
        assert tiny.forget(lambda _: False, request_id="first", principal=other).blocks == 0
    tiny.forget(lambda _: False, request_id="first", principal=ANN)
    assert len(tiny.index) == 0, "the others continue what the first has computed"
    assert tiny.explain("first", ANN) is None


def test_what_is_forgotten_while_it_runs_is_not_kept(tiny: Engine) -> None:
    tiny.index.pool.kv.zero_()
    prompt = list(range(3, 103))
    stream = tiny.stream(prompt, SamplingParams(max_tokens=400, ignore_eos=True), principal=ANN)
    next(stream)
    waiting = [
        threading.Thread(target=cached, args=(tiny, [*prompt, number], ANN)) for number in range(200, 203)
    ]
    for thread in waiting:
        thread.start()
    tiny.forget(lambda scope: scope.user == "ann")
    assert sum(len(chunk.token_ids) for chunk in stream) > 300, "the request itself goes on"
    for thread in waiting:
        thread.join()
    wait_until(lambda: idle(tiny))
    # What came in after the forgetting is kept; all other slots are blank.
    kept = slots_of(tiny, lambda _: True)
    assert len(kept) <= 3 * 112
    assert erased(tiny, sorted(set(range(tiny.index.pool.slots)) - set(kept)))


def test_a_time_to_live(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    cached(tiny, prompt, ANN, ttl=1000)
    cached(tiny, prompt[::-1], ANN, ttl=0.05)
    slots = slots_of(tiny, lambda block: block.expires < 1e9 and block.token_ids[0] == prompt[-1])
    wait_until(lambda: tiny.index.expired_blocks > 0)
    wait_until(lambda: len(tiny.index) == 7)
    assert slots
    assert erased(tiny, slots)
    assert cached(tiny, prompt[::-1], ANN) == 0
    assert cached(tiny, prompt, ANN) == 99
    assert cached(tiny, list(range(270, 310)), ANN, ttl=0) == 0
    assert cached(tiny, list(range(270, 310)), ANN) == 0
    assert cached(tiny, list(range(270, 310)), ANN) == 39


def test_times_get_shorter_along_a_chain_and_never_pass_the_limit() -> None:
    spans = [Span((1,) * 20, "system", "org", 3600), Span((2,) * 20, "user", None, 60), Span((3,) * 20)]
    prompt = scoped(plain(*spans), Asker(ANN, ttl=7200, limits={"org": 1800}), smallest=1)
    assert [span.ttl for chain in prompt.chains for span in chain.spans] == [1800, 60, 60]
    assert [
        span.ttl for chain in scoped(plain(*spans[1:]), Asker(ANN), smallest=1).chains for span in chain.spans
    ] == [60, 60]


def test_first_reuse_by_another_is_served_as_a_miss(tiny_model: Path) -> None:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=8192, release_once=True) as engine:
        shared = before_the_question(engine)
        whole = len(engine.encode(chat()).token_ids)
        assert cached(engine, chat("org"), ANN) == 0
        assert cached(engine, chat("org"), ANN) == whole - 1
        assert cached(engine, chat("org"), BOB, request_id="probe") == LEAD, (
            "nobody can sense it by asking once"
        )
        told = engine.explain("probe", BOB)
        assert told is not None
        assert told.spans[1].miss is not None
        assert told.spans[1].miss.reason == "never seen", "as of a text that nobody sent"
        eve = Principal("acme", "eve", permissions=frozenset({"publish:org"}))
        assert cached(engine, chat("org"), eve) == shared, "two have written it: it is no secret of one"
        assert cached(engine, chat("org", "Another question?"), ANN) >= shared
