"""How well the session predictor tells sessions apart, on real texts of known outcome.

    python benchmarks/predictor.py --data ../shared/data --json predictor.json

Three sets. `domains`: first messages to tau-bench's airline agent, whose sessions all go on, against questions about
meetings (QMSum) and essays with the text they are about, which are asked once: easy, for the domains differ. `bare`: the
same without system prompts, excerpts and essays. `turns`: tau-bench alone, whether the customer writes more often than
the median: the domain, the system prompt and the agent are the same. Splits keep a task, a meeting and an essay
together; figures are means over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ostinato import Engine
from ostinato.lab.predictor import Report, read, train
from ostinato.lab.predictor_logs import Session

INSTRUCTION = "Answer the question from the following text. Be brief and precise."
ESSAY_QUESTIONS = (
    "What is this essay about?",
    "Summarise the essay in two sentences.",
    "What does the author advise the reader to do?",
    "Which example does the author give, and what does it show?",
)
EXCERPT = 1200
"""Characters of a meeting or an essay in a prompt."""


def chat(system: str | None, user: str) -> list[dict[str, Any]]:
    front = [] if system is None else [{"role": "system", "content": system}]
    return [*front, {"role": "user", "content": user}]


def once(data: Path, *, bare: bool) -> list[Session]:
    """Questions that are asked once."""
    sessions: list[Session] = []

    def add(group: str, text: str, question: str) -> None:
        asked = (
            chat(None, question) if bare else chat(INSTRUCTION, f"{text[:EXCERPT]}\n\nQuestion: {question}")
        )
        sessions.append(Session(asked, returned=False, group=group))

    for number, line in enumerate((data / "qmsum_test.jsonl").read_text("utf-8").splitlines()):
        meeting = json.loads(line)
        turns = [f"{turn['speaker']}: {turn['content']}" for turn in meeting["meeting_transcripts"]]
        for query in meeting["specific_query_list"]:
            first = int(query["relevant_text_span"][0][0]) if query["relevant_text_span"] else 0
            add(f"meeting {number}", "\n".join(turns[first:]), query["query"])
    if not bare:  # without its essay, a question about one is the same each time
        for path in sorted((data / "essays").glob("*.txt")):
            text = path.read_text("utf-8", errors="replace")
            for number, question in enumerate(ESSAY_QUESTIONS):
                add(f"essay {path.stem}", text[number * EXCERPT :], question)
    return sessions


def airline(data: Path, *, bare: bool) -> list[tuple[Session, int]]:
    """First messages to the airline's agent, and how often the customer writes in all; each message once."""
    sessions: dict[str, tuple[Session, int]] = {}
    for entry in json.loads((data / "tau_bench_airline.json").read_text("utf-8")):
        system, user = (message["content"] for message in entry["traj"][:2])
        turns = sum(message["role"] == "user" for message in entry["traj"])
        sessions[user] = (
            Session(chat(None if bare else system, user), True, f"task {entry['task_id']}"),
            turns,
        )
    return list(sessions.values())


def turns(data: Path) -> list[Session]:
    found = airline(data, bare=False)
    median = statistics.median(count for _, count in found)
    return [Session(session.messages, count > median, session.group) for session, count in found]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sets = {
        "domains": [*(s for s, _ in airline(options.data, bare=False)), *once(options.data, bare=False)],
        "bare": [*(s for s, _ in airline(options.data, bare=True)), *once(options.data, bare=True)],
        "turns": turns(options.data),
    }
    found: dict[str, list[dict[str, Any]]] = {}
    print(
        "| set | sessions | come back | held out | log loss | base rate's | AUC | mean prediction | trusted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with Engine(options.model, kv_tokens=8192) as engine:
        for name, sessions in sets.items():
            start = time.perf_counter()
            examples = read(engine, sessions)
            took = time.perf_counter() - start
            reports = [
                train(
                    examples,
                    fingerprint=engine.fingerprint,
                    model=engine.model_name,
                    epochs=options.epochs,
                    seed=seed,
                )[1]
                for seed in range(options.seeds)
            ]
            found[name] = [report.to_json() for report in reports]
            print(
                row(name, reports, float(examples.labels.mean())) + f" <!-- read in {took:.0f} s -->",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def row(name: str, reports: list[Report], rate: float) -> str:
    held = [report.held_out for report in reports]
    aucs = [report.auc for report in reports if report.auc is not None]
    mean = statistics.mean
    cells = (
        name,
        f"{reports[0].examples}",
        f"{rate:.0%}",
        f"{mean(h.examples for h in held):.0f} ({mean(h.base_rate for h in held):.0%})",
        f"{mean(h.loss for h in held):.3f}",
        f"{mean(h.base_loss for h in held):.3f}",
        f"{mean(aucs):.3f} ± {statistics.stdev(aucs):.3f}",
        f"{mean(report.predicted for report in reports):.0%}",
        f"{sum(report.trained for report in reports)} of {len(reports)}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
