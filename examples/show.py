"""What the examples print: each question, its answer as it comes, and how soon that began, cached and cold."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato import Chunk, Engine, SamplingParams, Timing, Usage
from ostinato.engine.intake import PromptLike
from ostinato.prompt.schema import Schema
from ostinato.terminal import open_engine, progress_bar

console = Console(highlight=False)


@dataclass(frozen=True)
class Asked:
    """A question and its answer."""

    question: str
    prompt: PromptLike
    answer: str
    usage: Usage
    timing: Timing


Ask = Callable[[Engine, str, PromptLike], Asked]


def register(engine: Engine, schema: Schema | str | Path) -> Schema:
    """Register a schema and compute the states of its modules."""
    started = time.perf_counter()
    with progress_bar("Encoding modules") as progress:
        layout = engine.register(schema, encode=True, progress=progress)
    seconds = time.perf_counter() - started
    known = layout.schema
    console.print(
        f"[bold]{known.name}[/]: {known.measure.modules} modules of {layout.root.tokens} tokens together, "
        f"encoded once in {seconds:.2f} s"
    )
    return known


def ask(engine: Engine, question: str, prompt: PromptLike, max_tokens: int = 60) -> Asked:
    """Answer a question and print the answer as it comes."""
    console.print(f"\n[bold]Q:[/] {question}")
    params = SamplingParams(max_tokens=max_tokens, temperature=0, frequency_penalty=0.3)
    text, last = stream(engine, prompt, params)
    console.print(
        f"[dim]{last.usage.prompt_tokens} prompt tokens, {last.usage.cached_tokens} of them cached; "
        f"first token after {milliseconds(last.timing.ttft)}[/]"
    )
    return Asked(question, prompt, text, last.usage, last.timing)


def compare(engine: Engine, asked: Sequence[Asked]) -> Table:
    """Print the time to the first token beside what it is when nothing is cached."""
    table = Table()
    table.add_column("question", no_wrap=True, max_width=max(16, console.width - 48))
    for title in ("prompt tokens", "cached", "TTFT cached", "TTFT cold", "ratio"):
        table.add_column(title, justify="right")
    for each in asked:
        engine.clear_cache()
        cold = engine.generate(each.prompt, SamplingParams(max_tokens=1), mode="exact").timing
        usage = each.usage
        table.add_row(
            each.question,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            milliseconds(each.timing.ttft),
            milliseconds(cold.ttft),
            f"{cold.ttft / each.timing.ttft:.0f}×",
        )
    console.print()
    console.print(table)
    return table


def run(main: Callable[[Engine], Sequence[Asked]]) -> None:
    """Run an example with an engine of its own."""
    with open_engine("smollm2-135m") as engine:
        compare(engine, main(engine))
        console.print(
            "[dim]A model of 135 million parameters wrote these answers. Larger ones know better.[/]"
        )


def stream(engine: Engine, prompt: PromptLike, params: SamplingParams) -> tuple[str, Chunk]:
    """Print a reply as it comes, in whole words; return its text and its last chunk."""
    text, last = "", None

    def pieces() -> Iterator[str]:
        nonlocal text, last
        for last in engine.stream(prompt, params):
            text += last.text
            yield last.text

    for piece in wrapped(pieces(), console.width):
        console.out(piece, end="")
    assert last is not None
    return text, last


def wrapped(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Text that comes in pieces, in lines of at most `width` that break between words, as soon as may be."""
    column, space, word = 0, "", ""
    for piece in itertools.chain(pieces, "\n"):
        for letter in piece:
            if not letter.isspace():
                word += letter
                continue
            if word:
                fits = not column or column + len(space) + len(word) <= width
                yield space + word if fits else "\n" + word
                column = column + len(space) + len(word) if fits else len(word)
                space, word = "", ""
            if letter == "\n":
                yield "\n"
                column, space = 0, ""
            else:
                space += letter


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
