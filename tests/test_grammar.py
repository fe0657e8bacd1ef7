"""Grammars: what a model may not say it does not say, whatever its weights; and nothing else changes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato import Engine
from ostinato.engine.grammar import MAX_SOURCE, Grammar, Grammars, json_grammar
from ostinato.engine.request import SamplingParams
from ostinato.errors import InvalidRequestError
from ostinato.models.tokenizer import Tokenizer
from server_fixtures import idle, wait_until
from test_tokenizer import sentencepiece_metadata

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Make up a person. Answer in JSON with name, age and favourite colours."}]


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), dtype="float32", kv_tokens=4096) as engine:
        yield engine


def params(grammar: Grammar, **fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 300, "temperature": 0, "grammar": grammar} | fields))


def valid(text: str, schema: Any = PERSON) -> Any:
    value = json.loads(text)
    jsonschema.validate(value, schema)
    return value


def test_the_real_model_writes_what_is_asked(engine: Engine) -> None:
    free = engine.generate(ASK, SamplingParams(max_tokens=60, temperature=0))
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        valid(free.text)
    for fields in ({}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.5, "top_p": 0.9, "top_k": 40}):
        reply = engine.generate(ASK, params(json_grammar(PERSON), **fields))
        assert reply.finish_reason == "stop"
        valid(reply.text)
    assert engine.generate(ASK, SamplingParams(max_tokens=60, temperature=0)).text == free.text


SIMPLE = st.one_of(
    st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 8)}),
    st.fixed_dictionaries(
        {"type": st.just("string"), "pattern": st.sampled_from(["^[a-c]{2,5}$", "^\\d\\d?$"])}
    ),
    st.fixed_dictionaries({"type": st.just("string"), "format": st.sampled_from(["date", "uuid", "ipv4"])}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-500, 500),
        st.integers(0, 1000),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text(max_size=5), st.integers(-9, 99), st.none()), min_size=1, max_size=4),
    ),
    st.builds(lambda value: {"const": value}, st.one_of(st.text(max_size=5), st.booleans())),
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


SCHEMAS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(
            lambda items, least, more: {
                "type": "array", "items": items, "minItems": least, "maxItems": least + more
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(_object, st.dictionaries(st.text(max_size=6), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)  # fmt: skip


@given(schema=SCHEMAS, seed=st.integers(0, 2**31), warm=st.booleans())
@settings(max_examples=60, deadline=None, database=None)
def test_random_weights_fill_random_schemas(tiny: Engine, schema: Any, seed: int, warm: bool) -> None:
    sampling = params(json_grammar(schema), max_tokens=400, temperature=float(warm), seed=seed)
    reply = tiny.generate("x", sampling)
    if reply.finish_reason == "stop":
        valid(reply.text, schema)
    assert reply.finish_reason == "stop" or reply.usage.completion_tokens == 400
    assert tiny.generate("x", sampling).text == reply.text


def test_random_weights_write_json(tiny: Engine) -> None:
    ended = 0
    for seed in range(12):
        sampling = params(json_grammar({"type": "object", "maxProperties": 2}), temperature=1.0, seed=seed)
        reply = tiny.generate("x", sampling)
        ended += reply.finish_reason == "stop"
        if reply.finish_reason == "stop":
            assert isinstance(json.loads(reply.text), dict)
    assert ended


def test_the_end_costs_no_token(tiny: Engine) -> None:
    grammar = Grammar('%llguidance {}\nstart: "abc"')
    reply = tiny.generate("x", params(grammar, max_tokens=3))
    assert (reply.text, reply.finish_reason, reply.usage.completion_tokens) == ("abc", "stop", 3)
    assert tiny.generate("x", params(grammar, ignore_eos=True)).text == "abc"
    cut = tiny.generate("x", params(grammar, max_tokens=2))
    assert (cut.text, cut.finish_reason) == ("ab", "length")
    stopped = tiny.generate("x", params(grammar, stop=("c", "b")))
    assert (stopped.text, stopped.finish_reason, stopped.stop) == ("a", "stop", "b")
    first = tiny.generate("x", params(grammar, stop=("bc", "abc")))
    assert (first.text, first.stop) == ("", "abc")
    # An end that is open leaves it to the model, which may end there or go on.
    lengths = {
        len(
            tiny.generate("x", params(Grammar('start: "a"+'), temperature=2.0, seed=seed, max_tokens=40)).text
        )
        for seed in range(20)
    }
    assert len(lengths) > 1
    eos = tiny.tokenizer.eos_token_ids[0]
    ended = params(Grammar('start: "a"+'), ignore_eos=True, logit_bias={eos: 100.0}, max_tokens=40)
    assert (tiny.generate("x", ended).text, tiny.generate("x", ended).finish_reason) == ("a", "stop")


def test_logprobs_bias_and_penalties_go_with_it(tiny: Engine) -> None:
    grammar = Grammar('start: ("a" | "b"){20}')
    a, b = (tiny.tokenizer.encode(letter, add_bos=False)[0] for letter in "ab")
    for token, letter in ((a, "a"), (b, "b")):
        text = tiny.generate("x", params(grammar, logit_bias={token: 100.0})).text
        assert text == letter * 20
    forbidden = tiny.tokenizer.encode("c", add_bos=False)[0]
    assert set(tiny.generate("x", params(grammar, logit_bias={forbidden: 100.0})).text) <= {"a", "b"}
    mixed = tiny.generate("x", params(grammar, logit_bias={a: 100.0, b: 90.0}, frequency_penalty=2.0)).text
    assert set(mixed) == {"a", "b"}
    told = tiny.generate("x", params(grammar, logprobs=2))
    plain = tiny.generate("x", SamplingParams(max_tokens=1, temperature=0, logprobs=2))
    # Of the model itself, which would have said something else.
    assert told.logprobs[0].top == plain.logprobs[0].top
    assert told.logprobs[0].token in "ab"


def test_a_trigger_leaves_the_rest_free(tiny: Engine) -> None:
    ids = {char: tiny.tokenizer.encode(char, add_bos=False)[0] for char in "#12."}
    grammar = Grammar('start: ("1" | "2"){4} "."', trigger="##")
    text = tiny.generate(
        "x", params(grammar, max_tokens=60, logit_bias={ids["#"]: 100.0, ids["1"]: 50.0})
    ).text
    assert text.startswith("##1111.##1111.##")
    once = Grammar(grammar.source, trigger="##", once=True)
    reply = tiny.generate("x", params(once, max_tokens=60, logit_bias={ids["#"]: 100.0, ids["1"]: 50.0}))
    assert (reply.text, reply.finish_reason) == ("##1111.", "stop")
    free = tiny.generate("x", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    assert "##" not in free.text
    assert tiny.generate("x", params(grammar, max_tokens=30, ignore_eos=True)).token_ids == free.token_ids


def test_a_token_may_reach_over_the_trigger(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    both = next(t for t in range(49_000) if tokenizer.token_bytes(t)[:1] == b">" < tokenizer.token_bytes(t))
    more = tokenizer.token_bytes(both)[1:].decode()
    matcher = engine._intake._grammars.matcher(
        Grammar(f"start: {json.dumps(more + 'yes')}", trigger="<call>")
    )  # pyright: ignore[reportPrivateUsage]
    for token in (*tokenizer.encode("so <call", add_bos=False), both):
        assert matcher.mask() is None
        matcher.take(token)
    mask = matcher.mask()
    assert mask is not None
    assert {tokenizer.token_bytes(int(t)) for t in mask.nonzero()[0]} <= {b"y", b"ye", b"yes"}
    other = engine._intake._grammars.matcher(Grammar('start: "yes"', trigger="<call>"))  # pyright: ignore[reportPrivateUsage]
    for token in (*tokenizer.encode("so <call", add_bos=False), both):
        other.take(token)
    assert other.mask() is None


SENTENCE = {
    "type": "object",
    "properties": {"ab the abc": {"enum": ["c ab", "no"]}, "b": {"type": "boolean"}},
    "required": ["ab the abc", "b"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("bytes_only", [True, False])
def test_sentencepiece_tokens(prefix: bool, bytes_only: bool) -> None:
    """Where a tokenizer puts a space before every text, it must not come into the middle of a reply."""
    changes: dict[str, Any] = {"tokenizer.ggml.add_space_prefix": prefix}
    tokenizer = Tokenizer.from_gguf_metadata(sentencepiece_metadata(**changes))
    grammars = Grammars(tokenizer, frozenset(tokenizer.eos_token_ids))
    for seed in range(20):
        choose = random.Random(seed)
        matcher = grammars.matcher(json_grammar(SENTENCE))
        ids: list[int] = []
        while not matcher.ended:
            mask = matcher.mask()
            assert mask is not None
            allowed = [int(token) for token in mask.nonzero()[0]]
            short = [token for token in allowed if len(tokenizer.token_bytes(token)) == 1]
            ids.append(choose.choice((bytes_only and short) or allowed))
            matcher.take(ids[-1])
        valid(tokenizer.decode(ids), SENTENCE)


def test_company_and_preemption_change_nothing(tiny_model: Path) -> None:
    # Room for less than two of these: they preempt each other.
    with Engine(str(tiny_model), dtype="float32", kv_tokens=256) as engine:
        letters = Grammar('start: ("a" | "b"){140}')
        grammars = [json_grammar(PERSON), None, letters, json_grammar(PERSON), letters]
        asked = [
            SamplingParams(max_tokens=150, temperature=1.0, seed=seed, ignore_eos=True, grammar=grammar)
            for seed, grammar in enumerate(grammars)
        ]
        alone = [engine.generate(f"prompt {i}", each) for i, each in enumerate(asked)]
        streams = [engine.stream(f"prompt {i}", each) for i, each in enumerate(asked)]
        together = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert engine.stats().preemptions > 0
        assert together == [list(reply.token_ids) for reply in alone]
        wait_until(lambda: idle(engine))


BAD: list[tuple[Any, str]] = [
    ({"type": "nothing"}, "nothing"),
    ({"not": {"type": "string"}}, "not"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "object", "properties": {"a": {"$ref": "http://localhost/x"}}}, "localhost"),
    ({"type": "string", "description": "x" * MAX_SOURCE}, "limit"),
]


@pytest.mark.parametrize(("schema", "says"), BAD)
def test_bad_schemas(tiny: Engine, schema: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        tiny.generate("x", params(json_grammar(schema, "response_format.json_schema.schema")))
    assert caught.value.param == "response_format.json_schema.schema"
    assert tiny.generate("x", SamplingParams(max_tokens=1)).text is not None


def test_what_costs_too_much_is_refused(tiny: Engine) -> None:
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        nested = {"type": "array", "items": nested}
    wide = {"type": "string", "pattern": "^(a|b|c)*(x|y){5,9000}([0-9a-f]{3,5000}q){2,2000}$"}
    for schema in (nested, wide):
        try:
            reply = tiny.generate("x", params(json_grammar(schema), max_tokens=20))
            assert reply.finish_reason in ("stop", "length")
        except InvalidRequestError:
            pass
    wait_until(lambda: idle(tiny))
