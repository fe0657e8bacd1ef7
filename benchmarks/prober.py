"""Can somebody tell from the time to the first token what others have asked?

A victim asks prompts of 512 tokens. A prober then times the same prompts and as many that nobody ever asked, in random
order, each once. The area under the ROC curve of its times (0.5: it learns nothing; 1: it is always right) is measured
for a prober of another organisation, for a colleague whose own scope the prompts are not in, for a colleague in a scope
that both share, and for the same with `--release-once`.

    python benchmarks/prober.py --json prober.json
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
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ostinato.access.access import Access
from ostinato.access.principal import Permission

MODEL = "smollm2-135m"
TOKENS = 512
MARKERS = ("<!-- prober: begin -->", "<!-- prober: end -->")
SHARE: tuple[Permission, ...] = ("publish:org",)


@dataclass(frozen=True)
class Prober:
    """Who probes, and how the prompts are shared."""

    name: str
    org: str
    scope: str | None
    release_once: bool = False
    share: float = 1.0
    """Of --probes. Where the answer is not in doubt fewer will do."""


PROBERS = (
    Prober("another organisation", "rival", None),
    Prober("another organisation, scope org", "rival", "org", share=0.25),
    Prober("a colleague, own scopes", "acme", None, share=0.25),
    Prober("a colleague, scope org", "acme", "org", share=0.1),
    Prober("a colleague, scope org, --release-once", "acme", "org", release_once=True, share=0.1),
)


@dataclass(frozen=True)
class Result:
    """What a prober learned."""

    prober: str
    probes: int
    auc: float
    interval: tuple[float, float]
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


@contextmanager
def serving(folder: Path, kv_tokens: int, release_once: bool) -> Generator[tuple[str, Access]]:
    """A server of its own process, with state of its own."""
    state = folder / "access.db"
    command = [
        sys.executable,
        "-m",
        "ostinato.cli",
        "serve",
        MODEL,
        "--port",
        "0",
        "--kv-tokens",
        str(kv_tokens),
    ]
    if release_once:
        command.append("--release-once")
    environment = os.environ | {"OSTINATO_ACCESS": str(state)}
    with (
        Access(state) as access,
        subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        ) as process,
    ):
        try:
            assert process.stderr
            while not (found := re.search(r"at (http://\S+) ", line := process.stderr.readline())):
                assert line, "the server did not start"
            yield found[1], access
        finally:
            process.terminate()


def ask(client: httpx.Client, prompt: list[int], scope: str | None) -> tuple[float, int]:
    """Seconds to the first token, and the cached tokens that the server tells."""
    body: dict[str, object] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 1,
        "ignore_eos": True,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    if scope is not None:
        body["cache_control"] = {"scope": scope}
    started = time.perf_counter()
    first, cached = 0.0, 0
    with client.stream("POST", "/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - started
            usage = json.loads(line[6:]).get("usage")
            if usage:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first, cached


def probe(prober: Prober, probes: int, seed: int, progress: Progress) -> Result:
    """Time one prober's probes."""
    draw = random.Random(f"{prober.name} {seed}")
    # No two begin alike, or a probe would hit what the prober itself has asked.
    firsts = draw.sample(range(1000, 40_000), probes)
    prompts = [[first, *(draw.randrange(1000, 40_000) for _ in range(TOKENS - 1))] for first in firsts]
    asked = prompts[: probes // 2]
    task = progress.add_task(prober.name, total=len(asked) + probes)
    times: dict[bool, list[float]] = {True: [], False: []}
    cached = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), 2 * probes * TOKENS, prober.release_once) as (
            url,
            access,
        ),
    ):

        def client(org: str, user: str) -> httpx.Client:
            key = access.keys.create(org, user, permissions=SHARE)[1]
            return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)

        with client("acme", "victim") as victim, client(prober.org, "prober") as own:
            for prompt in asked:
                ask(victim, prompt, prober.scope)
                progress.advance(task)
            order = [(prompt, number < len(asked)) for number, prompt in enumerate(prompts)]
            draw.shuffle(order)
            for prompt, known in order:
                seconds, hit = ask(own, prompt, prober.scope)
                times[known].append(seconds)
                cached += hit
                progress.advance(task)
    return Result(
        prober.name,
        probes,
        auc(times[True], times[False]),
        interval(times[True], times[False], seed),
        statistics.median(times[True]) * 1000,
        statistics.median(times[False]) * 1000,
        cached,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=400, help="of each prober, half of them asked before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--docs", type=Path, help="put the table between the markers of this page")
    arguments = parser.parse_args()
    console = Console(width=140)
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for prober in PROBERS:
            results.append(probe(prober, round(arguments.probes * prober.share), arguments.seed, progress))
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    table = Table(
        "prober", "probes", "AUC", "95 %", "TTFT asked before", "TTFT new", "cached tokens told", box=MARKDOWN
    )
    for result in results:
        low, high = result.interval
        table.add_row(
            result.prober,
            str(result.probes),
            f"{result.auc:.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{result.ttft_asked_ms:.1f} ms",
            f"{result.ttft_new_ms:.1f} ms",
            f"{result.cached_tokens:,}",
        )
    console.print(table)
    if arguments.docs:
        _insert(table, arguments.docs)


def _insert(table: Table, page: Path) -> None:
    """Put the table between the markers of a page."""
    text = io.StringIO()
    Console(file=text, width=200).print(table)
    begin, end = MARKERS
    before, _, rest = page.read_text().partition(begin)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    page.write_text("\n".join([before + begin, *lines, end + rest.partition(end)[2]]))


if __name__ == "__main__":
    main()
