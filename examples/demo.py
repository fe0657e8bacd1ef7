"""A long question about a real document, asked twice: cold, then with its prefill cached.

make demo        or        python examples/demo.py
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ostinato import Chunk, Engine, SamplingParams
from ostinato.terminal import open_engine

DOCUMENT = Path(__file__).parents[1] / "docs" / "how-it-works.md"
QUESTION = "What happens when memory is full? Answer in two sentences."

console = Console(highlight=False)


def ask(engine: Engine, title: str) -> Chunk:
    """Stream one answer to the terminal; return its last chunk, which has usage and timing."""
    messages = [
        {
            "role": "system",
            "content": "Answer from this document.\n\n" + DOCUMENT.read_text(encoding="utf-8"),
        },
        {"role": "user", "content": QUESTION},
    ]
    console.rule(f"[bold]{title}")
    last = None
    for last in engine.stream(messages, SamplingParams(max_tokens=80, temperature=0)):
        console.print(last.text, end="", markup=False, soft_wrap=True)
    console.print()
    assert last is not None
    return last


def rate(last: Chunk) -> str:
    return f"{(last.usage.completion_tokens - 1) / (last.timing.total - last.timing.ttft):.0f}"


def main() -> None:
    with open_engine("smollm2-135m") as engine:
        console.print(f"[bold]Q:[/] {QUESTION}  [dim](about {DOCUMENT.name})[/]")
        cold = ask(engine, "cold")
        cached = ask(engine, "the same again")
    table = Table("", "prompt tokens", "cached tokens", "TTFT", "decode tokens/s")
    for name, last in (("cold", cold), ("cached", cached)):
        ttft = f"{last.timing.ttft * 1000:.0f} ms"
        table.add_row(name, str(last.usage.prompt_tokens), str(last.usage.cached_tokens), ttft, rate(last))
    console.print(table)
    console.print(f"The first token came [bold]{cold.timing.ttft / cached.timing.ttft:.0f} times[/] sooner.")


if __name__ == "__main__":
    main()
