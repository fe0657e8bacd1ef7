"""Explanations: every miss has its reason, and no reason tells what is not the asker's to know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ostinato import Engine, SamplingParams
from ostinato.access.principal import Principal
from ostinato.engine.explain import Explanation, Miss
from server_fixtures import wait_until

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
ANN = Principal("acme", "ann", permissions=frozenset({"publish:org"}))
BOB = Principal("acme", "bob", permissions=frozenset({"publish:org"}))

RULES = "Answer briefly, and say so when you do not know. " * 3
QUESTION = {"role": "user", "content": "How far does a swift fly?"}


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=2048, policy="lru") as engine:
        yield engine


@pytest.fixture
def tiny(small: Engine) -> Engine:
    small.clear_cache()
    return small


def ask(engine: Engine, prompt: Any, principal: Principal = ANN, **options: Any) -> Explanation:
    reply = engine.generate(prompt, ONE, principal=principal, request_id="asked", **options)
    told = engine.explain("asked", principal)
    assert told is not None
    assert told.cached_tokens == reply.usage.cached_tokens == sum(span.hit_tokens for span in told.spans)
    assert told.prompt_tokens == reply.usage.prompt_tokens == sum(span.tokens for span in told.spans)
    at = 0
    for span in told.spans:
        assert span.start == at
        at += span.tokens
        # All that is not hit has a reason, but for the very last token: its logits are wanted.
        left = span.tokens - span.hit_tokens
        assert left == 0 or span.miss is not None or (left == 1 and at == told.prompt_tokens)
    return told


def why(told: Explanation) -> Miss:
    return next(span.miss for span in told.spans if span.miss is not None and not span.miss.earlier)


def test_never_seen_and_hit(tiny: Engine) -> None:
    told = ask(tiny, [QUESTION])
    assert [span.kind for span in told.spans] == ["template", "user", "template"]
    assert {span.miss.reason for span in told.spans if span.miss} == {"never seen"}
    assert told.advice is None
    told = ask(tiny, [QUESTION])
    assert all(span.miss is None for span in told.spans)
    assert {span.tier for span in told.spans} == {"memory"}


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ("Today is 2026-11-29. " + RULES, "Today is 2026-11-30. " + RULES, "date or time"),
        ("It is 10:31 now. " + RULES, "It is 10:32 now. " + RULES, "date or time"),
        ("Session 8f14e45fceea167a. " + RULES, "Session 8f14e45fceea999a. " + RULES, "identifier"),
        ("You are kind. " + RULES, "You are stern. " + RULES, "system prompt differs"),
    ],
)
def test_diverged_with_advice(tiny: Engine, first: str, second: str, what: str) -> None:
    ask(tiny, [{"role": "system", "content": first}, QUESTION])
    told = ask(tiny, [{"role": "system", "content": second}, QUESTION])
    miss = why(told)
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    lead = told.spans[0].tokens
    assert miss.reason == "diverged"
    assert miss.at == lead + common, "a token of this model is a byte"
    assert second[common:].startswith(miss.yours)
    assert first[common:].startswith(miss.cached)
    assert miss.yours
    assert miss.cached
    assert told.advice is not None
    assert what in told.advice
    assert str(miss.at) in told.advice


def test_anothers_text_is_not_shown(tiny: Engine) -> None:
    def system(text: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": RULES + text, "cache_control": {"scope": "org"}}, QUESTION]

    ask(tiny, system("Ann's own words."), ANN)
    tiny.generate(system("Bob's."), ONE, principal=BOB, request_id="bobs")
    told = tiny.explain("bobs", BOB)
    assert told is not None
    assert why(told).reason == "diverged"
    assert why(told).cached == ""
    assert "Ann" not in repr(told)
    assert tiny.explain("bobs", ANN) is None


def test_a_scope_of_ones_own_is_named_and_no_other(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    ask(tiny, prompt, ANN, scope="org")
    told = ask(tiny, prompt, ANN)
    assert (why(told).reason, why(told).scope) == ("scope", "org:acme")
    assert told.advice is not None
    assert "org:acme" in told.advice
    tiny.clear_cache()
    ask(tiny, prompt, ANN)
    assert why(ask(tiny, prompt, BOB)).reason == "never seen"
    tiny.clear_cache()
    ask(tiny, prompt, ANN)
    assert why(ask(tiny, prompt, BOB, scope="org")).reason == "never seen"


def test_evicted(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    ask(tiny, prompt)
    for first in range(20):
        ask(tiny, [first, *range(3, 200)], BOB)
    told = ask(tiny, prompt)
    assert (why(told).reason, why(told).policy) == ("evicted", "lru")
    assert why(told).seconds_ago is not None
    assert told.advice is not None
    assert "--kv-tokens" in told.advice


def test_expired_and_not_kept(tiny: Engine) -> None:
    prompt = list(range(3, 103))
    ask(tiny, prompt, ttl=0.02)
    wait_until(lambda: len(tiny.index) == 0)
    told = ask(tiny, prompt)
    assert why(told).reason == "expired"
    assert told.advice is not None
    assert "ttl" in told.advice
    told = ask(tiny, list(range(200, 300)), ttl=0)
    assert why(told).reason == "caching off"


def test_what_is_forgotten_or_may_stay_for_a_time_is_not_quoted(tiny: Engine) -> None:
    def told_of(request: str) -> Explanation | None:
        return tiny.explain(request, ANN)

    for request, options in (("kept", {}), ("session", {"session": "s", "scope": "session"})):
        tiny.generate(list(range(3, 60)), ONE, principal=ANN, request_id=request, **options)
    assert told_of("session")
    tiny.forget(lambda scope: scope.session != "")
    assert told_of("session") is None
    assert told_of("kept")
    told = ask(tiny, [QUESTION], ttl=1000)
    other = ask(tiny, [{"role": "user", "content": "How far does a tern fly?"}], ttl=1000)
    assert "swift" not in repr(told) + repr(other)
    assert "tern" not in repr(other)
    assert why(other).reason == "diverged"


def test_the_reason_for_what_follows_lies_before(tiny: Engine) -> None:
    def messages(rules: str) -> list[dict[str, Any]]:
        return [{"role": "system", "content": rules, "cache_control": {"scope": "org"}}, QUESTION]

    ask(tiny, messages("You are kind. " + RULES))
    told = ask(tiny, messages("You are stern. " + RULES))
    own = [span for span in told.spans if span.scope == "user:acme/ann"]
    assert own
    assert all(span.miss and span.miss.earlier and span.miss.reason == "diverged" for span in own)


def test_a_module_and_a_document(tiny: Engine) -> None:
    prompt = "<prompt><documents><document>Swifts fly far.</document></documents>Where to?</prompt>"
    told = ask(tiny, prompt)
    assert "document" in {span.kind for span in told.spans}
    other = "<prompt><documents><document>Terns.</document><document>Swifts fly far.</document></documents>Eh?</prompt>"
    told = ask(tiny, other)
    hits = [span.hit_tokens for span in told.spans if span.kind == "document"]
    assert hits[0] == 0
    assert hits[1] > 0
