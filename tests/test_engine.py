"""The engine on the real model: replies, streams, stops, cancellation, pools too small, and interleavings."""

from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from ostinato import Engine, SamplingParams
from ostinato.engine.engine import EngineStats
from ostinato.engine.output import Sink
from ostinato.engine.request import Chunk
from ostinato.engine.sequence import Sequence
from ostinato.engine.stream import Stream
from ostinato.errors import (
    EngineClosedError,
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
    PromptTooLongError,
)

GREEDY = SamplingParams(max_tokens=24, temperature=0)
QUESTION = "The capital of France is"


def wait_idle(engine: Engine) -> None:
    """Until no request holds a slot; fails after ten seconds."""
    deadline = time.monotonic() + 10
    while engine.stats().running or engine.stats().waiting:
        assert time.monotonic() < deadline, engine.stats()
    assert engine.stats().slots_used == 0


def test_the_model_answers(engine: Engine) -> None:
    engine.clear_cache()
    reply = engine.generate(QUESTION, GREEDY)
    assert "Paris" in reply.text
    assert reply.usage.prompt_tokens == 5
    assert reply.usage.cached_tokens == 0
    assert reply.usage.completion_tokens == len(reply.token_ids)
    assert 0 < reply.timing.ttft <= reply.timing.total
    again = engine.generate(QUESTION, GREEDY)
    assert again.usage.cached_tokens == 4
    assert again.finish_reason == reply.finish_reason


def test_chat_goes_through_the_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "What is 2 + 2? Say only the number."}]
    reply = engine.generate(messages, GREEDY)
    assert "4" in reply.text
    assert reply.finish_reason == "stop"
    text = engine.tokenizer.decode(engine.encode(messages).token_ids, skip_special=False)
    assert "<|im_start|>user\nWhat is 2 + 2? Say only the number.<|im_end|>" in text


def test_the_next_turn_hits_the_reply_before_it(engine: Engine) -> None:
    engine.clear_cache()
    messages = [{"role": "user", "content": "Name three colours."}]
    first = engine.generate(messages, SamplingParams(max_tokens=40, temperature=0))
    turn = [
        *messages,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And one more?"},
    ]
    second = engine.generate(turn, GREEDY)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + len(first.token_ids) - 1


def test_streams_add_up(engine: Engine) -> None:
    whole = engine.generate(QUESTION, GREEDY)
    chunks = list(engine.stream(QUESTION, GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage == engine.generate(QUESTION, GREEDY).usage


def test_async_streams_and_cancellation(engine: Engine) -> None:
    async def run() -> None:
        replies = await asyncio.gather(*(engine.agenerate(QUESTION, GREEDY) for _ in range(3)))
        assert len({reply.token_ids for reply in replies}) == 1
        stream = engine.astream(QUESTION, SamplingParams(temperature=0, ignore_eos=True))
        first = await anext(stream)
        assert first.token_ids
        await stream.aclose()
        task = asyncio.create_task(engine.agenerate("Once", SamplingParams(temperature=0, ignore_eos=True)))
        while not engine.stats().running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    wait_idle(engine)


def test_closing_a_stream_frees_its_slots(engine: Engine) -> None:
    streams = [engine.stream(f"Story {i}", SamplingParams(temperature=0, ignore_eos=True)) for i in range(4)]
    for stream in streams:
        assert next(stream).token_ids
    assert engine.stats().slots_used > 0
    for stream in streams:
        stream.close()
    wait_idle(engine)


def test_a_stream_that_is_never_read_can_be_closed_or_dropped(engine: Engine) -> None:
    endless = SamplingParams(temperature=0, ignore_eos=True)
    engine.stream("Never read", endless).close()
    engine.stream("Dropped at once", endless)
    wait_idle(engine)


def test_closing_while_others_submit_leaves_nobody_waiting() -> None:
    for delay in range(6):
        engine = Engine("smollm2-135m", kv_tokens=512)
        outcomes: list[object] = []

        def ask(engine: Engine = engine, outcomes: list[object] = outcomes) -> None:
            try:
                outcomes.append(engine.generate("Once", SamplingParams(temperature=0, ignore_eos=True)))
            except EngineClosedError as error:
                outcomes.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads[:delay]:
            thread.start()
        closing = threading.Thread(target=engine.close)
        closing.start()
        for thread in threads[delay:]:
            thread.start()
        for thread in [closing, *threads]:
            thread.join(timeout=30)
            assert not thread.is_alive()
        assert len(outcomes) == 4


def test_who_has_the_reply_finds_the_request_finished(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a reply is handed on last: slots are free, counters count it, and its blocks can be found."""
    seen: list[EngineStats] = []
    enqueue = engine._enqueue

    def watched(sequence: Sequence, sink: Sink) -> None:
        def end(chunk: Chunk | Exception) -> None:
            if isinstance(chunk, Exception) or chunk.finish_reason is not None:
                seen.append(engine.stats())
            sink(chunk)

        enqueue(sequence, end)

    monkeypatch.setattr(engine, "_enqueue", watched)
    before = engine.stats()
    for max_tokens in (1, 5):
        engine.generate("The rook is a bird that", SamplingParams(max_tokens=max_tokens, temperature=0))
    stream = engine.stream("The crow is a bird that", SamplingParams(max_tokens=500, ignore_eos=True))
    next(iter(stream))
    stream.close()
    engine.generate("The raven", SamplingParams(max_tokens=1))  # behind the stream's end
    assert [each.requests_finished - before.requests_finished for each in seen] == [1, 2, 3, 4]
    assert {each.running for each in seen} == {0}
    assert {each.slots_used for each in seen} == {0}


def test_stop_strings_are_cut_and_held_back(engine: Engine) -> None:
    whole = engine.generate(QUESTION, GREEDY).text
    stop = whole[4:7]
    params = SamplingParams(max_tokens=24, temperature=0, stop=(stop, "never appears"))
    chunks = list(engine.stream(QUESTION, params))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"


def test_length_and_eos_and_stop_tokens(engine: Engine) -> None:
    assert engine.generate(QUESTION, SamplingParams(max_tokens=3, temperature=0)).finish_reason == "length"
    whole = engine.generate(QUESTION, GREEDY)
    token = whole.token_ids[2]
    params = SamplingParams(max_tokens=24, temperature=0, stop_token_ids=(token,))
    reply = engine.generate(QUESTION, params)
    assert reply.token_ids == whole.token_ids[: whole.token_ids.index(token) + 1]
    assert reply.finish_reason == "stop"


def test_seeds_repeat_and_logprobs_are_of_the_model(engine: Engine) -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7, top_p=0.9, logprobs=3)
    first, second = engine.generate(QUESTION, params), engine.generate(QUESTION, params)
    assert first.token_ids == second.token_ids
    other = [engine.generate(QUESTION, SamplingParams(max_tokens=12, seed=s)).token_ids for s in range(4)]
    assert len(set(other)) > 1
    for logprob in first.logprobs:
        assert logprob.logprob <= 0
        assert [top.logprob for top in logprob.top] == sorted((t.logprob for t in logprob.top), reverse=True)
        assert len(logprob.top) == 3
    assert "".join(lp.token for lp in first.logprobs).startswith(first.text[:5])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([10**9], "between 0"),
        ([-1], "between 0"),
        ([{"role": "user"}], "content"),
    ],
)
def test_bad_prompts_say_what_is_wrong(engine: Engine, prompt: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.generate(prompt, GREEDY)  # pyright: ignore[reportArgumentType]
    wait_idle(engine)


def test_a_prompt_too_long_is_refused(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError, match="8192"):
        engine.generate([5] * 8192, GREEDY)
    small = Engine("smollm2-135m", kv_tokens=64)
    with small, pytest.raises(PromptTooLongError, match="kv_tokens"):
        small.generate([5] * 64, GREEDY)


@pytest.mark.parametrize("field", [{"temperature": 3.0}, {"top_p": 0.0}, {"max_tokens": 0}, {"stop": ("",)}])
def test_bad_parameters_are_refused(field: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(field))):
        SamplingParams(**field)  # pyright: ignore[reportArgumentType]


def test_a_request_fills_the_pool_to_the_last_slot() -> None:
    with Engine("smollm2-135m", kv_tokens=64) as small:
        reply = small.generate([7] * 40, SamplingParams(temperature=0, ignore_eos=True))
        assert reply.finish_reason == "length"
        assert len(reply.token_ids) == 24
        wait_idle(small)


def test_many_requests_on_a_small_pool_are_served_in_turn() -> None:
    with Engine("smollm2-135m", kv_tokens=256, max_batch_tokens=64) as small:
        prompts = [[100 + i] * (10 + i % 30) for i in range(40)]
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        streams = [small.stream(prompt, params) for prompt in prompts]
        lengths = [sum(len(chunk.token_ids) for chunk in stream) for stream in streams]
        assert lengths == [20] * 40
        wait_idle(small)
        stats = small.stats()
        assert stats.requests_finished == 40
        assert stats.prompt_tokens == sum(map(len, prompts))


def test_identical_requests_at_once_compute_the_prefix_once(engine: Engine) -> None:
    engine.clear_cache()
    before = engine.stats()
    prompt = list(range(500, 900))
    streams = [engine.stream(prompt, SamplingParams(max_tokens=2, temperature=0)) for _ in range(4)]
    usages = [list(stream)[-1].usage for stream in streams]
    assert sorted(usage.cached_tokens for usage in usages) == [0, 399, 399, 399]
    after = engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 1600


def test_a_closed_engine_says_so() -> None:
    engine = Engine("smollm2-135m", kv_tokens=256)
    stream = engine.stream("Once", SamplingParams(temperature=0, ignore_eos=True))
    next(stream)
    engine.close()
    engine.close()
    assert not engine.alive
    with pytest.raises(EngineClosedError):
        list(stream)
    with pytest.raises(EngineClosedError):
        engine.generate("Once")


def test_models_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no-such-model"):
        Engine("no-such-model")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a gguf file")
    with pytest.raises(ModelFormatError, match=r"broken\.gguf"):
        Engine(str(broken))


def test_a_program_may_end_without_closing() -> None:
    code = (
        "from ostinato import Engine, SamplingParams\n"
        "engine = Engine('smollm2-135m', kv_tokens=512)\n"
        "stream = engine.stream('Once', SamplingParams(temperature=0, ignore_eos=True))\n"
        "print(next(stream).token_ids)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr


# -- random interleavings ---------------------------------------------------------------------------------


def interleavings(folder: Path) -> type[RuleBasedStateMachine]:
    """Requests, cancellations and evictions in random order, against an engine that never reuses anything."""
    reference = Engine(str(folder), dtype="float32", kv_tokens=4096)

    @functools.cache
    def uncached(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
        reference.clear_cache()
        reply = reference.generate(prompt, SamplingParams(max_tokens=count, temperature=0, ignore_eos=True))
        assert reply.usage.cached_tokens == 0
        return reply.token_ids

    class Interleavings(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.engine = Engine(
                str(folder),
                dtype="float32",
                kv_tokens=128,
                block_size=4,
                max_batch_tokens=11,
                max_sequences=5,
            )
            self.open: list[tuple[Stream, tuple[int, ...], int]] = []
            self.history: list[tuple[int, ...]] = []

        @rule(
            head=st.integers(0, 2),
            length=st.integers(1, 60),
            tail=st.integers(2, 5),
            count=st.integers(1, 16),
        )
        def submit(self, head: int, length: int, tail: int, count: int) -> None:
            prompt = (*((head * 37 + i * 11) % 250 + 2 for i in range(length)), tail)
            self._start(prompt, count)

        @precondition(lambda self: self.history)
        @rule(
            data=st.data(),
            more=st.lists(st.integers(2, 250), min_size=1, max_size=6),
            count=st.integers(1, 12),
        )
        def next_turn(self, data: st.DataObject, more: list[int], count: int) -> None:
            prompt = (*data.draw(st.sampled_from(self.history)), *more)
            if len(prompt) + count <= 128:
                self._start(prompt, count)

        def _start(self, prompt: tuple[int, ...], count: int) -> None:
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            self.open.append((self.engine.stream(prompt, params), prompt, count))

        @precondition(lambda self: self.open)
        @rule(data=st.data())
        def read_one(self, data: st.DataObject) -> None:
            self._finish(data.draw(st.integers(0, len(self.open) - 1)))

        @precondition(lambda self: self.open)
        @rule(data=st.data(), chunks=st.integers(0, 3))
        def cancel(self, data: st.DataObject, chunks: int) -> None:
            stream, prompt, count = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            got = [
                token for _, chunk in zip(range(chunks), stream, strict=False) for token in chunk.token_ids
            ]
            assert tuple(got) == uncached(prompt, count)[: len(got)]
            stream.close()

        @rule()
        def evict(self) -> None:
            self.engine.clear_cache()

        def _finish(self, at: int) -> None:
            stream, prompt, count = self.open.pop(at)
            chunks = list(stream)
            tokens = tuple(token for chunk in chunks for token in chunk.token_ids)
            assert tokens == uncached(prompt, count)
            assert chunks[-1].usage.cached_tokens < len(prompt)
            self.history.append((*prompt, *tokens))

        def teardown(self) -> None:
            while self.open:
                self._finish(0)
            wait_idle(self.engine)
            self.engine.clear_cache()
            assert self.engine.stats().slots_cached == 0
            self.engine.close()

    return Interleavings


def test_random_interleavings_equal_the_uncached_engine(tiny_model: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        interleavings(tiny_model),
        settings=settings(
            max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
