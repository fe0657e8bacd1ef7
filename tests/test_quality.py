"""`ostinato quality`: its modes against the dense reference, its questions, and the command on a tiny model."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dense import decoder_of, dense_logits
from families import build
from ostinato.cli import app
from ostinato.errors import OstinatoError
from ostinato.lab import quality
from ostinato.lab.needles import needle_questions
from ostinato.lab.qmsum import qmsum_questions
from ostinato.lab.question import Question
from ostinato.lab.rouge import rouge_l
from ostinato.prompt.span import Prompt, Span

QUESTION = Question(
    "q", ("The cat is Tom.", "The dog is Rex, who barks.", "The hen is Ada."), "Who?", "Rex.", needle="rex"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model whose tokens are bytes; without a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama", folder)
    return folder


@pytest.fixture(scope="module")
def reader(folder: Path) -> quality.Reader:
    return quality.Reader(str(folder), dtype="float32", kv_tokens=2_048)


@pytest.fixture
def meetings(tmp_path: Path) -> Path:
    """Two meetings of 40 turns; what the first question of each is about is said in turns 20 to 22."""
    path = tmp_path / "meetings.jsonl"
    lines = [
        {
            "meeting_transcripts": [
                {"speaker": f"S{i % 3}", "content": f"m{number} turn {i} " + "word " * 20} for i in range(40)
            ],
            "specific_query_list": [
                {"query": f"What {i}?", "answer": "The word.", "relevant_text_span": [["20", "22"]]}
                for i in range(2)
            ],
        }
        for number in range(2)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@pytest.fixture
def essays(tmp_path: Path) -> Path:
    folder = tmp_path / "essays"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"It is said of {name} that all is well. " * 40)
    return folder


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("mode", quality.MODES)
def test_logits_are_those_of_the_dense_reference(folder: Path, reader: quality.Reader, mode: str) -> None:
    prompt = quality.prompts_of(reader, QUESTION)[mode]
    answer = reader.tokenizer.encode("Rex, the dog.", add_bos=False)
    last = prompt.chains[-1]
    read = Prompt((*prompt.chains[:-1], replace(last, spans=(*last.spans, Span(tuple(answer))))))
    expected = dense_logits(decoder_of(folder), read)[-len(answer) - 1 : -1]
    reader.forget()
    for _ in range(2):  # computed, then with all but the last token cached
        torch.testing.assert_close(reader.logits(prompt, answer, step_tokens=48), expected, atol=1e-3, rtol=0)


def test_modes_differ_in_nothing_but_what_is_seen(reader: quality.Reader) -> None:
    prompts = quality.prompts_of(reader, QUESTION)
    asked = prompts["full"].token_ids
    assert prompts["modular"].token_ids == asked
    assert prompts["isolated"].token_ids == asked
    assert len(prompts["none"].token_ids) < len(asked)
    passages = [chain for chain in prompts["isolated"].chains if chain.home is not None]
    assert len(passages) == len(QUESTION.passages)
    assert not any(chain.sees for chain in passages)
    tokens = sum(len(chain.token_ids) for chain in passages)
    share = {
        mode: quality.recomputed_share(prompt, prompts["modular"])
        for mode, prompt in prompts.items()
        if mode != "none"
    }
    assert share["full"] == 1
    assert share["isolated"] == share["modular"] == 0
    # The first passage follows the beginning and sees all there is before it.
    assert share["linked 16"] == pytest.approx(2 * 16 / tokens)


def test_measure(reader: quality.Reader) -> None:
    of = {m.mode: m for m in quality.measure(reader, "data", QUESTION)}
    assert tuple(of) == quality.MODES
    assert (of["full"].kl, of["full"].agreement) == (0, 1)
    assert of["full (again)"].kl == pytest.approx(0, abs=1e-5)
    assert 0 < of["modular"].kl < of["none"].kl
    assert of["full"].score in (0.0, 1.0)
    assert of["full (again)"].reply is None


def test_replies_do_not_depend_on_company(reader: quality.Reader) -> None:
    prompts = list(quality.prompts_of(reader, QUESTION).values())
    together = reader.replies(prompts, 8)
    reader.forget()
    assert together == [reader.replies([prompt], 8)[0] for prompt in prompts]


def test_prompt_too_long(reader: quality.Reader) -> None:
    question = replace(QUESTION, passages=("long " * 500,))
    with pytest.raises(OstinatoError, match=r"module|context|positions"):
        quality.measure(reader, "data", question)


def test_compare() -> None:
    a, b = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([[1.0, 0.0], [2.0, 0.0]])
    kl, agreement = quality.compare(a, b)
    p = torch.softmax(a[0], -1)
    assert kl == pytest.approx(float((p * (p / p.flip(0)).log()).sum()) / 2)
    assert agreement == 0.5


def test_summary_pairs_questions() -> None:
    kls = {"full": 0.0, "full (again)": 0.0, "none": 4.0, "isolated": 2.0, "modular": 1.0}
    measures = [
        quality.Measure("d", f"q{i}", mode, (i + 1) * kls.get(mode, 0.5), 1.0, None, 0.0, None)
        for i in range(5)
        for mode in quality.MODES
    ]
    row = next(row for row in quality.summarise(measures) if row.mode == "modular")
    assert row.kl == 3
    assert row.kl_interval[0] < 3 < row.kl_interval[1]
    assert row.of_isolated_interval == pytest.approx((0.5, 0.5))
    assert row.score is None


@pytest.mark.parametrize(
    ("reply", "reference", "expected"),
    [
        ("The cat sat.", "the cat sat", 1.0),
        ("the cat", "the dog and the cat", 2 * 2 / 7),
        ("b a", "a b", 0.5),
        ("", "a", 0.0),
        ("x", "a", 0.0),
    ],
)
def test_rouge_l(reply: str, reference: str, expected: float) -> None:
    assert rouge_l(reply, reference) == pytest.approx(expected)


def test_qmsum_passages_surround_what_is_asked_about(meetings: Path) -> None:
    chosen = qmsum_questions(meetings, words, questions=3, max_tokens=1_000, seed=0)
    assert len({question.id for question in chosen[:2]}) == 2, "one of each meeting first"
    assert len(chosen) == 3
    for question in chosen:
        assert all(words(passage) <= 400 for passage in question.passages)
        assert words(" ".join(question.passages)) <= 1_000
        assert "turn 21 " in "\n".join(question.passages)
        order = [passage.split()[3] for passage in question.passages]
        assert order == sorted(order, key=int)
    assert chosen == qmsum_questions(meetings, words, questions=3, max_tokens=1_000, seed=0)


@pytest.mark.parametrize("line", ["{", "[]", '{"meeting_transcripts": []}', '{"meeting_transcripts": 1}'])
def test_qmsum_names_the_bad_line(meetings: Path, line: str) -> None:
    meetings.write_text(meetings.read_text() + "\n\n" + line)
    with pytest.raises(OstinatoError, match="line 4"):
        qmsum_questions(meetings, words, questions=1, max_tokens=1_000, seed=0)


def test_needles(essays: Path) -> None:
    chosen = needle_questions(essays, words, questions=4, max_tokens=600, seed=1)
    assert len(chosen) == 4
    for question in chosen:
        assert question.needle is not None
        assert question.needle in question.answer
        assert sum(question.answer in passage for passage in question.passages) == 1
        assert words(" ".join(question.passages)) <= 600
    assert chosen == needle_questions(essays, words, questions=4, max_tokens=600, seed=1)


def test_nothing_to_ask(tmp_path: Path, reader: quality.Reader) -> None:
    with pytest.raises(OstinatoError, match=r"\.txt"):
        quality.load_questions(tmp_path, reader.tokenizer, questions=1, max_tokens=99)
    (tmp_path / "a.txt").write_text("A sentence that is longer than four tokens.")
    with pytest.raises(OstinatoError, match="fits 4 tokens"):
        quality.load_questions(tmp_path, reader.tokenizer, questions=1, max_tokens=4)
    with pytest.raises(OstinatoError, match="no-such"):
        quality.load_questions(tmp_path / "no-such", reader.tokenizer, questions=1, max_tokens=99)


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(OstinatoError, match="pip install matplotlib"):
        quality.pyplot()


def test_command(tmp_path: Path, meetings: Path, folder: Path) -> None:
    pytest.importorskip("matplotlib")
    # Tokens are bytes here, and the model has 512 positions: one passage of 312 tokens.
    lines = [json.loads(line) for line in meetings.read_text().splitlines()]
    for line in lines:
        line["meeting_transcripts"] = [{"speaker": "S", "content": "word " * 15} for _ in range(4)]
    meetings.write_text("\n".join(json.dumps(line) for line in lines))
    report, picture = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["quality", str(meetings), "--model", str(folder), "--questions", "1", "--max-tokens", "330"]
    done = CliRunner().invoke(
        app, [*arguments, "--dtype", "float32", "--json", str(report), "--plot", str(picture)]
    )
    assert done.exit_code == 0, done.output
    assert "linked 32" in done.output
    written = json.loads(report.read_text())
    assert quality.Report.from_json(written).to_json() == json.loads(json.dumps(written), object_hook=_tuples)
    assert {row["questions"] for row in written["rows"]} == {1}
    assert picture.read_bytes().startswith(b"\x89PNG")


def _tuples(value: dict[str, object]) -> dict[str, object]:
    return {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}
