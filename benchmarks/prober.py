"""Can somebody tell from anything that it is answered what others have asked?

A victim asks prompts. A prober then asks the same and as many that nobody ever asked, in random order, and looks at
three things: the time to the first token, the numbers of tokens that it is told, and the explanation. How well each
tells the two apart is measured as the area under the ROC curve (0.5: it learns nothing; 1: it is always right). What is
a number or a text that is told is a class of answers: how often each class was asked before is counted in one half of
the probes, and judges the other.

The probers are of another organisation; a colleague whose own scopes the prompts are not in; a colleague in a scope that
both share; the same with `--release-once`; and with that, one that plays it: it asks twice with `ttl: 0`, asks,
forgets its own request, reads the count, and asks again.

    python benchmarks/prober.py --json prober.json
    python benchmarks/prober.py --probers once plays --tokens 128
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ostinato.access.access import Access
from ostinato.access.principal import Permission

MODEL = "smollm2-135m"
MARKERS = ("<!-- prober: begin -->", "<!-- prober: end -->")
SHARE: tuple[Permission, ...] = ("publish:org",)


@dataclass(frozen=True)
class Prober:
    """Who probes, and how the prompts are shared."""

    key: str
    name: str
    org: str
    scope: str | None
    release_once: bool = False
    plays: bool = False
    """Whether it asks each prompt again and again, to become its own second asker."""
    share: float = 1.0
    """Of --probes. Where the answer is not in doubt fewer will do."""


PROBERS = (
    Prober("other", "another organisation", "rival", None),
    Prober("other-org", "another organisation, scope org", "rival", "org"),
    Prober("colleague", "a colleague, own scopes", "acme", None),
    Prober("shared", "a colleague, scope org", "acme", "org", share=0.1),
    Prober("once", "a colleague, scope org, --release-once", "acme", "org", release_once=True),
    Prober("plays", "the same, and plays it", "acme", "org", release_once=True, plays=True),
)


@dataclass(frozen=True)
class Asked:
    """What one request was answered."""

    id: str
    seconds: float
    """To the first token."""
    cached: int
    explanation: str


@dataclass(frozen=True)
class Probe:
    """What a prober sees of one prompt."""

    known: bool
    """Whether the victim asked it."""
    seconds: float
    counts: tuple[int, ...]
    """Tokens that it was told of: those cached at each asking, and those that it forgot."""
    explanations: tuple[str, ...]


@dataclass(frozen=True)
class Area:
    """The area under a ROC curve, and 95 % of it."""

    auc: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.auc:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Result:
    """What a prober learned."""

    prober: str
    probes: int
    time: Area
    counts: Area
    explanations: Area
    ttft_asked_ms: float
    ttft_new_ms: float
    cached_tokens: int
    """Of all probes, as the server tells them."""


def auc(asked: Sequence[float], new: Sequence[float]) -> float:
    """Probability that a prompt that was asked before is answered sooner than one that was not."""
    wins = sum((a < b) + (a == b) / 2 for a in asked for b in new)
    return wins / (len(asked) * len(new))


def interval(asked: Sequence[float], new: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % of the AUC, by bootstrap."""
    draw = random.Random(seed)
    found = sorted(auc(draw.choices(asked, k=len(asked)), draw.choices(new, k=len(new))) for _ in range(200))
    return found[5], found[194]


def area_of_times(probes: Sequence[Probe], seed: int) -> Area:
    """How well the times tell what was asked before."""
    asked, new = ([each.seconds for each in probes if each.known is known] for known in (True, False))
    return Area(auc(asked, new), *interval(asked, new, seed))


def area_of_classes(probes: Sequence[Probe], told: Callable[[Probe], Hashable], seed: int) -> Area:
    """How well what is told does: each half of the probes, judged by how often the other half's were asked before."""
    asked, new = ([each for each in probes if each.known is known] for known in (True, False))
    halves = [(asked[half::2], new[half::2]) for half in (0, 1)]
    found: list[Area] = []
    for learned, judged in (halves, halves[::-1]):
        before, never = (Counter(told(each) for each in part) for part in learned)

        def score(
            probe: Probe, before: Counter[Hashable] = before, never: Counter[Hashable] = never
        ) -> float:
            # What was never seen says nothing; what was asked before comes first in `auc`.
            seen = before[told(probe)] + never[told(probe)]
            return -(before[told(probe)] + 1) / (seen + 2)

        of_asked, of_new = ([score(each) for each in part] for part in judged)
        found.append(Area(auc(of_asked, of_new), *interval(of_asked, of_new, seed)))
    # Scores of different halves are not compared: which has a few more of a class is chance.
    means = [statistics.mean(values) for values in zip(*(astuple(each) for each in found), strict=True)]
    return Area(means[0], means[1], means[2])


@contextmanager
def started(folder: Path, *options: str) -> Generator[tuple[str, Access, int]]:
    """A server of its own process, with state of its own: its address, the state and the process's id."""
    state = folder / "access.db"
    command = [sys.executable, "-m", "ostinato.cli", "serve", MODEL, "--port", "0", *options]
    environment = os.environ | {"OSTINATO_ACCESS": str(state)}
    with (
        Access(state) as access,
        # In a file, which takes all that it says: a pipe that nobody reads would fill up, and stop it.
        (folder / "server.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log, env=environment) as process,
    ):
        try:
            while not (found := re.search(r"at (http://\S+) ", (folder / "server.log").read_text())):
                assert process.poll() is None, "the server did not start"
                time.sleep(0.1)
            yield found[1], access, process.pid
        finally:
            process.terminate()


@contextmanager
def serving(folder: Path, kv_tokens: int, release_once: bool) -> Generator[tuple[str, Access]]:
    """A server with a pool of a size."""
    options = ["--kv-tokens", str(kv_tokens), *(["--release-once"] if release_once else [])]
    with started(folder, *options) as (url, access, _):
        yield url, access


def ask(client: httpx.Client, prompt: list[int], scope: str | None, ttl: int | None = None) -> Asked:
    """Ask for one token, and note all that comes back."""
    control = {"scope": scope, "ttl": ttl}
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 1,
        "ignore_eos": True,
        "explain": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_control": {name: value for name, value in control.items() if value is not None} or None,
    }
    started = time.perf_counter()
    seconds, id, cached, explanation = 0.0, "", 0, ""
    with client.stream("POST", "/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            seconds = seconds or time.perf_counter() - started
            event = json.loads(line[6:])
            id = event["id"]
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
            if event.get("ostinato"):
                explanation = comparable(event["ostinato"]["cache"])
    return Asked(id, seconds, cached, explanation)


def comparable(explanation: dict[str, Any]) -> str:
    """An explanation without what differs from each to the next: ids, the prober's own words, and how long ago."""
    spans = [dict(span) for span in explanation["spans"]]
    for span in spans:
        miss = span.get("miss")
        if miss is not None:
            span["miss"] = miss | {name: "…" for name in ("yours", "cached", "seconds_ago") if name in miss}
    advice = re.sub(r"'[^']*'|\"[^\"]*\"|“[^”]*”", "…", explanation.get("advice") or "")
    told = {name: explanation[name] for name in ("prompt_tokens", "cached_tokens")}
    return json.dumps(told | {"spans": spans, "advice": advice}, sort_keys=True)


def forget(client: httpx.Client, id: str) -> int:
    """Forget a request of one's own; the tokens that it is told to have been."""
    answer = client.post("/forget", json={"request": id})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def look(client: httpx.Client, prober: Prober, prompt: list[int], known: bool) -> Probe:
    """All that a prober sees of one prompt."""
    asked = [ask(client, prompt, prober.scope, 0 if prober.plays else None)]
    forgotten: list[int] = []
    if prober.plays:
        asked.append(ask(client, prompt, prober.scope, 0))
        asked.append(ask(client, prompt, prober.scope))
        forgotten.append(forget(client, asked[-1].id))
        asked.append(ask(client, prompt, prober.scope))
    counts = (*(each.cached for each in asked), *forgotten)
    # The last is the one that all asking before it was for.
    return Probe(known, asked[-1].seconds, counts, tuple(each.explanation for each in asked))


def probe(prober: Prober, probes: int, tokens: int, seed: int, progress: Progress) -> Result:
    """All probes of one prober."""
    draw = random.Random(f"{prober.name} {seed}")
    # No two begin alike, or a probe would hit what the prober itself has asked.
    firsts = draw.sample(range(1000, 40_000), probes)
    prompts = [[first, *(draw.randrange(1000, 40_000) for _ in range(tokens - 1))] for first in firsts]
    asked = prompts[: probes // 2]
    task = progress.add_task(prober.name, total=len(asked) + probes)
    seen: list[Probe] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), 2 * probes * tokens, prober.release_once) as (url, access),
    ):

        def client(org: str, user: str) -> httpx.Client:
            key = access.keys.create(org, user, permissions=SHARE)[1]
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.Client(base_url=url, headers=headers, timeout=60)

        with client("acme", "victim") as victim, client(prober.org, "prober") as own:
            for prompt in asked:
                ask(victim, prompt, prober.scope)
                progress.advance(task)
            order = [(prompt, number < len(asked)) for number, prompt in enumerate(prompts)]
            draw.shuffle(order)
            for prompt, known in order:
                seen.append(look(own, prober, prompt, known))
                progress.advance(task)
    times = {
        known: statistics.median(each.seconds for each in seen if each.known is known)
        for known in (True, False)
    }
    return Result(
        prober.name,
        probes,
        area_of_times(seen, seed),
        area_of_classes(seen, lambda each: each.counts, seed),
        area_of_classes(seen, lambda each: each.explanations, seed),
        times[True] * 1000,
        times[False] * 1000,
        sum(sum(each.counts) for each in seen),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=400, help="of each prober, half of them asked before")
    parser.add_argument("--tokens", type=int, default=256, help="of each prompt")
    keys = [prober.key for prober in PROBERS]
    parser.add_argument("--probers", nargs="+", choices=keys, default=keys, help="those to have probe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", type=Path, help="put the table between the markers of this page")
    arguments = parser.parse_args()
    console = Console(width=160)
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for prober in (each for each in PROBERS if each.key in arguments.probers):
            probes = max(8, round(arguments.probes * prober.share))
            results.append(probe(prober, probes, arguments.tokens, arguments.seed, progress))
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    table = Table(
        "prober",
        "probes",
        "AUC of times",
        "of counts",
        "of explanations",
        "TTFT asked before",
        "TTFT new",
        "tokens told",
        box=MARKDOWN,
    )
    for result in results:
        table.add_row(
            result.prober,
            str(result.probes),
            str(result.time),
            str(result.counts),
            str(result.explanations),
            f"{result.ttft_asked_ms:.1f} ms",
            f"{result.ttft_new_ms:.1f} ms",
            f"{result.cached_tokens:,}",
        )
    console.print(table)
    if arguments.docs:
        insert(table, arguments.docs, MARKERS)


def insert(table: Table, page: Path, markers: tuple[str, str]) -> None:
    """Put a table between the markers of a page."""
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    begin, end = markers
    before, _, rest = page.read_text().partition(begin)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    page.write_text("\n".join([before + begin, *lines, end + rest.partition(end)[2]]))


if __name__ == "__main__":
    main()
