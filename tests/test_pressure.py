"""The benchmark of eviction policies under pressure: its workload, and that policies are told the workload's times."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ostinato import Engine
from ostinato.cache.policy.lru import LRU
from ostinato.lab.replay import replay


@pytest.fixture
def pressure(import_benchmark: Callable[[str], Any]) -> Any:
    return import_benchmark("pressure")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Texts of random words in the files' formats."""
    chance = random.Random(1)

    def words(count: int) -> str:
        return " ".join(
            chance.choice(("tea", "boat", "seven", "under", "glass", "rain")) for _ in range(count)
        )

    meetings = [
        {
            "meeting_transcripts": [{"speaker": "Ann", "content": words(60)} for _ in range(8)],
            "specific_query_list": [
                {"query": words(8), "answer": words(20), "relevant_text_span": [[str(n), "7"]]}
                for n in range(5)
            ],
        }
        for _ in range(4)
    ]
    (tmp_path / "qmsum_test.jsonl").write_text("\n".join(map(json.dumps, meetings)))
    call = {"function": {"name": "look_up", "arguments": '{"city": "Rome"}'}}
    trajectories = [
        {
            "traj": [
                {"role": "system", "content": "Be of help. " * 30},
                {"role": "user", "content": words(10)},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": words(30) if n % 2 else ""},
                {"role": "assistant", "content": words(10)},
            ]
        }
        for n in range(6)
    ]
    (tmp_path / "tau_bench_airline.json").write_text(json.dumps(trajectories))
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "one.txt").write_text(words(4_000))
    return tmp_path


def test_workload(pressure: Any, data: Path, engine: Engine) -> None:
    def make(mix: str = "mixed", seed: int = 3) -> list[Any]:
        texts = pressure.Texts(data)
        return pressure.make_workload(
            texts, engine.tokenizer, pressure.MIXES[mix], requests=80, seed=seed, rate=2.0
        )

    requests = make()
    assert requests == make()
    assert requests != make(seed=4)
    assert len(requests) == 80
    assert {request.traffic for request in requests} == {"chat", "agent", "templated", "one-shot"}
    times = [request.time for request in requests]
    assert times == sorted(times)
    latest: dict[str, list[int]] = {}
    for request in requests:
        ids = request.prompt.token_ids
        assert len(ids) <= pressure.LONGEST
        kinds = {span.kind for span in request.prompt.chains[0].spans}
        assert ("tools" in kinds) == (request.traffic == "agent")
        assert ("document" in kinds) == (request.traffic == "templated")
        if request.session:
            before = latest.get(request.session, [])
            assert ids[: len(before)] == before
            assert len(ids) > len(before)
            latest[request.session] = ids
    assert any(span.kind == "tool" for request in requests for span in request.prompt.chains[0].spans)
    trace = pressure.as_trace(make("one-shot"))
    assert trace.unique_blocks == sum(len(request.keys) for request in trace.requests)


def test_policies_are_told_the_times_of_the_workload(
    pressure: Any, data: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    class Listening(LRU):
        def arrive(self, use: Any) -> None:
            told.append(use.time)
            super().arrive(use)

    monkeypatch.setitem(pressure.POLICIES, "listening", lambda _blocks: Listening())
    texts = pressure.Texts(data)
    requests = pressure.make_workload(
        texts, engine.tokenizer, pressure.MIXES["mixed"], requests=12, seed=1, rate=2.0
    )
    done: list[int] = []
    blocks = 160
    runs = pressure.measure(
        "smollm2-135m",
        ["lru", "listening"],
        requests,
        blocks * pressure.BLOCK,
        lambda: done.append(len(done)),
    )
    assert len(done) == 2 * len(requests)
    assert told[-len(requests) :] == [request.time for request in requests]
    assert runs["lru"].cached == runs["listening"].cached
    assert runs["lru"].evictions
    assert all(ttft > 0 for ttft in runs["lru"].ttft)
    expected = replay(pressure.as_trace(requests), LRU(), blocks).token_hit_rate
    # The engine finds parts of blocks as well, and keeps replies.
    assert runs["lru"].hit_rate == pytest.approx(expected, abs=0.05)
