"""Replays against independent counts, and against the engine's own index."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner, Result

from ostinato.cache.index import Index
from ostinato.cache.keys import chain_keys
from ostinato.cache.policy.lru import LRU
from ostinato.cache.pool import Pool
from ostinato.cache.use import TokenType
from ostinato.cli import app
from ostinato.engine.request import SamplingParams
from ostinato.engine.scheduler import Scheduler
from ostinato.engine.sequence import Sequence, sequence_chains
from ostinato.errors import OstinatoError
from ostinato.lab.replay import Cache, parse_capacity, replay_many, rows
from ostinato.lab.replay_plot import KIND_COLOURS
from ostinato.lab.trace import Trace, TraceRequest
from ostinato.lab.traces import write_trace
from ostinato.lab.workload import MIXES, mixed
from ostinato.prompt.span import Span, plain


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_without_evictions_hits_are_what_was_seen_before(mix: str) -> None:
    trace = mixed(2, 400, mix)
    seen: set[bytes] = set()
    blocks = tokens = 0
    for request in trace.requests:
        known = [key in seen for key in request.keys]
        hits = known.index(False) if False in known else len(known)
        blocks += hits
        tokens += hits * trace.block_size
        seen.update(request.keys, request.reply_keys)
    for policy in ("lru", "opt"):
        [result] = replay_many([trace], [policy], ["100%"])
        assert (result.hit_blocks, result.hit_tokens, result.evictions) == (blocks, tokens, 0)
        assert sum(result.hits_by_kind.values()) == tokens
        assert result.prompt_tokens == sum(request.tokens for request in trace.requests)


SIZE = 4


@pytest.mark.parametrize("seed", range(6))
def test_a_replay_hits_what_the_engine_hits(seed: int) -> None:
    """The same chains, one request after the other, with whole blocks and without replies."""
    choose = random.Random(seed)
    capacity = 14
    pool = Pool(
        layers=1, kv_heads=1, head_dim=1, blocks=capacity, block_size=SIZE, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    index = Index(pool, LRU())
    scheduler = Scheduler(index, max_batch_tokens=1000, max_sequences=1, move=_no_move)
    cache = Cache(LRU(), capacity, SIZE)
    hits = 0
    for number in range(300):
        # A block's first token tells it from all others: the engine finds no beginnings of blocks, as a replay never does.
        tokens = [token for _ in range(choose.randint(1, 7)) for token in [choose.choice((0, 1))] * SIZE]
        # One token more, of a kind of its own, is there to be computed, and never found.
        chains = sequence_chains(plain(Span((*tokens, 1000 + number))), b"model", SIZE)
        root = chains[0].root
        sequence = Sequence(number, chains, SamplingParams(), 1)
        scheduler.add(sequence)
        scheduler.computed(scheduler.schedule())
        scheduler.finish(sequence)
        # The engine caches the last, partial block as well: it counts for the room there is.
        keys = chain_keys(root, [*tokens, 1000 + number], SIZE, partial=True)
        found = cache.ask(TraceRequest(float(number), tuple(keys), len(tokens) + 1))
        assert len(found) * SIZE == sequence.cached_tokens
        hits += len(found)
    assert hits > 100
    assert cache.evictions > 100


def _no_move(_sources: list[int], _targets: list[int], _by: int) -> None:
    raise AssertionError("no chain here is moved")


def test_a_reply_is_hit_once_a_prompt_has_it() -> None:
    a, b, c, d = b"a", b"b", b"c", b"d"
    requests = (
        TraceRequest(0.0, (a,), 6, ("user",), (b, c)),
        TraceRequest(1.0, (a, b, c, d), 16, ("user", "assistant", "assistant", "user")),
    )
    for policy in ("lru", "opt"):
        [result] = replay_many([Trace("t", 4, requests)], [policy], ["100%"])
        assert result.hits_by_kind == {"user": 4, "decode": 8}
        assert result.series == [(6, 0), (16, 12)]


def test_processes_find_what_one_finds() -> None:
    traces = [mixed(seed, 150, "chat") for seed in (1, 2)]
    told: list[tuple[int, int]] = []

    def found(jobs: int) -> list[dict[str, Any]]:
        results = replay_many(traces, ["lru", "opt"], ["5%", "300"], jobs, lambda *done: told.append(done))
        return [
            {name: value for name, value in row.items() if "seconds" not in name} for row in rows(results)
        ]

    one = found(1)
    assert [row["capacity_blocks"] for row in one[2:4]] == [300, 300]
    assert found(2) == one
    assert told == [(done, 8) for done in range(9)] * 2


def test_the_gap_is_from_lru_to_the_optimum() -> None:
    trace = mixed(1, 600, "templated")
    found = {row["policy"]: row for row in rows(replay_many([trace], ["lru", "arc", "opt"], ["3%"]))}
    lru, arc, opt = (found[name]["token_hit_rate"] for name in ("lru", "arc", "opt"))
    assert lru < opt
    assert found["lru"]["gap_closed"] == 0
    assert found["opt"]["gap_closed"] == 1
    assert found["arc"]["gap_closed"] == pytest.approx((arc - lru) / (opt - lru))
    assert rows(replay_many([trace], ["lru"], ["3%"]))[0]["gap_closed"] is None


@pytest.mark.parametrize(("text", "size"), [("5%", 0.05), ("0.5%", 0.005), ("100%", 1.0), ("2000", 2000)])
def test_capacities(text: str, size: float) -> None:
    assert parse_capacity(text) == pytest.approx(size)


@pytest.mark.parametrize("text", ["0", "0%", "-5%", "101%", "half", "2.5", "nan%", ""])
def test_what_is_no_capacity(text: str) -> None:
    with pytest.raises(OstinatoError, match="is no capacity"):
        parse_capacity(text)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["replay", *arguments])


def test_the_command_prints_json(tmp_path: Path) -> None:
    recording, out = tmp_path / "r.jsonl", tmp_path / "out.json"
    write_trace(mixed(1, 120), recording)
    done = run(
        str(recording), "workload:one-shot?requests=80", "--policy", "lru,opt", "--capacity", "5%,500", "--json",
        "--out", str(out), "--jobs", "1", "--limit", "60",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert json.loads(out.read_text()) == found
    assert [(row["trace"], row["policy"]) for row in found[:5]] == [
        ("r", "lru"), ("r", "opt"), ("r", "lru"), ("r", "opt"), ("workload:one-shot?requests=80", "lru"),
    ]  # fmt: skip
    assert found[2]["capacity_blocks"] == 500
    assert found[0]["capacity_share"] == pytest.approx(0.05, abs=0.01)
    for row in found:
        assert row["requests"] == 60
        assert row.keys() >= {
            "token_hit_rate", "block_hit_rate", "hits_by_kind", "evictions", "seconds", "gap_closed",
            "microseconds_per_eviction",
        }  # fmt: skip


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    image = tmp_path / "p.png"
    done = run("workload:chat?requests=100", "--policy", "lru,opt", "--plot", str(image), "--jobs", "1")
    assert done.exit_code == 0, done.output
    assert "100 requests" in done.stdout
    assert done.stdout.count("opt") == 4
    assert image.read_bytes().startswith(b"\x89PNG")
    assert {kind for kind, _ in KIND_COLOURS} == {*_flat(get_args(TokenType))}


def _flat(kinds: tuple[Any, ...]) -> list[Any]:
    return [each for kind in kinds for each in (_flat(get_args(kind)) if get_args(kind) else [kind])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["workload:chat", "--policy", "belady"], "no policy 'belady'. There are: lru,"),
        (["workload:chat", "--capacity", "lots"], "'lots' is no capacity"),
        (["workload:chat", "--policy", ","], "--policy names nothing"),
        (["workload:tea"], "no mix 'tea'"),
        (["nowhere.jsonl"], "no file or folder nowhere.jsonl"),
        (["workload:chat", "--plot", "no/such/folder.png"], "no folder no/such"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert isinstance(done.exception, OstinatoError)
    assert message in str(done.exception)
