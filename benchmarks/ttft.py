"""Time to first token against prompt length, with and without cached modules: the figures of Prompt Cache.

    python benchmarks/ttft.py --json ttft.json --plot docs/ttft.png --docs docs/performance.md

A prompt is eight modules and a question of 64 tokens. Without cache all of it is computed (quadratic in the
length, through attention); with cached modules the question alone (linear). Medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostinato import Engine, SamplingParams
from ostinato.native.kernels import Kernels
from ostinato.prompt.span import Chain, Prompt, Span, View, plain

QUESTION, MODULES = 64, 8
LENGTHS = (64, 128, 256, 512, 1024, 2048, 3072, 4096, 6144, 7896)
MARKERS = ("<!-- ttft: begin -->", "<!-- ttft: end -->")
ONE = SamplingParams(max_tokens=1, temperature=0)
random_tokens = random.Random(0)


def tokens(count: int) -> tuple[int, ...]:
    return tuple(random_tokens.randrange(1000, 48_000) for _ in range(count))


def modular(modules: list[tuple[int, ...]], question: tuple[int, ...]) -> Prompt:
    """The modules one after the other, each encoded by itself behind the first; then the question."""
    chains, at = [Chain((Span(modules[0]),))], len(modules[0])
    for module in modules[1:]:
        chains.append(Chain((Span(module),), at, (View(0),)))
        at += len(module)
    return Prompt((*chains, Chain((Span(question),), at, tuple(View(i) for i in range(len(chains))))))


def measure(engine: Engine, length: int) -> tuple[float, float]:
    """TTFT in seconds of a prompt of `length` module tokens and a question: cold, and cached."""
    modules = [tokens(length // MODULES) for _ in range(MODULES)]
    flat = tuple(token for module in modules for token in module)
    cold = engine.generate(plain(Span((*flat, *tokens(QUESTION)))), ONE).timing.ttft
    engine.generate(modular(modules, tokens(QUESTION)), ONE)
    reply = engine.generate(modular(modules, tokens(QUESTION)), ONE)
    assert reply.usage.prompt_tokens - reply.usage.cached_tokens == QUESTION, reply.usage
    return cold, reply.timing.ttft


def where(engine: Engine, prompt: Prompt) -> dict[str, float]:
    """Share of TTFT spent in the kinds of kernels, and in everything else."""
    spent: dict[str, float] = {"linear layers": 0.0, "attention": 0.0, "norms, rotation, activation": 0.0}
    kinds = {"linear": "linear layers", "attend": "attention"}
    original: dict[str, Callable[..., Any]] = {}

    def timed(name: str) -> Callable[..., Any]:
        function = original[name]

        def call(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments, **named)
            spent[kinds.get(name, "norms, rotation, activation")] += time.perf_counter() - start
            return result

        return call

    for name in ("linear", "attend", "rms_norm", "gated", "rope_store"):
        original[name] = getattr(Kernels, name)
        setattr(Kernels, name, timed(name))
    try:
        total = engine.generate(prompt, ONE).timing.ttft
    finally:
        for name, function in original.items():
            setattr(Kernels, name, function)
    shares = {kind: seconds / total for kind, seconds in spent.items()}
    return shares | {"everything else": 1 - sum(shares.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="PNG; needs matplotlib")
    parser.add_argument("--docs", type=Path, help="replace the part between the markers of this page")
    options = parser.parse_args()
    with Engine(options.model) as engine:
        measure(engine, 512)
        rounds: dict[int, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            for length in LENGTHS:
                rounds[length].append(measure(engine, length))
                engine.clear_cache()
        long = [tokens(512) for _ in range(MODULES)]
        flat = tuple(token for module in long for token in module)
        shares = {"cold": where(engine, plain(Span((*flat, *tokens(QUESTION)))))}
        engine.generate(modular(long, tokens(QUESTION)), ONE)
        shares["cached"] = where(engine, modular(long, tokens(QUESTION)))
    rows = [
        (length, *(statistics.median(value[i] for value in values) * 1000 for i in (0, 1)))
        for length, values in rounds.items()
    ]
    even = next((length for length, cold, cached in rows if cold > 1.1 * cached), None)
    lines = ["| module tokens | cold, ms | cached, ms | ratio |", "|---:|---:|---:|---:|"]
    lines += [f"| {n} | {cold:.1f} | {cached:.1f} | {cold / cached:.1f} |" for n, cold, cached in rows]
    lines += [
        "",
        f"Cached modules pay from {even} tokens on (10 % or more)." if even else "No break-even found.",
        "",
    ]
    lines += ["| where the time goes, 4,096 tokens | cold | cached |", "|---|---:|---:|"]
    lines += [
        f"| {kind} | {shares['cold'][kind]:.0%} | {shares['cached'][kind]:.0%} |" for kind in shares["cold"]
    ]
    text = "\n".join(lines)
    print(text)
    if options.json:
        report = {
            "rows": [dict(zip(("tokens", "cold_ms", "cached_ms"), row, strict=True)) for row in rows],
            "shares": shares,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    if options.docs:
        page = options.docs.read_text()
        begin, end = (page.index(marker) for marker in MARKERS)
        options.docs.write_text(page[: begin + len(MARKERS[0])] + "\n" + text + "\n" + page[end:])


def plot(rows: list[tuple[int, float, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = [row[0] for row in rows]
    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=110)
    axes.plot(lengths, [row[1] for row in rows], "o-", label="cold")
    axes.plot(lengths, [row[2] for row in rows], "o-", label="modules cached")
    axes.set(xlabel="module tokens", ylabel="TTFT, ms", yscale="log", xscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
