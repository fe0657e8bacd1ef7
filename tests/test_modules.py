"""Chains against the dense reference: modules, gaps, partial views, for every family, cold, cached and evicted."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dense import Families, dense_logits
from families import FAMILIES, VOCAB
from ostinato import Engine, SamplingParams
from ostinato.engine import attention
from ostinato.models.decoder import Decoder
from ostinato.prompt.span import Chain, Prompt, Span, View


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Families:
    """A pool so small that prompts evict each other's modules."""
    return Families(tmp_path_factory, kv_tokens=288, block_size=8, max_batch_tokens=24)


def library(seed: int) -> tuple[int, ...]:
    """Text of module `seed`; a few of them recur in many prompts."""
    rng = random.Random(seed)
    return tuple(rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 30)))


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    chains: list[Chain] = []
    position = draw(st.sampled_from((0, 0, 0, 7)))
    for number in range(draw(st.integers(1, 5))):
        tokens = library(draw(st.integers(0, 6)))
        if draw(st.booleans()) and number == 0:
            tokens = tokens[: draw(st.integers(1, len(tokens)))]
        sees = []
        for earlier in range(number):
            length = len(chains[earlier].token_ids)
            kind = draw(st.sampled_from(("all", "all", "none", "part")))
            if kind == "all":
                sees.append(View(earlier))
            elif kind == "part":
                start = draw(st.integers(0, length - 1))
                sees.append(
                    View(earlier, start, draw(st.sampled_from((None, draw(st.integers(start + 1, length))))))
                )
        # Some chains are moved: computed right behind what they see.
        ends = [chains[view.chain].start + len(chains[view.chain].token_ids) for view in sees]
        home = max(ends, default=0) if draw(st.booleans()) else None
        chains.append(Chain((Span(tokens),), position, tuple(sees), home=home))
        position += len(tokens) + draw(st.sampled_from((0, 0, 3, 11)))
    last = Chain(
        (Span(library(draw(st.integers(7, 9)))),), position, tuple(View(i) for i in range(len(chains)))
    )
    return Prompt((*chains, last))


def check(engine: Engine, decoder: Decoder, prompt: Prompt) -> int:
    """Compare a reply of four tokens with the reference; return how many prompt tokens were cached."""
    reply = engine.generate(prompt, SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=10))
    last = prompt.chains[-1]
    with_reply = replace(last, spans=(*last.spans, Span(reply.token_ids[:-1])))
    logits = dense_logits(decoder, Prompt((*prompt.chains[:-1], with_reply)))
    expected = logits[len(last.token_ids) - 1 :].log_softmax(-1)
    assert list(reply.token_ids) == expected.argmax(-1).tolist()
    for row, logprob in zip(expected, reply.logprobs, strict=True):
        for top in logprob.top:
            assert abs(float(row[top.token_id]) - top.logprob) < 1e-3
    return reply.usage.cached_tokens


@pytest.mark.parametrize("name", FAMILIES)
def test_chains_equal_the_dense_reference(loaded: Families, name: str) -> None:
    engine, decoder = loaded(name)
    hits = []

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(prompt=prompts(), twice=st.booleans(), clear=st.integers(0, 9))
    def run(prompt: Prompt, twice: bool, clear: int) -> None:
        if clear == 0:
            engine.clear_cache()
        hits.append(check(engine, decoder, prompt))
        if twice:
            again = check(engine, decoder, prompt)
            assert again == seen_by_reply(prompt) - 1, "everything is cached but the last token"

    with torch.inference_mode():
        run()
    assert any(hits)
    assert engine.stats().slots_used == 0


def seen_by_reply(prompt: Prompt) -> int:
    last = prompt.chains[-1]
    seen = ((len(prompt.chains[v.chain].token_ids) if v.end is None else v.end) - v.start for v in last.sees)
    return sum(seen) + len(last.token_ids)


def test_reused_modules_take_no_slots_of_their_own(loaded: Families) -> None:
    engine, _ = loaded("llama")
    engine.clear_cache()
    size = engine.index.pool.block_size
    head = Chain((Span(library(100) + library(101)),))
    module = Chain((Span(library(102) + library(103)),), 80, (View(0),))
    prompt = Prompt((head, module, Chain((Span((5, 6, 7)),), 160, (View(0), View(1)))))
    engine.generate(prompt, SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
    shared = engine.stats().slots_cached
    streams = [
        engine.stream(
            Prompt((head, module, Chain((Span((5, 9 + i, 7)),), 160, (View(0), View(1))))),
            SamplingParams(max_tokens=100, temperature=0, ignore_eos=True),
        )
        for i in range(3)
    ]
    for stream in streams:
        next(stream)
    stats = engine.stats()
    in_use_once = sum(-(-len(chain.token_ids) // size) * size for chain in (head, module))
    assert stats.slots_used <= in_use_once + 3 * 2 * size
    assert stats.slots_used + stats.slots_cached <= shared + 3 * 2 * size
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_requests_share_is_read_once_and_replies_stay_exact(
    loaded: Families, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests in one batch over the same modules, and strangers between them: cascade attention is taken."""
    monkeypatch.setattr("ostinato.engine.attention.CASCADE_TOKENS", 4)
    taken: list[int] = []
    original = attention.AttentionBatch.cascade.func  # pyright: ignore[reportFunctionMemberAccess]

    def counted(batch: attention.AttentionBatch) -> object:
        found = original(batch)
        taken.append(found is not None)
        return found

    counting = functools.cached_property(counted)
    counting.__set_name__(attention.AttentionBatch, "cascade")
    monkeypatch.setattr(attention.AttentionBatch, "cascade", counting)
    engine, decoder = loaded(name)
    engine.clear_cache()
    head, module = Chain((Span(library(100)),)), Chain((Span(library(101)),), 40, (View(0),))
    asked = [
        Prompt((head, module, Chain((Span((5, 9 + i, 7)),), 80 + i, (View(0), View(1))))) for i in range(3)
    ] + [Prompt((Chain((Span(library(60 + i)),)),)) for i in range(2)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    streams = [engine.stream(prompt, params) for prompt in asked]
    for prompt, stream in zip(asked, streams, strict=True):
        tokens = tuple(token for chunk in stream for token in chunk.token_ids)
        last = prompt.chains[-1]
        with_reply = replace(last, spans=(*last.spans, Span(tokens[:-1])))
        with torch.inference_mode():
            logits = dense_logits(decoder, Prompt((*prompt.chains[:-1], with_reply)))
        assert list(tokens) == logits[len(last.token_ids) - 1 :].argmax(-1).tolist()
    assert any(taken)
