"""Questions about meetings: a file in the format of QMSum, one meeting a line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from ostinato.errors import OstinatoError
from ostinato.lab.question import CountTokens, Question, cut, pack

PASSAGE_TOKENS = 400


def qmsum_questions(
    path: Path, count: CountTokens, *, questions: int, max_tokens: int, seed: int
) -> list[Question]:
    """Questions of randomly chosen meetings, one of each before a second of any.

    A meeting is cut into passages at its speakers' turns. Those that the question's relevant spans touch are
    taken first, then their neighbours, until `max_tokens` are reached.
    """
    rng = random.Random(seed)
    meetings = list(enumerate(_meetings(path), start=1))
    rng.shuffle(meetings)
    asked = [
        (number, meeting, rng.sample(meeting["specific_query_list"], len(meeting["specific_query_list"])))
        for number, meeting in meetings
    ]
    chosen: list[Question] = []
    for turn in range(max((len(queries) for _, _, queries in asked), default=0)):
        for number, meeting, queries in asked:
            if turn < len(queries) and len(chosen) < questions:
                query = queries[turn]
                passages = _passages(meeting, query, count, max_tokens)
                chosen.append(Question(f"meeting {number}", passages, query["query"], query["answer"]))
    return chosen


def _meetings(path: Path) -> list[dict[str, Any]]:
    meetings: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        if not line.strip():
            continue
        meeting = _meeting(line)
        if meeting is None:
            raise OstinatoError(
                f"{path}, line {number}: not a meeting in QMSum's format (a JSON object with "
                "meeting_transcripts and specific_query_list)."
            )
        meetings.append(meeting)
    return meetings


def _meeting(line: str) -> dict[str, Any] | None:
    """The meeting if the line is one."""
    try:
        meeting = json.loads(line)
        turns, queries = meeting["meeting_transcripts"], meeting["specific_query_list"]
        complete = all(isinstance(turn[key], str) for turn in turns for key in ("speaker", "content"))
        complete &= all(isinstance(query[key], str) for query in queries for key in ("query", "answer"))
        for query in queries:
            _spans(query)
    except (ValueError, KeyError, TypeError):
        return None
    return meeting if complete else None


def _spans(query: dict[str, Any]) -> list[tuple[int, int]]:
    """First and last turn of each stretch that the data names as relevant."""
    return [(int(first), int(last)) for first, last in query.get("relevant_text_span", [])]


def _passages(
    meeting: dict[str, Any], query: dict[str, Any], count: CountTokens, max_tokens: int
) -> tuple[str, ...]:
    parts: list[str] = []
    turn_of: list[int] = []
    for number, turn in enumerate(meeting["meeting_transcripts"]):
        for part in cut(f"{turn['speaker']}: {turn['content']}", count, PASSAGE_TOKENS):
            parts.append(part)
            turn_of.append(number)
    groups = pack(parts, count, PASSAGE_TOKENS, "\n")
    spans = _spans(query)

    def distance(group: list[int]) -> int:
        first, last = turn_of[group[0]], turn_of[group[-1]]
        return min((max(0, start - last, first - end) for start, end in spans), default=first)

    texts = ["\n".join(parts[i] for i in group) for group in groups]
    taken: list[int] = []
    left = max_tokens
    for number in sorted(range(len(groups)), key=lambda i: (distance(groups[i]), i)):
        left -= count(texts[number] + "\n\n")
        if left < 0:
            break
        taken.append(number)
    return tuple(texts[i] for i in sorted(taken))
