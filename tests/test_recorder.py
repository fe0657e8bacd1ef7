"""Recordings: what the engine reports is what a replay of its recording finds, and nothing else stands in one."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest

from families import VOCAB
from ostinato import Engine, SamplingParams
from ostinato.cache.policy.lru import LRU
from ostinato.lab.replay import replay
from ostinato.lab.traces import TraceWriter, read_recording
from ostinato.prompt.span import Chain, Prompt, Span, View

SIZE = 4
GREEDY = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)


def recording(model: Path, file: Path, blocks: int = 64, **options: Any) -> Engine:
    return Engine(
        str(model), dtype="float32", kv_tokens=blocks * SIZE, block_size=SIZE, record=file, **options
    )


def piece(number: int) -> tuple[int, ...]:
    """A block of tokens whose first token no other has, so that blocks are found whole or not at all."""
    return (2 + number, *(random.Random(number).randrange(2, VOCAB) for _ in range(SIZE - 1)))


def lines(file: Path) -> list[dict[str, Any]]:
    head, *requests = map(json.loads, file.read_text().splitlines())
    assert head == {"ostinato_trace": 1, "block_size": SIZE}
    return requests


def test_a_replay_hits_what_the_engine_hit(tiny_model: Path, tmp_path: Path) -> None:
    """Conversations over a few system prompts, one request after another, in a cache that evicts."""
    file, blocks, random_ = tmp_path / "trace", 40, random.Random(5)
    hits: list[int] = []
    prompts: list[tuple[int, ...]] = []
    with recording(tiny_model, file, blocks, policy="lru") as engine:
        open_: list[tuple[int, ...]] = []
        for number in range(120):
            if open_ and random_.random() < 0.6:
                # The reply's last token begins a block with what is new.
                prompt = open_.pop(random_.randrange(len(open_)))
            else:
                prompt = tuple(token for i in range(random_.randrange(1, 5)) for token in piece(i))
            new = tuple(random_.randrange(2, VOCAB) for _ in range(-len(prompt) % SIZE))
            prompt += new + tuple(t for _ in range(2) for t in piece(20 + random_.randrange(200)))
            prompt += (60 + number, 7)
            reply = engine.generate(prompt, GREEDY)
            hits.append(reply.usage.cached_tokens)
            prompts.append(prompt)
            if len(prompt) < (blocks - 8) * SIZE:
                open_.append((*prompt, *reply.token_ids))
        assert engine.stats().evicted_blocks > 100
    trace = read_recording(file)
    assert [request.tokens for request in trace.requests] == [len(prompt) for prompt in prompts]
    result = replay(trace, LRU(), blocks)
    assert [hit for _, hit in result.series] == [hit // SIZE * SIZE for hit in hits]
    assert result.hit_tokens > 0
    assert result.evictions > 100


def test_a_recording_tells_blocks_apart_and_no_more(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    messages = [{"role": "user", "content": "The password is swordfish; what is the password?"}]
    with recording(tiny_model, file) as engine:
        engine.generate(messages, GREEDY, session="Ann's secret chat")
        engine.generate([300 + i for i in range(15)], GREEDY, session="Bob's")
        engine.generate(messages, GREEDY, session="Ann's secret chat")
    text = file.read_text()
    assert not any(word in text for word in ("password", "swordfish", "Ann", "Bob", "secret"))
    first, second, third = lines(file)
    seen: dict[int, int] = {}
    for request in (first, second, third):
        for block in request["hash_ids"] + request["reply_ids"]:
            assert block == seen.setdefault(block, len(seen)), "numbered in the order in which they come"
    assert third["hash_ids"] == first["hash_ids"]
    assert set(second["hash_ids"]).isdisjoint(first["hash_ids"])
    assert [request["session"] for request in (first, second, third)] == ["1", "2", "1"]
    assert {type(value) for request in (first, second, third) for value in request.values()} == {
        int, float, str, bool, list,
    }  # fmt: skip
    assert {value for r in (first, second, third) for value in r.values() if isinstance(value, str)} == {
        "1", "2", "user",
    }  # fmt: skip
    assert {kind for kind, _ in first["kinds"]} == {"template", "user"}
    assert 0 <= first["time"] <= second["time"] <= third["time"] < 60


def test_what_is_recorded_of_a_request(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    head, module = Chain((Span((5,) * 6),)), Chain((Span((6,) * 5),), 6, (View(0),), name="m")
    last = Chain((Span((7,) * 10, "user"),), 11, (View(0), View(1)))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with recording(tiny_model, file) as engine:
        engine.generate((5,) * 10, params)
        engine.generate((5,) * 10, SamplingParams(max_tokens=1))
        engine.generate(Prompt((head, module, last)), params)
    plain, short, modules = read_recording(file).requests
    # Ten tokens and seven that were computed of eight: two whole blocks, and two that hold replies.
    assert (plain.tokens, len(plain.keys), len(plain.reply_keys)) == (10, 2, 2)
    assert (short.tokens, short.keys, short.reply_keys) == (10, plain.keys, ())
    assert plain.kinds == ("text", "text")
    assert (plain.templated, modules.templated) == (False, True)
    # The chains as one, in whole blocks: two, two, and two and a half.
    assert (modules.tokens, len(modules.keys), len(modules.reply_keys)) == (4 * SIZE + 10, 6, 2)
    assert modules.kinds == ("text", "text", "document", "document", "user", "user")


def test_requests_are_in_order_of_arrival_whenever_they_end(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    endless = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with recording(tiny_model, file, blocks=128, max_sequences=2) as engine:
        long = engine.stream((5,) * 9, endless)
        next(long)
        engine.generate((6,) * 13, GREEDY)
        assert not lines(file), "the first request has not ended"
        other = engine.stream((7,) * 17, endless)
        next(other)
        engine.stream((8,) * 21, endless).close()  # never admitted: it asked nothing of the cache
        long.close()
        engine.clear_cache()  # waits for the engine to have done all that
        assert [request["tokens"] for request in lines(file)] == [9, 13]
    # The engine's end fails the other one, which had been admitted.
    requests = read_recording(file).requests
    assert [request.tokens for request in requests] == [9, 13, 17]
    assert len({request.time for request in requests}) == 3


def test_preempted_requests_are_recorded_once(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with recording(tiny_model, file, blocks=16) as engine:
        streams = [engine.stream((5 + number,) * 9, params) for number in range(6)]
        replies = [[token for chunk in stream for token in chunk.token_ids] for stream in streams]
        assert engine.stats().preemptions
    requests = read_recording(file).requests
    assert [request.tokens for request in requests] == [9] * 6
    assert [len(request.reply_keys) for request in requests] == [(9 + 23) // SIZE - 9 // SIZE] * 6
    assert {len(reply) for reply in replies} == {24}


def test_requests_of_a_failed_step_are_recorded_and_let_go(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no step today")

    file = tmp_path / "trace"
    with recording(tiny_model, file) as engine:
        engine.generate((5,) * 9, GREEDY)
        with monkeypatch.context() as patch:
            patch.setattr(engine._runner, "run", broken)
            with pytest.raises(RuntimeError, match="no step today"):
                engine.generate((5,) * 21, GREEDY)
        again = engine.generate((5,) * 21, GREEDY)
        assert again.usage.cached_tokens == 9, "what was computed before the failure, and no more"
        engine.clear_cache()
        assert engine.stats().slots_used == engine.stats().slots_cached == 0
    requests = read_recording(file).requests
    assert [request.tokens for request in requests] == [9, 21, 21]
    assert [len(request.reply_keys) for request in requests] == [0, 0, 0]


def test_a_full_disk_costs_the_recording_not_the_requests(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file, write = tmp_path / "trace", TraceWriter.write
    with recording(tiny_model, file) as engine, caplog.at_level(logging.WARNING):
        monkeypatch.setattr(TraceWriter, "write", full)
        for _ in range(3):
            assert len(engine.generate((5,) * 9, GREEDY).token_ids) == 3
        monkeypatch.setattr(TraceWriter, "write", write)
        engine.generate((5,) * 9, GREEDY)
        engine.clear_cache()
        assert engine.stats().records_lost == 3
    assert len(lines(file)) == 1
    [record] = caplog.records
    assert "No space left" in record.getMessage()


def test_a_file_that_cannot_be_written_is_known_at_once(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-folder"):
        recording(tiny_model, tmp_path / "no-such-folder" / "trace")
