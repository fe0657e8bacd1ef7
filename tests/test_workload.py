"""Made-up workloads: their keys are chains, their times go on, their shares are those asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ostinato.errors import InvalidRequestError
from ostinato.lab.trace import TraceRequest
from ostinato.lab.workload import MIXES, Mix, mixed


def predecessors(requests: tuple[TraceRequest, ...]) -> dict[bytes, bytes]:
    """The block before each block; fails if a block has two."""
    found: dict[bytes, bytes] = {}
    for request in requests:
        chain = (b"", *request.keys, *request.reply_keys)
        for before, key in pairwise(chain):
            assert found.setdefault(key, before) == before, "a key stands for all tokens up to its end"
    return found


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), mix=st.sampled_from(sorted(MIXES)), size=st.sampled_from([4, 16, 64]))
def test_keys_are_chains_and_times_go_on(seed: int, mix: str, size: int) -> None:
    trace = mixed(seed, 120, mix, block_size=size)
    assert len(trace.requests) == 120
    predecessors(trace.requests)
    kinds: dict[bytes, str] = {}
    for before, request in zip((None, *trace.requests), trace.requests, strict=False):
        assert before is None or before.time <= request.time
        assert len(request.keys) == len(request.kinds) == request.tokens // size
        assert 200 <= request.tokens <= 9000
        for key, kind in zip(request.keys, request.kinds, strict=True):
            assert kinds.setdefault(key, kind) == kind
        if request.agentic:
            assert request.kinds[0] == "tools"
        assert request.templated == (request.kinds[0] != "user")


def test_the_seed_decides() -> None:
    assert mixed(3, 200) == mixed(3, 200)
    assert mixed(3, 200).requests[0] != mixed(4, 200).requests[0]


def test_a_chat_continues_its_replies() -> None:
    trace = mixed(1, 600, Mix(chat=1.0), named=1.0)
    last: dict[str, TraceRequest] = {}
    continued = 0
    for request in trace.requests:
        before = last.get(request.session)
        if before is not None:
            chain = (*before.keys, *before.reply_keys)
            assert request.keys[: len(chain)] == chain
            assert "assistant" in request.kinds
            continued += 1
        last[request.session] = request
    assert continued > 300


def test_thoughts_do_not_come_back_once_the_user_has_spoken() -> None:
    trace = mixed(2, 1500, Mix(agentic=1.0), named=1.0)
    replies = {key for request in trace.requests for key in request.reply_keys}
    asked = {key for request in trace.requests for key in request.keys}
    assert len(replies & asked) < len(replies) / 2
    # A prompt that does not continue its session's last has lost thoughts, and nothing but them.
    last: dict[str, TraceRequest] = {}
    rewritten = 0
    for request in trace.requests:
        before = last.get(request.session)
        if before is not None and request.keys[: len(before.keys)] != before.keys:
            rewritten += 1
            assert "reasoning" in before.kinds
            assert "reasoning" not in request.kinds
        last[request.session] = request
    assert rewritten


@pytest.mark.parametrize("name", ["chat", "agentic", "templated", "one-shot"])
def test_shares_are_by_request(name: str) -> None:
    trace = mixed(5, 4000, name, named=1.0)
    counts = Counter(_traffic(request) for request in trace.requests)
    for share, kind in zip(
        astuple(MIXES[name][0]), ("chat", "agentic", "templated", "one-shot"), strict=True
    ):
        assert counts[kind] / 4000 == pytest.approx(share, abs=0.08)


def test_traffic_shifts_at_half() -> None:
    requests = mixed(5, 4000, "shift", named=1.0).requests
    early = Counter(_traffic(request) for request in requests[:2000])
    late = Counter(_traffic(request) for request in requests[2000:])
    assert early["chat"] > 1300 > 700 > late["chat"]
    assert late["templated"] > 600 > early["templated"]
    assert late["agentic"] > 450 > early["agentic"]


def test_half_of_the_sessions_have_names() -> None:
    requests = mixed(1, 2000, Mix(chat=1.0), named=0.5).requests
    assert 0.35 < sum(bool(request.session) for request in requests) / 2000 < 0.65
    assert not any(request.session for request in mixed(1, 200, named=0.0).requests)


def test_an_unknown_mix_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"no mix 'tea'.*chat, agentic"):
        mixed(mix="tea")
    with pytest.raises(InvalidRequestError, match="shares"):
        mixed(mix=Mix())


def _traffic(request: TraceRequest) -> str:
    if request.agentic:
        return "agentic"
    if request.session:
        return "chat"
    return "templated" if request.templated else "one-shot"
