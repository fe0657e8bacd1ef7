"""What does it cost to overwrite KV whenever its slots are freed?

Prompts are new, and the pool holds two of them, so each block that is computed evicts and erases another. Both times are
taken in the same engine: that of a block's erasure, and that of its computation.

    python benchmarks/erase.py
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from ostinato import Engine, SamplingParams

MODEL = "smollm2-135m"
ONE = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1024, help="of each prompt")
    arguments = parser.parse_args()
    draw = random.Random(0)
    erasures: list[float] = []
    with Engine(MODEL, kv_tokens=2 * arguments.tokens) as engine:
        pool = engine.index.pool
        erase = pool.erase

        def timed(block: int) -> None:
            began = time.perf_counter()
            erase(block)
            erasures.append(time.perf_counter() - began)

        pool.erase = timed  # pyright: ignore[reportAttributeAccessIssue]
        rates: list[float] = []
        for _ in range(arguments.prompts):
            prompt = [draw.randrange(1000, 40_000) for _ in range(arguments.tokens)]
            began = time.perf_counter()
            engine.generate(prompt, ONE)
            rates.append(len(prompt) / (time.perf_counter() - began))
        computed = pool.block_size / statistics.median(rates)
    erased = statistics.median(erasures)
    print(
        f"{len(erasures)} blocks erased in {erased * 1e6:.0f} µs each (95 %: "
        f"{sorted(erasures)[int(len(erasures) * 0.95)] * 1e6:.0f} µs), computed in {computed * 1e3:.1f} ms each: "
        f"{erased / computed:.2%}"
    )


if __name__ == "__main__":
    main()
