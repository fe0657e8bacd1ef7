"""A question asked twice, cold and cached; then documents reused in any choice and order.

make demo        or        python examples/demo.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Column, Table

from ostinato import Chunk, Engine, Reply, SamplingParams
from ostinato.prompt.schema import Document, Documents, SchemaPrompt, Turn, user
from ostinato.terminal import open_engine
from show import console, milliseconds, stream

DOCUMENT = Path(__file__).parents[1] / "docs" / "how-it-works.md"
QUESTION = "What happens when memory is full? Answer in two sentences."

DOCUMENTS = Path(__file__).parent / "demo"
INSTRUCTION = "Answer the question from these documents. Be brief."
ABOUT_DOCUMENTS = (
    (("observatory", "ferry", "bakery", "lighthouse"), "How many loaves does the bakery sell a day?"),
    (("ferry", "observatory", "lighthouse"), "How many steps does the stair of the lighthouse have?"),
    (("bakery", "observatory"), "What is the diameter of the mirror of the telescope?"),
)


def main() -> None:
    with open_engine("smollm2-135m") as engine:
        prefix(engine)
        console.print()
        modules(engine)


# -- the same prompt again --------------------------------------------------------------------------------


def prefix(engine: Engine) -> None:
    """The same long question twice."""
    console.rule("[bold]1. The same prompt again")
    console.print(f"[bold]Q:[/] {QUESTION}  [dim](about {DOCUMENT.name})[/]")
    cold = ask(engine, "cold")
    cached = ask(engine, "the same again")
    table = Table("", *numeric("prompt tokens", "cached tokens", "TTFT", "decode tokens/s"))
    for name, last in (("cold", cold), ("cached", cached)):
        usage, ttft = last.usage, milliseconds(last.timing.ttft)
        table.add_row(name, str(usage.prompt_tokens), str(usage.cached_tokens), ttft, rate(last))
    console.print()
    console.print(table)
    console.print(f"The first token came [bold]{cold.timing.ttft / cached.timing.ttft:.0f} times[/] sooner.")


def ask(engine: Engine, title: str) -> Chunk:
    """Stream one answer to the terminal; return its last chunk, which has usage and timing."""
    messages = [
        {
            "role": "system",
            "content": "Answer from this document.\n\n" + DOCUMENT.read_text(encoding="utf-8"),
        },
        {"role": "user", "content": QUESTION},
    ]
    console.print(f"\n[bold]{title}:[/]")
    _, last = stream(engine, messages, SamplingParams(max_tokens=80, temperature=0))
    return last


def rate(last: Chunk) -> str:
    return f"{(last.usage.completion_tokens - 1) / (last.timing.total - last.timing.ttft):.0f}"


# -- the same documents, chosen and ordered anew ----------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One question, answered without any cache and with the documents' states at hand."""

    names: Sequence[str]
    question: str
    cold: Reply
    cached: Reply


def modules(engine: Engine) -> None:
    """Four documents, asked about in three orders and choices."""
    console.rule("[bold]2. The same documents, in another order and choice each time")
    params = SamplingParams(max_tokens=48, temperature=0)
    cold: list[Reply] = []
    for names, question in ABOUT_DOCUMENTS:
        engine.clear_cache()
        cold.append(engine.generate(prompt(names, question), params, mode="exact"))
    engine.clear_cache()
    # Each document's states depend on its text and on the instruction alone, so any prompt will do to compute them.
    every = sorted({name for names, _ in ABOUT_DOCUMENTS for name in names})
    engine.generate(prompt(every, "Ready?"), SamplingParams(max_tokens=1), mode="modular")
    compared = [
        Compared(names, question, before, engine.generate(prompt(names, question), params, mode="modular"))
        for (names, question), before in zip(ABOUT_DOCUMENTS, cold, strict=True)
    ]
    for number, each in enumerate(compared, 1):
        show_answers(number, each)
    console.print()
    console.print(times(compared))
    console.print(
        "Cold, nothing is cached, and every token sees all before it. Cached, the documents had been computed "
        "once, each for itself, before the first question."
    )


def prompt(names: Sequence[str], question: str) -> SchemaPrompt:
    """A question about some of the documents, in this order."""
    texts = ((DOCUMENTS / f"{name}.txt").read_text(encoding="utf-8").strip() for name in names)
    documents = Documents(tuple(Document(text) for text in texts))
    return SchemaPrompt(None, (Turn("system", INSTRUCTION), documents, user(question)))


def show_answers(number: int, compared: Compared) -> None:
    """Both answers side by side."""
    console.print(f"\n[bold]Q{number}:[/] {compared.question}\n    [dim]about {', '.join(compared.names)}[/]")
    table = Table(expand=True)
    for name, reply in (("cold", compared.cold), ("cached", compared.cached)):
        table.add_column(f"{name}: {milliseconds(reply.timing.ttft)} to the first token", ratio=1)
    table.add_row(*(" ".join(reply.text.split()) for reply in (compared.cold, compared.cached)))
    console.print(table)


def times(compared: Sequence[Compared]) -> Table:
    table = Table("", *numeric("documents", "prompt tokens", "cached tokens", "TTFT cold", "cached", "ratio"))
    for number, each in enumerate(compared, 1):
        cold, cached = each.cold.timing.ttft, each.cached.timing.ttft
        table.add_row(
            f"Q{number}",
            str(len(each.names)),
            str(each.cached.usage.prompt_tokens),
            str(each.cached.usage.cached_tokens),
            milliseconds(cold),
            milliseconds(cached),
            f"[bold]{cold / cached:.0f}×[/]",
        )
    return table


def numeric(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


if __name__ == "__main__":
    main()
