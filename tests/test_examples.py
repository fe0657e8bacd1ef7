"""The examples and the demo run, and what they print is there and true."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ostinato import Engine, Reply, Timing, Usage

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports an example as `python examples/NAME.py` does: with its folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    others = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - others:
        # Names such as "agent" shall mean nothing to other tests.
        if Path(getattr(sys.modules[name], "__file__", None) or ".").is_relative_to(EXAMPLES):
            del sys.modules[name]


@pytest.fixture
def empty(engine: Engine) -> Iterator[Engine]:
    """The engine without a cache, and without the examples' schemas afterwards."""
    before = engine.schemas.names()
    engine.clear_cache()
    yield engine
    for name in set(engine.schemas.names()) - set(before):
        engine.schemas.remove(name)


@pytest.mark.parametrize("name", ["code_assistant", "handbook", "tutor", "travel", "agent"])
def test_an_example(name: str, example: Any, empty: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    show = example("show")
    asked = example(name).main(empty, ask=partial(show.ask, max_tokens=8))
    assert len(asked) >= 4
    for each in asked:
        assert each.answer.strip()
        assert 0 < each.timing.ttft <= each.timing.total
        new = each.usage.prompt_tokens - each.usage.cached_tokens
        assert each.usage.cached_tokens > 0
        assert new < 64, "all but the question was cached"
    table = show.compare(empty, asked)
    assert table.row_count == len(asked)
    printed = capsys.readouterr().out
    assert all(each.question in " ".join(printed.split()) for each in asked)
    assert "TTFT" in printed


def test_the_agent_uses_its_tools(example: Any, empty: Engine) -> None:
    agent = example("agent")
    assert agent.call("I shall look.\nnumber(Ada)") == "4417"
    assert agent.call("kilometres('2')") == "3.22 kilometres"
    assert agent.call("kilometres(two)") == "two is not a number"
    assert agent.call("paint(Ada)") is None
    ask = partial(example("show").ask, max_tokens=12)
    questions = [each.question for each in agent.main(empty, ask=ask)]
    assert "Result: 19 degrees and sun" in questions


def test_the_demo(example: Any, empty: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    demo = example("demo")
    demo.console.width = 80
    demo.prefix(empty)
    demo.modules(empty)
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    sooner = re.search(r"The first token came (\d+) times sooner", printed)
    assert sooner
    assert int(sooner[1]) > 1
    for number in (1, 2, 3):
        row = re.search(rf"│ Q{number} +│ +\d │ +(\d+) │ +(\d+) │ +\d+ ms │ +\d+ ms │ +(\d+)× │", printed)
        assert row, printed
        assert int(row[1]) - int(row[2]) < 64
        assert int(row[3]) > 1
    assert printed.count("to the first token") == 6


@pytest.mark.parametrize("width", [80, 120])
def test_answers_stand_side_by_side(width: int, example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo = example("demo")
    demo.console.width = width
    reply = Reply("An answer of words. " * 12, (), "length", Usage(2100, 2080, 60), Timing(0, 1.2, 2))
    demo.show_answers(1, demo.Compared(("bakery", "ferry"), "Why?", reply, reply))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) == width
    assert any(line.count("An answer") == 2 for line in lines)


@pytest.mark.parametrize(
    ("pieces", "width", "text"),
    [
        (["one two", " three"], 80, "one two three\n"),
        (["one t", "wo thr", "ee"], 7, "one two\nthree\n"),
        (["long", "est word"], 3, "longest\nword\n"),
        (["if a:\n", "    return b\n\n"], 80, "if a:\n    return b\n\n\n"),
        (["two  spaces"], 80, "two  spaces\n"),
        ([], 80, "\n"),
    ],
)
def test_words_are_not_broken(pieces: list[str], width: int, text: str, example: Any) -> None:
    assert "".join(example("show").wrapped(pieces, width)) == text


def test_words_come_as_soon_as_they_are_whole(example: Any) -> None:
    def pieces() -> Iterator[str]:
        yield "one tw"
        raise KeyboardInterrupt

    words = example("show").wrapped(pieces(), 80)
    assert next(words) == "one"
    with pytest.raises(KeyboardInterrupt):
        next(words)
