"""A code assistant: source files are modules, and every question is asked about the files that matter to it.

python examples/code_assistant.py

`code_assistant.pml` takes the files with `src`, to the character; code that stands in the markup itself is wrapped
in CDATA. The prompts are written in PML here. They could as well be built with `use` and `user`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import show
from ostinato import Engine

SCHEMA = Path(__file__).parent / "code_assistant.pml"

QUESTIONS = (
    (("stock", "orders"), "What does the function `confirm` return?"),
    (("prices",), "What does `best_discount` return when no discount applies?"),
    (("style", "prices", "orders"), "Explain the class Order in one sentence."),
    (("style", "stock"), "What does the method `receive` of the class Stock do?"),
)


def main(engine: Engine, ask: show.Ask = show.ask) -> Sequence[show.Asked]:
    show.register(engine, SCHEMA)
    return [ask(engine, question, prompt(files, question)) for files, question in QUESTIONS]


def prompt(files: Sequence[str], question: str) -> str:
    imports = "".join(f"<{file}/>" for file in files)
    return f'<prompt schema="code">{imports}<user>{escape(question)}</user></prompt>'


if __name__ == "__main__":
    show.run(main)
