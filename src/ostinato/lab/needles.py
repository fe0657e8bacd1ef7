"""Needle tests: a sentence hidden in passages of other people's prose, and a question that only it answers."""

from __future__ import annotations

import random
import re
from pathlib import Path

from ostinato.errors import OstinatoError
from ostinato.lab.question import CountTokens, Question, cut, pack

PASSAGE_TOKENS = 300

_NAMES = (
    "Agnes", "Bruno", "Clara", "Dmitri", "Elena", "Farid", "Greta", "Hugo", "Ingrid", "Jamal", "Kiran", "Leila",
    "Marco", "Nadia", "Oscar", "Paula", "Quentin", "Rosa", "Stefan", "Tamara", "Umberto", "Vera", "Walter", "Yasmin",
)  # fmt: skip
_WORDS = (
    "lantern", "orchard", "copper", "harbour", "velvet", "thunder", "meadow", "compass", "saffron", "glacier",
    "walnut", "falcon", "marble", "cinnamon", "anchor", "puzzle", "violin", "tunnel", "blanket", "pepper",
)  # fmt: skip


def needle_questions(
    folder: Path, count: CountTokens, *, questions: int, max_tokens: int, seed: int
) -> list[Question]:
    """Needles in random passages of the folder's .txt files, `max_tokens` of them a question."""
    pool = [passage for file in sorted(folder.glob("*.txt")) for passage in _passages(file, count)]
    if not pool:
        raise OstinatoError(f"{folder} holds no .txt files with text to hide needles in.")
    rng = random.Random(seed)
    return [_question(f"needle {i + 1}", pool, rng, count, max_tokens) for i in range(questions)]


def _passages(file: Path, count: CountTokens) -> list[list[str]]:
    """A text as passages of sentences."""
    text = " ".join(file.read_text(encoding="utf-8", errors="replace").split())
    sentences = [
        part
        for sentence in re.split(r"(?<=[.!?]) ", text)
        for part in cut(sentence, count, PASSAGE_TOKENS)
        if part
    ]
    return [[sentences[i] for i in group] for group in pack(sentences, count, PASSAGE_TOKENS, " ")]


def _question(
    name: str, pool: list[list[str]], rng: random.Random, count: CountTokens, max_tokens: int
) -> Question:
    person, word = rng.choice(_NAMES), rng.choice(_WORDS)
    sentence = f"The secret word of {person} is {word}."
    left = max_tokens - count(f" {sentence}")
    passages: list[list[str]] = []
    for passage in rng.sample(pool, len(pool)):
        left -= count(" ".join(passage) + "\n\n")
        if left < 0:
            break
        passages.append(list(passage))
    if passages:
        hidden = rng.choice(passages)
        hidden.insert(rng.randint(0, len(hidden)), sentence)
    text = f"What is the secret word of {person}?"
    return Question(name, tuple(" ".join(passage) for passage in passages), text, sentence, needle=word)
