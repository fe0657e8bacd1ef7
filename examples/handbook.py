"""Questions about a handbook: each imports the sections that a search found, whichever they are.

python examples/handbook.py

Sections are computed once, when the handbook is registered. After that, any question about any of them costs the
question. A prefix cache would start anew with every other choice of sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import show
from ostinato import Engine
from ostinato.prompt.schema import use, user

HANDBOOK = Path(__file__).parent / "handbook.pml"

QUESTIONS = (
    (("leave", "hours", "parents"), "How many days of paid leave does every employee have?"),
    (("computers", "safety"), "When is the alarm tested?"),
    (("hours", "parents"), "How many hours does a full week have?"),
    (("training", "leave", "hours", "travel"), "When do language courses take place?"),
)


def main(engine: Engine, ask: show.Ask = show.ask) -> Sequence[show.Asked]:
    handbook = show.register(engine, HANDBOOK)
    return [
        ask(engine, question, handbook.prompt(*(use(section) for section in sections), user(question)))
        for sections, question in QUESTIONS
    ]


if __name__ == "__main__":
    show.run(main)
