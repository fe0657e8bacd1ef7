"""Ostinato against llama.cpp and transformers: the same GGUF, one run, one machine, taking turns.

    make bench                                       # three rounds, prints the table
    python benchmarks/peers.py --json peers.json --docs docs/performance.md
    python benchmarks/peers.py --only ostinato --rounds 1

Every engine lives in a process of its own and waits while another is measured. Each round measures every
engine once on tokens that no round has seen before; the table shows medians over the rounds, and the ratio
of medians. A peer that is not installed, or crashes, is reported as such and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

PREFILL = (512, 2048, 4096)
CONTEXTS = (512, 4096)
DECODE_TOKENS = 48
BATCH, BATCH_TOKENS = 8, 128
MODULES = ((512,) * 8, (987,) * 8)
QUESTION = 64
MARKERS = ("<!-- peers: begin -->", "<!-- peers: end -->")


class Peer(Protocol):
    """One engine. Times are seconds."""

    def version(self) -> str: ...

    def prefill(self, tokens: list[int]) -> float:
        """Cold: nothing of `tokens` is cached. Until the first token's logits."""
        ...

    def decode(self, tokens: list[int], count: int) -> float:
        """Mean time of one token with `tokens` (prefilled, not timed) as context."""
        ...

    def repeat(self, tokens: list[int]) -> float:
        """The prompt that came last, again: until the first token's logits."""
        ...

    def modules(self, modules: list[list[int]], question: list[int], how: str) -> float:
        """TTFT of a question about modules that were all used before, but never in this order.

        `how` is "cold" (nothing cached), "cached", or "prefix": the question alone, on one cached prefix that is
        as long as all the modules; "moved": as cached, and the modules stand in a new order.
        """
        ...

    def batch(self, prompts: list[list[int]], count: int) -> float:
        """All prompts at once, `count` tokens each: tokens per second while decoding."""
        ...


class Ostinato:
    def __init__(self, model: Path, threads: int) -> None:
        import torch

        from ostinato import Engine

        torch.set_num_threads(threads)
        self.engine = Engine(str(model))

    def version(self) -> str:
        import torch

        import ostinato

        return f"{ostinato.__version__}, torch {torch.__version__}"

    def _params(self, count: int) -> Any:
        from ostinato import SamplingParams

        return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)

    def prefill(self, tokens: list[int]) -> float:
        reply = self.engine.generate(tokens, self._params(1))
        assert reply.usage.cached_tokens < 16, reply.usage
        return reply.timing.ttft

    def decode(self, tokens: list[int], count: int) -> float:
        reply = self.engine.generate(tokens, self._params(count))
        return (reply.timing.total - reply.timing.ttft) / (count - 1)

    def repeat(self, tokens: list[int]) -> float:
        self.engine.generate(tokens, self._params(1))
        reply = self.engine.generate(tokens, self._params(1))
        assert reply.usage.cached_tokens == len(tokens) - 1, reply.usage
        return reply.timing.ttft

    def modules(self, modules: list[list[int]], question: list[int], how: str) -> float:
        from ostinato.prompt.span import Chain, Prompt, Span, View, plain

        flat = [token for module in modules for token in module]
        if how in ("cold", "prefix"):
            self.engine.clear_cache()
        if how == "prefix":
            self.engine.generate(plain(Span(tuple(flat))), self._params(1))
            return self.engine.generate(plain(Span((*flat, *question))), self._params(1)).timing.ttft
        if how == "cold":
            return self.engine.generate(plain(Span((*flat, *question))), self._params(1)).timing.ttft
        head = 16
        for order, asked in ((modules, question[::-1]), (modules[::-1], question)):
            # Every module is encoded behind the always-present head, and moved from there to where it stands.
            chains, at = [Chain((Span(tuple(modules[0][:head])),))], head
            for module in order:
                chains.append(Chain((Span(tuple(module)),), at, (View(0),), home=head))
                at += len(module)
            asking = Chain((Span(tuple(asked)),), at, tuple(View(i) for i in range(len(chains))))
            reply = self.engine.generate(Prompt((*chains, asking)), self._params(1))
        if how == "cached":  # only the question is new
            asking = Chain((Span((question[1], *question[1:])),), at, asking.sees)
            reply = self.engine.generate(Prompt((*chains, asking)), self._params(1))
        assert reply.usage.prompt_tokens - reply.usage.cached_tokens == len(question), reply.usage
        return reply.timing.ttft

    def batch(self, prompts: list[list[int]], count: int) -> float:
        for prompt in prompts:
            self.engine.generate(prompt, self._params(1))
        start = time.perf_counter()
        streams = [self.engine.stream(prompt, self._params(count)) for prompt in prompts]
        total = sum(len(chunk.token_ids) for stream in streams for chunk in stream)
        return total / (time.perf_counter() - start)


class LlamaCpp:
    def __init__(self, model: Path, threads: int) -> None:
        from llama_cpp import Llama

        self.llm = Llama(str(model), n_ctx=8192, n_threads=threads, n_threads_batch=threads, verbose=False)

    def version(self) -> str:
        import llama_cpp

        info = llama_cpp.llama_print_system_info().decode()
        flags = [part.split("=")[0].strip() for part in info.split("|") if "= 1" in part]
        return f"llama-cpp-python {llama_cpp.__version__} ({', '.join(flags[-9:])})"

    def prefill(self, tokens: list[int]) -> float:
        self.llm.reset()
        self.llm._ctx.kv_cache_clear()
        start = time.perf_counter()
        self.llm.eval(tokens)
        return time.perf_counter() - start

    def decode(self, tokens: list[int], count: int) -> float:
        self.prefill(tokens)
        start = time.perf_counter()
        for i in range(count):
            self.llm.eval([1000 + i])  # sampling is left out: in llama.cpp's favour
        return (time.perf_counter() - start) / count

    def repeat(self, tokens: list[int]) -> float:
        next(self.llm.generate(tokens, temp=0.0))
        start = time.perf_counter()
        next(self.llm.generate(tokens, temp=0.0))
        return time.perf_counter() - start

    def modules(self, modules: list[list[int]], question: list[int], how: str) -> float:
        if how != "cached":
            raise LookupError("measured once: it reuses prefixes only, and a new order shares none")
        return self.prefill([*(token for module in modules for token in module), *question])

    def batch(self, prompts: list[list[int]], count: int) -> float:
        if len(prompts) > 1:
            raise LookupError("its Python binding has no parallel sequences")
        return 1 / self.decode(prompts[0], count)


class Transformers:
    def __init__(self, model: Path, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            str(model.parent), gguf_file=model.name, dtype=torch.bfloat16
        ).eval()
        self.past: Any = None

    def version(self) -> str:
        import transformers

        return f"{transformers.__version__}, torch {self.torch.__version__}, bfloat16"

    def _forward(self, tokens: list[list[int]], past: Any) -> Any:
        with self.torch.inference_mode():
            return self.model(
                self.torch.tensor(tokens), past_key_values=past, use_cache=True, logits_to_keep=1
            ).past_key_values

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        self.past = self._forward([tokens], None)
        return time.perf_counter() - start

    def decode(self, tokens: list[int], count: int) -> float:
        self.prefill(tokens)
        start = time.perf_counter()
        for i in range(count):
            self.past = self._forward([[1000 + i]], self.past)
        return (time.perf_counter() - start) / count

    def repeat(self, tokens: list[int]) -> float:
        return self.prefill(tokens)  # generate() keeps nothing between calls

    def modules(self, modules: list[list[int]], question: list[int], how: str) -> float:
        if how != "cached":
            raise LookupError("measured once: it reuses nothing")
        return self.prefill([*(token for module in modules for token in module), *question])

    def batch(self, prompts: list[list[int]], count: int) -> float:
        past = self._forward(prompts, None)
        start = time.perf_counter()
        for i in range(count):
            past = self._forward([[1000 + i]] * len(prompts), past)
        return len(prompts) * count / (time.perf_counter() - start)


PEERS: dict[str, Callable[[Path, int], Peer]] = {
    "ostinato": Ostinato,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
}


def serve(name: str, model: Path, threads: int, pipe: Connection) -> None:
    """A peer's process: does what it is told, one call at a time."""
    try:
        peer = PEERS[name](model, threads)
        pipe.send(("ok", peer.version()))
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        return
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send(("ok", getattr(peer, method)(*arguments)))
        except Exception as error:
            pipe.send(("error", f"{type(error).__name__}: {error}"))


class Process:
    """A peer in its own process; `failure` says why it takes no more calls."""

    def __init__(self, name: str, model: Path, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(name, model, threads, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.failure: str | None = None
        status, answer = self._receive()
        self.version = str(answer)
        if status != "ok":
            self.failure = self.version

    def _receive(self) -> tuple[str, Any]:
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return "error", f"its process died with exit code {self.process.exitcode}"

    def call(self, method: str, *arguments: Any) -> float | None:
        if self.failure:
            return None
        self.pipe.send((method, arguments))
        status, answer = self._receive()
        if status == "ok":
            return float(answer)
        if not self.process.is_alive():
            self.failure = answer
        return None

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(None)
            self.process.join()


def measure(peers: dict[str, Process], rounds: int) -> dict[str, dict[str, list[float]]]:
    """{measure: {peer: one value a round}}; tokens/s, except repeat_ms."""
    rng = random.Random(int(time.time()))
    results: dict[str, dict[str, list[float]]] = {}

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, 48_000) for _ in range(count)]

    def take(measure: str, convert: Callable[[float], float], method: str, *arguments: Any) -> None:
        for name, peer in peers.items():
            value = peer.call(method, *arguments)
            if value is not None:
                results.setdefault(measure, {}).setdefault(name, []).append(convert(value))
                print(f"  {measure:16} {name:14} {convert(value):10.1f}", file=sys.stderr, flush=True)

    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        for count in PREFILL:
            take(f"prefill_{count}", lambda s, n=count: n / s, "prefill", tokens(count))
        for count in CONTEXTS:
            take(f"decode_{count}", lambda s: 1 / s, "decode", tokens(count), DECODE_TOKENS)
        take("repeat_4096_ms", lambda s: s * 1000, "repeat", tokens(4096))
        for sizes in MODULES:
            modules, name = [tokens(size) for size in sizes], sum(sizes)
            for how in ("cold", "moved", "cached", "prefix"):
                take(
                    f"modules_{name}_{how}_ms", lambda s: s * 1000, "modules", modules, tokens(QUESTION), how
                )
        take("batch_1", lambda x: x, "batch", [tokens(64)], BATCH_TOKENS)
        take("batch_8", lambda x: x, "batch", [tokens(64) for _ in range(BATCH)], BATCH_TOKENS)
    return results


def start_up(model: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of a cold process: `import ostinato` alone, and until the engine is ready."""

    def timed(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - start

    nothing = statistics.median(timed("pass") for _ in range(rounds))
    return {
        "import_s": [timed("import ostinato") - nothing for _ in range(rounds)],
        "ready_s": [timed(f"from ostinato import Engine; Engine({str(model)!r})") for _ in range(rounds)],
    }


def table(medians: dict[str, dict[str, float]], names: list[str]) -> str:
    """A Markdown table, one row a measure, with the ratio of Ostinato to each peer."""
    others = [name for name in names if name != "ostinato"]
    header = ["measure", *names, *(f"× {name}" for name in others)]
    lines = ["| " + " | ".join(header) + " |", "|---|" + "---:|" * (len(header) - 1)]
    for measure, values in medians.items():
        ours = values.get("ostinato")
        cells = [measure.replace("_", " ")]
        digits = 3 if measure.endswith("_s") else 1
        cells += [f"{values[name]:.{digits}f}" if name in values else "–" for name in names]
        for name in others:
            ratio = None
            if ours and name in values:
                ratio = values[name] / ours if measure.endswith("_ms") else ours / values[name]
            cells.append(f"{ratio:.2f}" if ratio else "–")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        if info.exists()
        else []
    )
    flags = info.read_text() if info.exists() else ""
    extras = [flag for flag in ("avx512_vnni", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(extras) or 'no AVX-512'})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="catalogue name or .gguf file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", action="append", choices=list(PEERS), help="measure only these")
    parser.add_argument("--json", type=Path, help="write every value here")
    parser.add_argument("--docs", type=Path, help="replace the table between the markers of this page")
    options = parser.parse_args()

    from ostinato.models.catalogue import resolve

    model = resolve(options.model)
    names = options.only or list(PEERS)
    startup = start_up(model, options.rounds) if "ostinato" in names else {}
    peers = {name: Process(name, model, options.threads) for name in names}
    for name, peer in peers.items():
        print(f"{name}: {peer.failure or peer.version}", file=sys.stderr)
    results = measure(peers, options.rounds)
    notes = {name: peer.failure or peer.version for name, peer in peers.items()}
    for peer in peers.values():
        peer.stop()
    results |= {key: {"ostinato": values} for key, values in startup.items()}
    medians = {
        key: {name: statistics.median(values) for name, values in by_peer.items()}
        for key, by_peer in results.items()
    }
    text = table(medians, names)
    print(text)
    machine = (
        f"{cpu_name()}, {options.threads} threads, {platform.system()}, Python {platform.python_version()}"
    )
    if options.json:
        report = {
            "machine": machine,
            "model": model.name,
            "peers": notes,
            "medians": medians,
            "rounds": results,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.docs:
        page = options.docs.read_text()
        begin, end = (page.index(marker) for marker in MARKERS)
        lines = [
            machine + f", {model.name}, medians of {options.rounds} rounds, {time.strftime('%Y-%m-%d')}.",
            "",
        ]
        lines += [f"* {name}: {note}" for name, note in notes.items()]
        body = "\n".join([MARKERS[0], *lines, "", text, ""])
        options.docs.write_text(page[:begin] + body + page[end:])


if __name__ == "__main__":
    main()
