"""Sessions and policies: a client may say what belongs together, and it never decides what is reused."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ostinato import Engine, SamplingParams
from ostinato.access.principal import Principal
from ostinato.cache.policy import DEFAULT_POLICY, POLICIES
from ostinato.cache.use import Use
from ostinato.errors import InvalidRequestError
from server_fixtures import CHAT, COMPLETIONS, DEADLINE, MODEL, serving

ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@pytest.fixture
def uses(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Use]:
    """The uses that the policy hears of from now on."""
    engine.clear_cache()
    heard: list[Use] = []
    monkeypatch.setattr(engine.index.store.policy, "arrive", heard.append)
    return heard


def test_turns_of_a_session_are_counted(engine: Engine, uses: list[Use]) -> None:
    before = engine.stats().sessions
    for session in ("Ann", "Bob", "Ann", "Ann", ""):
        engine.generate("Who goes there?", ONE, session=session)
    assert [use.turn for use in uses] == [1, 1, 2, 3, 1]
    assert len({use.session for use in uses}) == 3
    engine.clear_cache()
    assert engine.stats().sessions == before + 3


def test_a_session_is_no_part_of_a_key(engine: Engine, uses: list[Use]) -> None:
    prompt = list(range(1000, 1100))
    cold = engine.generate(prompt, ONE, session="Ann")
    blocks = len(engine.index)
    for session in ("Ann", "Bob", "", "x" * 512):
        warm = engine.generate(prompt, ONE, session=session)
        assert warm.usage.cached_tokens == len(prompt) - 1 > cold.usage.cached_tokens
        assert warm.token_ids == cold.token_ids
    assert len(engine.index) == blocks
    assert "Ann" not in repr(uses) + repr(list(engine.index.store.blocks.values()))


def test_a_name_is_another_session_for_another_user(engine: Engine, uses: list[Use]) -> None:
    for principal in (Principal("acme", "ann"), Principal("acme", "bob"), Principal("core", "ann")):
        for _ in range(2):
            engine.generate("Who goes there?", ONE, session="s", principal=principal)
    assert [use.turn for use in uses] == [1, 2, 1, 2, 1, 2]


def test_nobody_can_take_the_name_of_a_session_without_one(engine: Engine, uses: list[Use]) -> None:
    engine.generate("Nobody's", ONE)
    engine.generate("Not nobody's", ONE, session=uses[0].session)
    assert [use.turn for use in uses] == [1, 1]


def test_a_name_that_is_too_long(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="512 is the limit") as caught:
        engine.generate("Who?", ONE, session="x" * 513)
    assert caught.value.param == "session"
    assert "xxx" not in str(caught.value)


def test_what_a_use_tells(engine: Engine, uses: list[Use]) -> None:
    system = {"role": "system", "content": "You answer questions about birds, briefly and kindly. " * 3}
    user = {"role": "user", "content": "How far does a swift fly?"}
    reply = engine.generate("A swift flies", ONE)
    engine.generate([system, user], ONE)
    engine.generate([system, user, {"role": "tool", "content": "A year."}], ONE)
    engine.generate("<prompt><documents><document>Swifts.</document></documents>Where?</prompt>", ONE)
    assert [use.templated for use in uses] == [False, True, True, True]
    assert [use.agentic for use in uses] == [False, False, True, False]
    assert uses[0].tokens == reply.usage.prompt_tokens
    assert [use.time for use in uses] == sorted(use.time for use in uses)


def test_what_all_conversations_begin_with_continues_none(engine: Engine, uses: list[Use]) -> None:
    """The model's template writes more than a block before a question that has less than one."""
    for question in ("Hi", "And of the terns, what is known about their way over the sea?", "No", "So"):
        engine.generate([{"role": "user", "content": question}], ONE)
    assert [use.turn for use in uses] == [1, 1, 1, 1]


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    with serving(engine) as url, httpx.Client(base_url=url, timeout=DEADLINE) as client:
        yield client


def ask(http: httpx.Client, **fields: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Who goes there?"}], "max_tokens": 1}
    assert http.post(CHAT, json=body | fields).status_code == 200


def test_the_fields_that_name_a_session(http: httpx.Client, uses: list[Use]) -> None:
    by = {"prompt_cache_key": "key", "metadata": {"session_id": "id", "other": 1}, "user": "Cid"}
    ask(http, **by)
    ask(http, metadata=by["metadata"], user="Cid")
    ask(http, user="Cid", metadata={"other": "key"})
    ask(http, prompt_cache_key="", metadata={"session_id": ""}, user="Cid")
    ask(http, prompt_cache_key="Cid", user="Dot")
    ask(http, prompt_cache_key=None, metadata=None, user=None)
    assert [use.turn for use in uses] == [1, 1, 1, 2, 3, 1]
    completion = {"model": MODEL, "prompt": "Who", "max_tokens": 1, "user": "Cid"}
    assert http.post(COMPLETIONS, json=completion).status_code == 200
    assert uses[-1].turn == 4


def test_the_choices_of_an_answer_are_one_turn(http: httpx.Client, uses: list[Use]) -> None:
    ask(http, user="Eve", n=3)
    ask(http, user="Eve", n=2, stream=True)
    ask(http, user="Eve")
    named = uses[-1].session
    assert [use.turn for use in uses if use.session == named] == [1, 2, 3]


def test_names_are_not_told(http: httpx.Client, uses: list[Use], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        ask(http, user="Zaphod", prompt_cache_key="Trillian", metadata={"session_id": "Marvin"})
        refused = http.post(CHAT, json={"model": MODEL, "user": "Zaphod" * 99}).json()
    told = caplog.text + http.get("/metrics").text + repr(uses) + json.dumps(refused)
    assert not any(name in told for name in ("Zaphod", "Trillian", "Marvin"))
    assert "at most 512 characters" in refused["error"]["message"]


def test_a_policy_that_does_not_exist() -> None:
    with pytest.raises(InvalidRequestError, match=f"'random'.*{', '.join(POLICIES)}"):
        Engine("smollm2-135m", policy="random")
    assert DEFAULT_POLICY in POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_replies_do_not_depend_on_the_policy(policy: str, tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[2 + (i * j) % 9 + i % 3 for j in range(30 + i)] for i in range(24)]
    with Engine(str(tiny_model), dtype="float32", kv_tokens=4096, block_size=4) as large:
        expected = [large.generate(prompt, params).token_ids for prompt in prompts]
    with Engine(str(tiny_model), dtype="float32", kv_tokens=160, block_size=4, policy=policy) as small:
        assert small.policy == policy
        streams = [small.stream(prompt, params, session=str(i % 5)) for i, prompt in enumerate(prompts)]
        replies = [tuple(token for chunk in stream for token in chunk.token_ids) for stream in streams]
        assert small.stats().evicted_blocks
    assert replies == expected
