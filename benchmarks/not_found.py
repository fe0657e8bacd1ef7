"""Can somebody tell from the time of a 404 whether there is something?

A colleague has registered private documents, of a long text and with as many readers as there can be. A prober asks for
them and for ids that never were, in random order, and the same with names. The area under the ROC curve of its times
is 0.5 if it learns nothing.

    python benchmarks/not_found.py --probes 400
"""

from __future__ import annotations

import argparse
import random
import secrets
import statistics
import tempfile
import time
from pathlib import Path

import httpx
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from ostinato.access.grants import MAX_READERS
from ostinato.access.principal import Principal
from prober import auc, interval, serving

DOCUMENTS = 8
TEXT = "word " * 200_000


def asked(client: httpx.Client, reference: str) -> float:
    """Seconds until the server says that there is no such document."""
    started = time.perf_counter()
    answer = client.get(f"/v1/documents/{reference}")
    took = time.perf_counter() - started
    assert answer.status_code == 404, answer.text
    return took


def probed(
    client: httpx.Client, there: list[str], absent: list[str], probes: int, draw: random.Random
) -> tuple[list[float], list[float]]:
    """Times of what is there, and of what is not."""
    times: tuple[list[float], list[float]] = [], []
    order = [number % 2 for number in range(probes)]
    draw.shuffle(order)
    for reference in (*there, *absent):
        asked(client, reference)
    for missing in order:
        times[missing].append(asked(client, draw.choice(absent if missing else there)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--probes", type=int, default=400, help="requests by id, and by name")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    table = Table("asked for by", "probes", "AUC", "95 %", "there", "never was", box=MARKDOWN)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder), 4_096, False) as (url, access):
        victim = Principal("acme", "alice")
        readers = [f"user:reader-{number}" for number in range(MAX_READERS)]
        names = [f"plan-{secrets.token_hex(8)}" for _ in range(DOCUMENTS)]
        made = [access.resources.add(victim, "document", name, TEXT, readers=readers) for name in names]
        _, key = access.keys.create("acme", "mallory")
        references = (
            ("id", [each.id for each in made], [f"doc_{secrets.token_hex(16)}" for _ in range(DOCUMENTS)]),
            ("name", names, [f"plan-{secrets.token_hex(8)}" for _ in range(DOCUMENTS)]),
        )
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60) as client:
            for what, there, absent in references:
                found, missing = probed(client, there, absent, options.probes, draw)
                low, high = interval(found, missing, options.seed)
                table.add_row(
                    what,
                    str(options.probes),
                    f"{auc(found, missing):.3f}",
                    f"{low:.3f} to {high:.3f}",
                    *(f"{statistics.median(times) * 1000:.2f} ms" for times in (found, missing)),
                )
    Console().print(table)


if __name__ == "__main__":
    main()
