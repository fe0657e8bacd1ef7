"""Readers of traces, on small ones of every format, well-formed and not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ostinato.lab.trace import Trace, TraceError, TraceRequest
from ostinato.lab.traces import TraceWriter, load, read_agents, read_trace, write_trace
from ostinato.lab.workload import mixed


def lines(path: Path, *entries: Any) -> Path:
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return path


def shared(a: TraceRequest, b: TraceRequest) -> int:
    """How many blocks two prompts begin with in common."""
    count = 0
    for one, other in zip(a.keys, b.keys, strict=False):
        if one != other:
            break
        count += 1
    return count


def numbered(trace: Trace) -> list[Any]:
    """A trace with its keys by order of appearance."""
    numbers: dict[bytes, int] = {}

    def of(keys: tuple[bytes, ...]) -> list[int]:
        return [numbers.setdefault(key, len(numbers)) for key in keys]

    return [
        (r.time, of(r.keys), r.tokens, r.kinds, of(r.reply_keys), r.session, r.agentic, r.templated, r.scope)
        for r in trace.requests
    ]


def mooncake(time: int, tokens: int, *ids: int) -> dict[str, Any]:
    return {"timestamp": time, "input_length": tokens, "output_length": 5, "hash_ids": ids}


def test_mooncake(tmp_path: Path) -> None:
    entries = [mooncake(3000, 1025, 0, 1, 2), mooncake(1000, 600, 0, 5), "", mooncake(4000, 512, 7)]
    trace = read_trace(lines(tmp_path / "m.jsonl", *entries))
    assert (trace.name, trace.block_size, trace.unique_blocks) == ("m", 512, 5)
    assert [r.time for r in trace.requests] == [0.0, 2.0, 3.0]
    assert [r.tokens for r in trace.requests] == [600, 1025, 512]
    assert shared(*trace.requests[:2]) == 1
    assert [r.templated for r in trace.requests] == [True, True, False]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{", "line 2: this is no JSON"),
        ("[1]", "line 2: an object"),
        ({"timestamp": 1, "hash_ids": [1]}, "line 2: there is no 'input_length'"),
        (mooncake(1, 2000, 1), "line 2: 2000 tokens do not make 1 blocks of 512"),
        ({**mooncake(1, 512), "hash_ids": "1"}, "line 2: 'hash_ids' must be a list"),
        (mooncake(-1, 512, 1), "line 2: 'timestamp' must be a number, 0 or more, not -1"),
        ({**mooncake(1, 512, 1), "input_length": 1.5}, "line 2: 'input_length' must be a whole number"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    path = lines(tmp_path / "m.jsonl", mooncake(0, 512, 1), entry)
    with pytest.raises(TraceError, match=message.replace("[", r"\[")):
        read_trace(path)


def test_bailian(tmp_path: Path) -> None:
    def turn(chat: int, parent: int, time: float, tokens: int, *ids: int) -> dict[str, Any]:
        return {
            "chat_id": chat, "parent_chat_id": parent, "timestamp": time, "input_length": tokens,
            "output_length": 3, "type": "text", "turn": 1, "hash_ids": ids,
        }  # fmt: skip

    trace = read_trace(
        lines(
            tmp_path / "b.jsonl",
            turn(5, -1, 0.5, 32, 1, 2),
            turn(6, -1, 1.0, 20, 1, 9),
            turn(7, 5, 2.0, 40, 1, 2, 3),
            turn(8, 7, 3.0, 64, 1, 2, 3, 4),
            turn(9, 4, 4.0, 16, 30),
        )
    )
    assert trace.block_size == 16
    assert [r.session for r in trace.requests] == ["5", "6", "5", "5", "4"]
    assert [r.time for r in trace.requests] == [0.0, 0.5, 1.5, 2.5, 3.5]
    assert [r.templated for r in trace.requests] == [True, True, True, True, False]


def agent(name: str, *prompts: tuple[float, list[int], str], **changed: Any) -> dict[str, Any]:
    """A session with a front of 96 tokens of tools and 80 of a system prompt: 2 whole blocks and most of a third."""
    requests = [
        {
            "t": time, "type": "n", "model": "m1", "in": 64 * len(ids) + 10, "out": 100, "hash_ids": ids,
            "input_types": [kind], "output_types": ["text"], "stop": "tool_use",
        }
        for time, ids, kind in prompts
    ]  # fmt: skip
    session = {"id": name, "models": ["m1"], "block_size": 64, "tool_tokens": 96, "system_tokens": 80}
    return {**session, "requests": requests, **changed}


def test_agents_share_the_front_and_nothing_else(tmp_path: Path) -> None:
    first = agent("a", (0, [1, 2, 3, 4], "text"), (9, [1, 2, 3, 4, 5, 6, 7], "tool_result"))
    second = agent("b", (0, [1, 2, 3, 4, 5], "text"))
    other = agent("c", (0, [1, 2, 3, 4], "text"), system_tokens=90)
    for place, session in enumerate((first, second, other)):
        (tmp_path / f"{place}.json").write_text(json.dumps(session, indent=1))
    trace = read_agents(tmp_path, gap=0)
    a, b, c, again = trace.requests
    assert (shared(a, b), shared(a, c), shared(a, again)) == (2, 0, 4)
    assert a.kinds == ("tools", "tools", "user", "user")
    # Of what is new in the second prompt, the reply is what comes before token 266 + 100: most of block 5.
    assert again.kinds[4:] == ("assistant", "assistant", "tool")
    assert [r.session for r in trace.requests] == ["a", "b", "c", "a"]
    assert all(r.agentic and r.templated for r in trace.requests)


def test_agents_start_at_different_times_that_the_seed_decides(tmp_path: Path) -> None:
    for place in range(5):
        (tmp_path / f"{place}.json").write_text(json.dumps(agent(str(place), (0, [1, 2], "text"))))
    times = [r.time for r in read_agents(tmp_path, gap=10, seed=1).requests]
    assert times[0] == 0
    assert len(set(times)) == 5
    assert times == [r.time for r in load(f"{tmp_path}?gap=10&seed=1").requests]
    assert times != [r.time for r in load(f"{tmp_path}?gap=10&seed=2").requests]


def test_a_changed_front_is_not_shared(tmp_path: Path) -> None:
    session = agent("a", (0, [1, 2, 3], "text"), (1, [1, 8, 9], "text"))
    (tmp_path / "a.json").write_text(json.dumps(session))
    (tmp_path / "b.json").write_text(json.dumps(agent("b", (2, [1, 2, 3], "text"))))
    a, changed, b = read_agents(tmp_path, gap=0).requests
    assert (shared(a, b), shared(changed, b), shared(a, changed)) == (2, 1, 1)


def test_requests_within_a_request_are_a_session_of_their_own(tmp_path: Path) -> None:
    session = agent("a", (0, [1, 2], "text"))
    session["requests"].append({"type": "nested", "requests": agent("x", (3, [20, 21], "text"))["requests"]})
    path = tmp_path / "a.json"
    path.write_text(json.dumps(session))
    assert [r.session for r in read_trace(path).requests] == ["a", "a/1"]


def test_a_malformed_agent_session_is_named(tmp_path: Path) -> None:
    session = agent("a", (0, [1, 2], "text"), (1, [1], "text"))
    del session["requests"][1]["in"]
    (tmp_path / "a.json").write_text(json.dumps(session))
    with pytest.raises(TraceError, match=r"a\.json, request 2 of a: there is no 'in'"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text("[1, 2]")
    with pytest.raises(TraceError, match="no session of an agent"):
        read_trace(tmp_path)
    (tmp_path / "a.json").unlink()
    with pytest.raises(TraceError, match=r"no \.json files"):
        read_trace(tmp_path)


POLICY = "Be kind to every passenger, and never give away more than the airline allows you to. " * 3


def test_tau_bench(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"user": "mia"}'}}
    messages = [
        {"role": "system", "content": POLICY},
        {"role": "user", "content": "I would like to change my flight to Seattle."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "one flight, " * 30, "name": "find", "tool_call_id": "1"},
        {"role": "assistant", "content": "Your flight is changed."},
    ]
    entries = [{"task_id": task, "trial": 0, "traj": messages} for task in (1, 2)]
    path = tmp_path / "t.json"
    path.write_text(json.dumps(entries))
    trace = read_trace(path)
    by_session = {name: [r for r in trace.requests if r.session == name] for name in ("1/0", "2/0")}
    first, second = by_session["1/0"]
    assert first.keys == by_session["2/0"][0].keys
    chain = (*first.keys, *first.reply_keys)
    assert second.keys[: len(chain)] == chain
    assert first.reply_keys
    assert set(second.kinds) >= {"system", "user", "tool"}
    assert first.kinds[0] == "system"
    assert first.templated
    assert second.time > first.time
    assert numbered(read_trace(path)) == numbered(trace)
    entries[1]["traj"] = [{"role": "captain", "content": "Hello"}]
    path.write_text(json.dumps(entries))
    with pytest.raises(TraceError, match="trajectory 1: there is no role 'captain'"):
        read_trace(path)


def test_openai_log(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": f"tool{n}", "parameters": {}}} for n in range(4)]
    user = {"role": "user", "content": [{"type": "text", "text": "How high is the tower? " * 6}]}
    thought = "<think>" + "the tower is high, " * 12 + "</think>"
    answer = {"role": "assistant", "content": thought + "It is three hundred metres high. " * 5}
    first = {
        "timestamp": "2025-03-01T10:00:00Z",
        "request": {"messages": [user], "tools": tools, "metadata": {"session_id": "s1"}},
        "response": {"choices": [{"message": answer}]},
    }
    second = {
        "created": 1740823205,
        "messages": [user, answer, user],
        "tools": tools,
        "prompt_cache_key": "k",
    }
    third = {"timestamp": 1740823210500, "body": {"messages": [user], "user": "u"}}
    trace = read_trace(lines(tmp_path / "log.jsonl", first, second, third))
    a, b, c = trace.requests
    assert [r.time for r in trace.requests] == [0.0, 5.0, 10.5]
    assert [r.session for r in trace.requests] == ["s1", "k", ""]
    chain = (*a.keys, *a.reply_keys)
    assert b.keys[: len(chain)] == chain
    assert b.kinds[0] == "tools"
    assert {"user", "reasoning", "assistant"} <= set(b.kinds)
    assert ([r.agentic for r in trace.requests], c.kinds[0]) == ([True, True, False], "user")
    assert [r.templated for r in trace.requests] == [True, True, False]
    with pytest.raises(TraceError, match="line 1: Invalid isoformat"):
        read_trace(lines(tmp_path / "bad.jsonl", {"timestamp": "noon", "messages": [user]}))
    with pytest.raises(TraceError, match="line 1: there is no 'created'"):
        read_trace(lines(tmp_path / "bad.jsonl", {"messages": [user]}))


@pytest.mark.parametrize("mix", ["chat", "agentic"])
def test_a_recording_is_the_trace(tmp_path: Path, mix: str) -> None:
    trace = mixed(1, 150, mix)
    write_trace(trace, tmp_path / "r.jsonl")
    read = read_trace(tmp_path / "r.jsonl")
    assert read.block_size == trace.block_size
    assert numbered(read) == numbered(trace)
    write_trace(read, tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "r.jsonl").read_bytes()


def test_a_recording_is_whole_after_each_request_and_holds_no_hash(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    writer = TraceWriter(path, 4)
    assert read_trace(path).requests == ()
    writer.write(TraceRequest(0.5, (b"secret", b"b"), 8, ("system", "user"), (b"c",), "s", scope="acme"))
    assert len(read_trace(path).requests) == 1
    writer.write(TraceRequest(0.75, (b"secret", b"d"), 7))
    writer.close()
    head, one, two = map(json.loads, path.read_text().splitlines())
    assert head == {"ostinato_trace": 1, "block_size": 4}
    assert (one["hash_ids"], one["reply_ids"], two["hash_ids"]) == ([0, 1], [2], [0, 3])
    assert one["kinds"] == [["system", 1], ["user", 1]]
    assert "secret" not in path.read_text()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"time": 0, "tokens": 8, "hash_ids": [0, 1], "kinds": [["user", 1]]}, "'kinds' has 1 blocks"),
        ({"time": 0, "tokens": 4, "hash_ids": [0], "kinds": [["poem", 1]]}, "'kinds' has 'poem'; there are"),
        ({"time": 0, "tokens": 4, "hash_ids": [0], "kinds": 3}, "line 2"),
        ({"tokens": 4, "hash_ids": [0]}, "there is no 'time'"),
    ],
)
def test_a_malformed_recording_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(lines(tmp_path / "r.jsonl", {"ostinato_trace": 1, "block_size": 4}, entry))


def test_what_is_no_trace_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="There is no file"):
        read_trace(tmp_path / "none.jsonl")
    for content in ("", "hello", '{"a": 1}', "[]", "3"):
        path = tmp_path / "x"
        path.write_text(content)
        with pytest.raises(TraceError, match="Mooncake"):
            read_trace(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(path)
    with pytest.raises(TraceError, match="version 9"):
        read_trace(lines(path, {"ostinato_trace": 9, "block_size": 4}))


def test_a_workload_by_name() -> None:
    trace = load("workload:agentic?seed=3&requests=50&rate=4")
    assert trace.requests == mixed(3, 50, "agentic", rate=4).requests
    with pytest.raises(TraceError, match=r"no option 'size'.*seed, requests"):
        load("workload:chat?size=3")
    with pytest.raises(TraceError, match="'seed' must be a number"):
        load("workload:chat?seed=x")
