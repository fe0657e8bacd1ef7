"""The session predictor: what it learns from, when it speaks, and that it never gets in a request's way."""

from __future__ import annotations

import heapq
import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from families import build
from ostinato import Engine, SamplingParams
from ostinato.cache.use import Use
from ostinato.engine import predictor as module
from ostinato.engine.predictor import Predictor, calibration, judge
from ostinato.errors import ModelFormatError, OstinatoError
from ostinato.lab.predictor import LEAST, auc, read, train
from ostinato.lab.predictor_logs import Session, read_logs

FEATURES = 24
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def new(features: int = FEATURES, seed: int = 0) -> Predictor:
    return Predictor(fingerprint="f" * 64, model="a model", features=features, seed=seed)


def live(
    predictor: Predictor,
    chance: Callable[[Tensor], float],
    sessions: int,
    *,
    seed: int = 0,
    start: float = 0.0,
) -> list[tuple[float, bool]]:
    """Sessions begin each second, and come back by chance, mostly within a minute. What was predicted, and what came."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    events = [(start + i, i, 1) for i in range(sessions)]
    predicted: list[tuple[float, bool]] = []
    while events:
        time, number, turn = heapq.heappop(events)
        use = Use(time, f"{start}-{number}", turn)
        predictor.arrive(use)
        if turn == 1:
            # As hidden states do, it has a dimension far larger than all others, which says nothing.
            state = torch.randn(FEATURES, generator=generator)
            state[-1] = 500 + 50 * state[-1]
            returned = rng.random() < chance(state)
            if returned:
                heapq.heappush(events, (time + rng.expovariate(1 / 20), number, 2))
            use = predictor.prefilled(use, lambda state=state: state)
            if use.returns is not None:
                predicted.append((use.returns, returned))
        predictor.learn()
    return predicted


def split(state: Tensor) -> float:
    """Nine sessions of ten come back on one side, one of twenty on the other."""
    return 0.9 if float(state[:4].sum()) > 1.0 else 0.05


def test_a_rule_is_learned_online_and_predictions_are_probabilities() -> None:
    predictor = new()
    assert live(predictor, split, 60) == []  # too few to have an opinion
    predicted = live(predictor, split, 1000, start=1000)
    assert predictor.trained
    assert len(predicted) > 400
    late = predicted[-400:]
    mean, rate = sum(p for p, _ in late) / len(late), sum(r for _, r in late) / len(late)
    assert mean == pytest.approx(rate, abs=0.06)
    above, below = ([r for p, r in late if (p > 0.5) == side] for side in (True, False))
    assert sum(above) / len(above) > 0.7
    assert sum(below) / len(below) < 0.25
    # Those given a high chance come back about as often as they were said to.
    sure = [(p, r) for p, r in late if p > 0.7]
    assert sum(p for p, _ in sure) / len(sure) == pytest.approx(sum(r for _, r in sure) / len(sure), abs=0.1)
    logits, labels = torch.tensor([p for p, _ in late]).logit(), torch.tensor([float(r) for _, r in late])
    assert judge(logits, labels).gain > 0.1


@pytest.mark.parametrize("seed", range(4))
def test_chance_is_not_learned(seed: int) -> None:
    predictor = new(seed=seed)
    assert live(predictor, lambda _: 0.3, 700, seed=seed) == []
    assert not predictor.trained
    assert not predictor.off
    assert predictor.labels > 500
    assert predictor.judgement is not None  # it was asked, and found wanting


def test_it_falls_silent_when_the_rule_is_gone() -> None:
    predictor = new()
    live(predictor, split, 700)
    assert predictor.trained
    live(predictor, lambda state: 1 - split(state), 600, start=5000)
    predicted = live(predictor, lambda _: 0.5, 60, start=10_000)
    assert not predictor.trained
    assert predicted == []


def test_a_silence_counts_only_after_the_horizon() -> None:
    predictor = new()
    state = torch.randn(FEATURES)

    def first(time: float, name: str) -> None:
        predictor.arrive(Use(time, name))
        predictor.prefilled(Use(time, name), lambda: state)

    first(0, "silent")
    first(1, "returns")
    predictor.arrive(Use(3, "returns", 2))
    assert predictor.labels == 0  # in the order in which they began: the base rate stays true
    predictor.arrive(Use(module.DEFAULT_HORIZON, "other"))
    assert predictor.labels == 0
    predictor.arrive(Use(module.DEFAULT_HORIZON + 1, "another"))
    assert predictor.labels == 2
    slices: Any = (predictor._learned, predictor._judging)
    assert [[example.returned for example in each] for each in slices] == [[False], [True]]
    predictor.arrive(Use(module.DEFAULT_HORIZON + 2, "silent", 2))  # late, but there
    assert predictor._learned[0].returned


def test_the_horizon_is_longer_than_nearly_all_gaps() -> None:
    predictor = new()
    state = torch.randn(FEATURES)
    for number in range(100):
        assert predictor.horizon == (
            module.DEFAULT_HORIZON if number < module.ENOUGH_GAPS else predictor.horizon
        )
        predictor.prefilled(Use(1000.0 * number, f"{number}"), lambda: state)
        predictor.arrive(Use(1000.0 * number + number, f"{number}", 2))
    assert predictor.horizon == 95


def test_memory_is_bounded() -> None:
    predictor = new()
    for number in range(module.OPEN + 100):
        predictor.prefilled(Use(0.0, f"{number}"), lambda: torch.zeros(FEATURES))
    assert len(predictor._open) == len(predictor._opened) == module.OPEN
    predictor.arrive(Use(1e4, "later"))
    assert not predictor._open
    assert not predictor._opened
    assert len(predictor._silent) <= module.OPEN
    assert sum(len(each) for each in (predictor._learned, predictor._calibrating, predictor._judging)) <= 2048


def test_an_error_switches_it_off_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    predictor = new()

    def broken() -> Tensor:
        raise RuntimeError("no state")

    use = Use(1.0, "a")
    with caplog.at_level(logging.ERROR):
        assert predictor.prefilled(use, broken) is use
        assert predictor.prefilled(use, broken) is use
        predictor.arrive(use)
        predictor.learn()
    assert predictor.off
    assert len(caplog.records) == 1
    assert not live(predictor, split, 50)


def test_a_state_that_is_no_number_is_left_alone() -> None:
    predictor = new()
    predictor.prefilled(Use(1.0, "a"), lambda: torch.full((FEATURES,), torch.nan))
    assert not predictor.off
    assert predictor.scale.count == 0


def test_calibration_finds_slope_and_offset() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(4000, generator=generator)
    labels = (torch.rand(4000, generator=generator) < torch.sigmoid(truth)).float()
    slope, offset = calibration(truth * 5 + 2, labels)  # five times too sure, and of too many
    assert slope == pytest.approx(0.2, abs=0.03)
    assert offset == pytest.approx(-0.4, abs=0.1)
    assert calibration(-truth, labels)[0] == 0.0  # it is not turned round


def test_files_hold_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "sessions.predictor"
    predictor = Predictor.open(path, fingerprint="f" * 64, model="a model", features=FEATURES)
    predictor.close()
    assert not path.exists()  # it has learned nothing
    live(predictor, split, 700)
    assert predictor.trained
    predictor.close()
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    same = Predictor.open(path, fingerprint="f" * 64, model="a model", features=FEATURES)
    state = torch.randn(FEATURES)
    assert same.predict(state) == predictor.predict(state) is not None
    assert (same.labels, same.horizon, same.judgement) == (
        predictor.labels,
        predictor.horizon,
        predictor.judgement,
    )
    live(same, split, 300, seed=1, start=9000)  # it goes on learning
    assert same.trained
    assert same.labels > predictor.labels


def test_files_of_other_models_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sessions.predictor"
    new().save(path)
    with pytest.raises(ModelFormatError, match=r"hidden states of a model .*train-predictor"):
        Predictor.open(path, fingerprint="0" * 64, model="another", features=FEATURES)
    for content in (b"", b"no tensors", path.read_bytes()[:-10]):
        path.write_bytes(content)
        with pytest.raises(ModelFormatError, match="damaged"):
            Predictor.open(path, fingerprint="f" * 64, model="a model", features=FEATURES)
    with pytest.raises(OstinatoError, match="no folder"):
        Predictor.open(tmp_path / "none" / "p", fingerprint="f", model="a model", features=FEATURES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return build("llama", folder), folder


@pytest.mark.parametrize("family", ["llama", "gemma3", "mpt"])
def test_the_hidden_state_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path)
    prompts = [[(7 * i + n) % 250 + 2 for i in range(n)] for n in (5, 33, 90)]
    seen: dict[str, Tensor] = {}

    class Spy(Predictor):
        def prefilled(self, use: Use, hidden: Callable[[], Tensor]) -> Use:
            seen[use.session] = hidden()
            return super().prefilled(use, hidden)

    with Engine(str(tmp_path), dtype="float32", kv_tokens=1024, max_batch_tokens=40) as engine:
        engine.predictor = Spy(fingerprint="", model="", features=64)
        streams = [engine.stream(prompt, GREEDY, session=f"{n}") for n, prompt in enumerate(prompts)]
        assert all(list(stream) for stream in streams)
    assert len(seen) == len(prompts)
    for state, prompt in zip(seen.values(), prompts, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        assert state.dtype == torch.float32
        assert min((expected - each).abs().max() for each in seen.values()) < 1e-3


def test_blocks_carry_the_prediction_and_replies_stay_the_same(
    tiny: tuple[Any, Path], tmp_path: Path
) -> None:
    _, folder = tiny
    path = tmp_path / "sessions.predictor"
    options: dict[str, Any] = {"dtype": "float32", "kv_tokens": 4096, "block_size": 8}
    rng = random.Random(0)
    prompts = [[rng.randrange(2, 250) for _ in range(24)] for _ in range(12)]
    with Engine(str(folder), **options) as engine:
        expected = [engine.generate(prompt, GREEDY).token_ids for prompt in prompts]
    with Engine(str(folder), predictor=path, **options) as engine:
        predictor = engine.predictor
        assert predictor is not None
        for number, prompt in enumerate(prompts):
            reply = engine.generate(prompt, GREEDY, session=f"{number}")
            assert reply.token_ids == expected[number]
        blocks = list(engine.index.store.blocks.values())
        assert blocks
        assert {block.use.returns for block in blocks} == {None}
        engine.clear_cache()
        predictor.trained = True
        assert engine.generate(prompts[0], GREEDY, session="first").token_ids == expected[0]
        first = {block.use.returns for block in engine.index.store.blocks.values()}
        assert len(first) == 1
        assert 0 <= (first.pop() or -1) <= 1
        # A second turn is not foretold: it is known that the session came back.
        engine.generate([*prompts[0], *expected[0], 9, 9, 9], GREEDY, session="first")
        assert {b.use.returns for b in engine.index.store.blocks.values() if b.use.turn == 2} == {None}
        predictor._settle(1e12)
    assert path.exists()
    with pytest.raises(ModelFormatError, match="another dtype or block size"):
        Engine(str(folder), predictor=path, **options | {"block_size": 16})
    with Engine(str(folder), predictor=path, **options) as engine:
        assert engine.predictor is not None
        assert engine.predictor.labels == len(prompts) + 1


def test_a_broken_predictor_fails_no_request(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    with Engine(str(tiny[1]), kv_tokens=512, predictor=tmp_path / "p") as engine:
        assert engine.predictor is not None
        engine.predictor.scale.mean = torch.zeros(3)
        assert len(engine.generate([5, 6, 7], GREEDY).token_ids) == 6
        assert engine.predictor.off
        assert len(engine.generate([5, 6, 8], GREEDY).token_ids) == 6


def test_offline_training_on_what_the_model_reads(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    sessions = [
        Session(
            [{"role": "user", "content": f"{'why ' if back else 'ok '}{rng.random()}"}], back, f"{number}"
        )
        for number in range(160)
        for back in [rng.random() < 0.4]
    ]
    with Engine(str(tiny[1]), kv_tokens=2048) as engine:
        examples = read(engine, sessions)
        assert engine.predictor is None
        predictor, report = train(
            examples, fingerprint=engine.fingerprint, model=engine.model_name, epochs=20, seed=1
        )
        path = tmp_path / "p"
        predictor.save(path)
        Predictor.open(path, fingerprint=engine.fingerprint, model="x", features=64)
    assert report.examples == 160
    assert report.held_out.examples == 40
    assert report.held_out.gain > 0.2
    assert (report.auc or 0) > 0.9
    assert report.trained
    assert sum(each.examples for each in report.calibration) == 40
    with pytest.raises(OstinatoError, match=f"{LEAST} or more"):
        train(read_nothing(), fingerprint="", model="", epochs=1)


def test_the_command_trains_a_file_that_serves(tiny: tuple[Any, Path], tmp_path: Path) -> None:
    rng = random.Random(0)
    lines: list[str] = []
    for number in range(120):
        asked = [{"role": "user", "content": f"{'why' if number % 3 else 'ok'} {rng.random()}"}]
        bodies = [
            asked,
            [*asked, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and?"}],
        ]
        lines += [
            json.dumps({"messages": each, "user": f"{number}"}) for each in bodies[: 2 if number % 3 else 1]
        ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines))
    out = tmp_path / "p"
    command = [sys.executable, "-m", "ostinato.cli", "lab", "train-predictor", str(tiny[1])]
    done = subprocess.run(
        [*command, str(tmp_path / "log.jsonl"), "--out", str(out), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["examples"] == 120
    assert report["held_out"]["base_rate"] == pytest.approx(2 / 3, abs=0.2)
    assert report["held_out"]["loss"] < report["held_out"]["base_loss"]
    assert report["trained"]
    with Engine(str(tiny[1]), predictor=out, kv_tokens=512) as engine:
        engine.generate([{"role": "user", "content": "why not?"}], GREEDY, session="s")
        assert all((b.use.returns or 0) > 0.5 for b in engine.index.store.blocks.values())


def read_nothing() -> Any:
    from ostinato.lab.predictor import Examples

    return Examples(torch.empty(0, 4), torch.empty(0), ())


def test_auc() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert auc(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels) == 1.0
    assert auc(torch.tensor([0.3, 0.3, 0.3, 0.3]), labels) == 0.5
    assert auc(torch.tensor([0.4, 0.3, 0.2, 0.1]), labels) == 0.0
    assert auc(torch.tensor([0.4, 0.3]), torch.ones(2)) is None


def test_logs_are_read_with_their_outcomes(tmp_path: Path) -> None:
    def message(text: str, role: str = "user") -> dict[str, str]:
        return {"role": role, "content": text}

    hello = [message("hello")]
    lines = [
        {"timestamp": 0, "messages": [message("once")], "user": "u1"},
        {"timestamp": 1, "body": {"messages": hello, "metadata": {"session_id": "s"}}},
        {"timestamp": 2, "messages": [message("unnamed")]},
        {"timestamp": 5, "messages": [message("unnamed"), message("yes", "assistant"), message("more")]},
        {"timestamp": 9, "body": {"messages": [message("else")], "metadata": {"session_id": "s"}}},
        {"timestamp": 700, "messages": [message("late")]},
        {"timestamp": "1970-01-01T00:11:50+00:00", "messages": [message("last")]},
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(json.dumps(line) for line in lines))
    found = [(session.messages[0]["content"], session.returned) for session in read_logs([log])]
    assert found == [("once", False), ("hello", True), ("unnamed", True)]  # of the last two nobody knows
    trajectories = tmp_path / "tau.json"
    trajectory = [message("rules", "system"), message("a flight"), message("where?", "assistant")]
    entries = [
        {"traj": trajectory},
        {"traj": [*trajectory, message("to Rome"), message("done", "assistant")]},
    ]
    trajectories.write_text(json.dumps(entries))
    both = read_logs([trajectories])
    assert [(session.messages, session.returned) for session in both] == [
        (trajectory[:2], False),
        (trajectory[:2], True),
    ]
    assert both[0].group == both[1].group
    log.write_text('{"messages": 3}')
    with pytest.raises(OstinatoError, match="line 1"):
        read_logs([log])
