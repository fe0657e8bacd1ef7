"""What the README and the guide show works: their snippets are run, in order, as a reader would run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ostinato
from ostinato import Engine
from ostinato.prompt.pml import is_prompt, parse_prompt, parse_schema
from server_fixtures import serving

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/pml.md")
SERVER = "http://127.0.0.1:8000"


class Snippet(NamedTuple):
    language: str
    line: int
    text: str


def snippets(page: str) -> Iterator[Snippet]:
    """The fenced blocks of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield Snippet(found[1], text.count("\n", 0, found.start(2)), found[2])


@pytest.fixture
def tidy(engine: Engine) -> Iterator[Engine]:
    """The engine, without the pages' schemas afterwards."""
    before = engine.schemas.names()
    yield engine
    for name in set(engine.schemas.names()) - set(before):
        engine.schemas.remove(name)


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(
    page: str,
    tidy: Engine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:

    def loaded_once(*_: object, **__: object) -> Engine:
        return tidy

    monkeypatch.setattr(ostinato, "Engine", loaded_once)
    names: dict[str, Any] = {"__name__": "docs"}
    ran = 0
    with serving(tidy) as url:
        for snippet in snippets(page):
            if snippet.language == "xml":
                check_pml(tidy, snippet.text)
            elif snippet.language == "python":
                # In a file, where prompt programs find their source, on the lines that it has in the page.
                file = tmp_path / f"line_{snippet.line}.py"
                code = "\n" * snippet.line + snippet.text.replace(SERVER, url)
                file.write_text(code, encoding="utf-8")
                exec(compile(code, file, "exec"), names)
                printed = capsys.readouterr().out
                for expected in re.findall(r"# prints: (.*)", snippet.text):
                    assert expected in printed, f"{page}, line {snippet.line}"
            else:
                continue
            ran += 1
    assert ran == len(re.findall(r"^```(?:xml|python)$", (ROOT / page).read_text(encoding="utf-8"), re.M)) > 0


def check_pml(engine: Engine, text: str) -> None:
    """A schema is registered, a prompt is laid out over the schema it names."""
    if is_prompt(text):
        assert engine.encode(parse_prompt(text)).token_ids
    else:
        engine.register(parse_schema(text, folder=ROOT / "examples"))


@pytest.mark.parametrize(
    "page", [*PAGES, "docs/how-it-works.md", "docs/server.md", "docs/performance.md", "docs/eviction.md"]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), f"{page} links to {target}"
