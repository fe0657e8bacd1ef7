"""Eviction policies in the engine, under pressure: real texts through a real model, in a pool that is too small.

    python benchmarks/pressure.py --data ../shared/data --json pressure.json --docs docs/eviction.md
    python benchmarks/pressure.py --workload one-shot                 # what a policy costs where nothing comes back
    python benchmarks/pressure.py --policy lru,arc --requests 100 --seeds 1 --share 0.2

`mixed` is chats about meetings (QMSum: questions, and the reference answers as the assistant's), agents (tau-bench's
airline: every message of the assistant's is a request, whose prompt is all before it), templates filled in once (a few
worked examples, a piece of an essay, a question) and one-shot prompts (pieces of essays). `one-shot` is only these. The
pool holds `--share` of the working set: of all different blocks of all prompts.

Every policy has an engine of its own, new for each seed. Each request runs under every policy before the next one
does, in turns as to who is first, so that all of them see the same machine. The reply is of a fixed length, and the
next turn of a session goes on with the answer in the data, so that prompts are the same under every policy. What the
model writes itself therefore never comes back, as it would in life: every policy has to get rid of it.

Nobody waits for the time that lies between requests. Policies are told when a request arrives in the workload (sessions
start as a Poisson process, gaps between turns are log-normal, as in `ostinato.lab.workload`): the engine's store is
replaced by one that passes that time on instead of the engine's own. Times to the first token are real ones. The
optimum is a replay of the same prompts with a policy that knows the future (`ostinato.cache.policy.opt`).
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ostinato import Engine, SamplingParams
from ostinato.cache.policy import POLICIES
from ostinato.cache.policy.base import Policy
from ostinato.cache.policy.opt import OPT
from ostinato.cache.store import Store
from ostinato.cache.use import Use
from ostinato.lab.chain import Chain
from ostinato.lab.replay import replay
from ostinato.lab.trace import Trace, TraceRequest
from ostinato.lab.workload import Mix
from ostinato.models.catalogue import resolve
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.chat import render_chat
from ostinato.prompt.span import Prompt, Span, SpanKind, plain

T = TypeVar("T")

LONGEST = 2_500
"""Tokens of a prompt at which a session ends."""
REPLY = (4, 16)
BLOCK = 16
NAMED = 0.5
"""Share of the sessions of several turns that the client names."""
MIXES = {
    "mixed": Mix(chat=0.4, agentic=0.3, templated=0.15, one_shot=0.15),
    "one-shot": Mix(one_shot=1.0),
}
TURNS = Mix(chat=3.4, agentic=4.8, templated=1.0, one_shot=1.0)
"""Mean requests of a session."""
WARM_UP = 1_024
OVERHEAD = 0.03
"""What a policy may cost where nothing can be cached."""

SYSTEMS = (
    "You help people who could not come to a meeting. They show you a part of its transcript and ask about it. Answer "
    "from the transcript alone, name who said what, and say so if the transcript does not tell. Keep answers to one "
    "paragraph, in plain words, without lists. Do not judge what was said, and do not guess what was meant.",
    "You write minutes. From what is shown of a meeting you tell what was discussed, what was decided, and what stayed "
    "open, in that order. Use the past tense and the speakers' names as the transcript has them. Leave out greetings, "
    "asides and repetitions. Where speakers disagree, give both views in a sentence each.",
    "You are an assistant in a product team. Team members paste pieces of their meetings and want to know what they "
    "mean for the product: requirements, costs, open questions, and who works on what. Be brief.",
)
INSTRUCTIONS = (
    "Answer the question from the text. Two sentences at most. Here is how it is done.",
    "Read the text and answer in the style of the examples: sober, complete, in the third person.",
    "You grade reading comprehension. First write the model answer to the question, as in these examples.",
    "Extract what the question asks for. Do not add anything that the text does not say. Examples follow.",
)
TEMPLATES = 12
EXAMPLES = 3
QUESTIONS = (
    "What is this text about?",
    "Summarise the text in two sentences.",
    "What does the author advise the reader to do?",
    "Which example does the author give, and what does it show?",
    "What would somebody say who disagrees with the author?",
)


# -- the workload -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A message of a chat. `kind` is what it is, whatever role the model's template has for it."""

    role: str
    kind: SpanKind
    text: str


@dataclass(frozen=True)
class Request:
    time: float
    """Arrival in seconds since the workload began."""
    traffic: str
    session: str
    """Its name, if the client gave one."""
    prompt: Prompt
    reply: int
    """Tokens of the reply."""


def encode_messages(tokenizer: Tokenizer, messages: Sequence[Message]) -> Prompt:
    """A chat in the model's template, every text as the kind that its message says."""
    segments = render_chat(tokenizer, [{"role": m.role, "content": m.text} for m in messages])
    if sum(not segment.is_template for segment in segments) != len(messages):
        raise ValueError("The model's chat template hides which text came from which message.")
    kinds: Iterator[SpanKind] = (message.kind for message in messages)
    ids = tokenizer.encode_parts([(segment.text, segment.is_template) for segment in segments])
    spans = [
        Span(tuple(part), segment.kind if segment.is_template else next(kinds))
        for part, segment in zip(ids, segments, strict=True)
    ]
    return plain(*spans)


class Texts:
    """What the data has."""

    def __init__(self, data: Path) -> None:
        lines = (data / "qmsum_test.jsonl").read_text("utf-8").splitlines()
        self.meetings = [json.loads(line) for line in lines if line.strip()]
        airline = json.loads((data / "tau_bench_airline.json").read_text("utf-8"))
        self.trajectories: list[list[dict[str, Any]]] = [entry["traj"] for entry in airline]
        self.tools = _signatures(self.trajectories)
        essays = sorted((data / "essays").glob("*.txt"))
        self.essays = "\n\n".join(path.read_text("utf-8", errors="replace") for path in essays)

    def excerpt(self, meeting: dict[str, Any], query: dict[str, Any], size: int) -> str:
        """What was said in a meeting from where a question is about on, in about so many characters."""
        spans = query["relevant_text_span"]
        turns = meeting["meeting_transcripts"][int(spans[0][0]) if spans else 0 :]
        text = ""
        for turn in turns:
            text += f"{turn['speaker']}: {turn['content']}\n"
            if len(text) >= size:
                break
        return text[:size].strip()


def _signatures(trajectories: Sequence[list[dict[str, Any]]]) -> str:
    """The tools that are called in trajectories, with the arguments that they are given."""
    tools: dict[str, set[str]] = {}
    for message in (message for trajectory in trajectories for message in trajectory):
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            tools.setdefault(call["function"]["name"], set()).update(arguments)
    return json.dumps([{"name": name, "arguments": sorted(tools[name])} for name in sorted(tools)])


def _said(message: dict[str, Any]) -> str:
    """The text of a message, and the calls of tools in it."""
    calls = [json.dumps(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join([(message["content"] or "").strip(), *calls]).strip() or "(nothing)"


Step = tuple[float, Prompt]
"""Seconds since the session's request before, and the prompt."""


class Traffic:
    """Sessions out of texts, by a source of chance."""

    def __init__(self, texts: Texts, tokenizer: Tokenizer, seed: int) -> None:
        self.texts, self.tokenizer = texts, tokenizer
        self.random = random.Random(seed)
        self.sessions = 0
        self.templates = [self._template(INSTRUCTIONS[n % len(INSTRUCTIONS)]) for n in range(TEMPLATES)]
        self._agents = cycle(self.random.sample(texts.trajectories, len(texts.trajectories)))
        self._taken: set[int] = set()

    def chat(self) -> Iterator[Step]:
        """Questions about one meeting, the first with the part of it that they begin with."""
        meeting = self.random.choice(self.texts.meetings)
        queries = meeting["specific_query_list"]
        queries = self.random.sample(queries, len(queries))
        messages = [Message("system", "system", self._popular(SYSTEMS))]
        excerpt = self.texts.excerpt(meeting, queries[0], self._size(1_500, 0.7, 400, 6_000))
        wait = 0.0
        for number, query in enumerate(queries):
            asked = query["query"] if number else f"{excerpt}\n\n{query['query']}"
            messages.append(Message("user", "user", asked))
            prompt = self._encode(messages)
            if len(prompt.token_ids) > LONGEST:
                return
            yield wait, prompt
            messages.append(Message("assistant", "assistant", query["answer"]))
            if self.random.random() < 0.2:
                return
            wait = self.random.lognormvariate(3.6, 1.0)

    def agent(self) -> Iterator[Step]:
        """A trajectory. The data has no definitions of tools: they are made of the calls."""
        system, *rest = next(self._agents)
        messages = [
            Message("system", "system", _said(system)),
            Message("system", "tools", self.texts.tools),
        ]
        wait, first = 0.0, True
        for message in rest:
            if message["role"] != "assistant":
                # The template has no role for tools: to the model, their output is the user's.
                is_tool = message["role"] == "tool"
                messages.append(Message("user", "tool" if is_tool else "user", _said(message)))
                mu, sigma = (1.4, 0.8) if is_tool else (3.6, 1.0)
                wait += self.random.lognormvariate(mu, sigma)
                continue
            prompt = self._encode(messages)
            if len(prompt.token_ids) > LONGEST:
                return
            yield 0.0 if first else wait, prompt
            messages.append(Message("assistant", "assistant", _said(message)))
            wait, first = 0.0, False

    def templated(self) -> Iterator[Step]:
        """A template, a document of one's own, and a question."""
        yield (
            0.0,
            self._encode(
                [
                    Message("system", "template", self._popular(self.templates)),
                    Message("user", "document", self._piece(self._size(1_400, 0.8, 200, 5_000))),
                    Message("user", "user", self.random.choice(QUESTIONS)),
                ]
            ),
        )

    def one_shot(self) -> Iterator[Step]:
        """A text that has nothing in common with any other, a template's beginning included."""
        ids = self.tokenizer.encode(self._piece(self._size(3_200, 0.8, 800, 10_000)))
        yield 0.0, plain(Span(tuple(ids[:LONGEST]), "user"))

    def session(self, mix: Mix, start: float) -> Iterator[Request]:
        """The requests of one session that starts then, of a kind that starts as often as `mix` says."""
        kinds: dict[str, Callable[[], Iterator[Step]]] = {
            "chat": self.chat,
            "agent": self.agent,
            "templated": self.templated,
            "one-shot": self.one_shot,
        }
        kind = self.random.choices(list(kinds), _starts(mix))[0]
        self.sessions += 1
        named = kind in ("chat", "agent") and self.random.random() < NAMED
        for wait, prompt in kinds[kind]():
            start += wait
            name = f"session-{self.sessions}" if named else ""
            yield Request(start, kind, name, prompt, self.random.randint(*REPLY))

    def _template(self, instruction: str) -> str:
        parts = [instruction]
        for meeting in self.random.sample(self.texts.meetings, EXAMPLES):
            query = self.random.choice(meeting["specific_query_list"])
            text = self.texts.excerpt(meeting, query, self._size(600, 0.5, 200, 1_500))
            parts.append(f"Text: {text}\nQuestion: {query['query']}\nAnswer: {query['answer']}")
        return "\n\n".join(parts)

    def _piece(self, size: int) -> str:
        """A piece of the essays that begins where no other does."""
        essays = self.texts.essays
        while True:
            start = essays.find(" ", self.random.randrange(max(1, len(essays) - size))) + 1
            if start not in self._taken:
                self._taken.add(start)
                return essays[start : start + size].strip()

    def _encode(self, messages: Sequence[Message]) -> Prompt:
        return encode_messages(self.tokenizer, messages)

    def _size(self, median: float, spread: float, least: int, most: int) -> int:
        """Characters of a text."""
        return min(most, max(least, round(median * self.random.lognormvariate(0.0, spread))))

    def _popular(self, choices: Sequence[T]) -> T:
        """One of `choices`, by Zipf's law."""
        return self.random.choices(choices, [1 / rank for rank in range(1, len(choices) + 1)])[0]


def _starts(mix: Mix) -> list[float]:
    """How often sessions of each kind start: where they have many requests, more seldom."""
    return [share / turns for share, turns in zip(astuple(mix), astuple(TURNS), strict=True)]


def make_workload(
    texts: Texts, tokenizer: Tokenizer, mix: Mix, *, requests: int, seed: int, rate: float
) -> list[Request]:
    """So many requests in order of arrival, `rate` of them a second."""
    traffic = Traffic(texts, tokenizer, seed)
    starts = rate * sum(_starts(mix)) / sum(astuple(mix))
    pending: list[tuple[float, int, Request]] = []
    done: list[Request] = []
    now, number = 0.0, 0
    while len(done) < requests:
        now += traffic.random.expovariate(starts)
        while pending and pending[0][0] <= now:
            done.append(heapq.heappop(pending)[2])
        for request in traffic.session(mix, now):
            heapq.heappush(pending, (request.time, number, request))
            number += 1
    return done[:requests]


def as_trace(requests: Sequence[Request]) -> Trace:
    """The prompts as a trace without replies."""
    traced: list[TraceRequest] = []
    for request in requests:
        chain = Chain(BLOCK)
        for span in request.prompt.chains[0].spans:
            chain.add(span.kind, span.token_ids)
        traced.append(TraceRequest(request.time, tuple(chain.keys), chain.tokens, tuple(chain.kinds)))
    return Trace("pressure", BLOCK, tuple(traced))


# -- under pressure ---------------------------------------------------------------------------------------


class Arrivals(Store):
    """A store whose requests arrive when the workload says, not when the engine gets them."""

    now = 0.0

    def begin(self, time: float, keys: Sequence[bytes], **rest: Any) -> Use:  # noqa: ARG002
        return super().begin(self.now, keys, **rest)


class Timed(Policy):
    """A policy, and the seconds spent in it."""

    def __init__(self, policy: Policy) -> None:
        self.seconds = 0.0
        for name in ("arrive", "miss", "insert", "hit", "release", "leaf", "remove", "victim"):
            setattr(self, name, partial(self._timed, getattr(policy, name)))

    def _timed(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = call(*arguments, **named)
        self.seconds += time.perf_counter() - start
        return result


@dataclass
class Run:
    """What a policy made of the requests of a seed. Times are seconds, one for each request."""

    ttft: list[float] = field(default_factory=list[float])
    total: list[float] = field(default_factory=list[float])
    prompt: list[int] = field(default_factory=list[int])
    cached: list[int] = field(default_factory=list[int])
    policy: float = 0.0
    """Seconds spent in the policy, of all requests."""
    evictions: int = 0
    hit_kinds: Counter[str] = field(default_factory=Counter[str])

    @property
    def hit_rate(self) -> float:
        return sum(self.cached) / sum(self.prompt)

    @property
    def computed(self) -> int:
        return sum(self.prompt) - sum(self.cached)

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.ttft, n=100, method="inclusive")[percent - 1]


class Served:
    """An engine with a policy, and what came of it."""

    def __init__(self, model: str, policy: str, kv_tokens: int) -> None:
        self.engine = Engine(model, kv_tokens=kv_tokens, block_size=BLOCK, policy=policy)
        pool = self.engine.index.pool
        # What is slow the first time belongs to no policy. Until all of the pool's memory has been written once, the
        # system hands it out page by page, in the background for the first contexts, and requests wait for that.
        pool.kv.zero_()
        ids = range(1_000, 1_000 + min(WARM_UP, pool.slots - REPLY[1]))
        self.engine.generate([*ids], SamplingParams(max_tokens=REPLY[1], temperature=0, ignore_eos=True))
        self.engine.clear_cache()
        self.timed = Timed(POLICIES[policy](pool.blocks))  # anew: the engine's has seen the warm-up
        self.store = self.engine.index.store = Arrivals(self.timed)
        self.run = Run()

    def ask(self, request: Request) -> None:
        self.store.now = request.time
        params = SamplingParams(max_tokens=request.reply, temperature=0, ignore_eos=True)
        reply = self.engine.generate(request.prompt, params, session=request.session)
        self.run.ttft.append(reply.timing.ttft)
        self.run.total.append(reply.timing.total)
        self.run.prompt.append(reply.usage.prompt_tokens)
        self.run.cached.append(reply.usage.cached_tokens)

    def close(self) -> Run:
        self.engine.close()
        stats = self.engine.stats()
        self.run.policy, self.run.evictions = self.timed.seconds, stats.evicted_blocks
        self.run.hit_kinds = Counter({str(kind): count for kind, count in stats.cached_kinds.items()})
        return self.run


def measure(
    model: str, policies: Sequence[str], requests: Sequence[Request], kv_tokens: int, done: Callable[[], None]
) -> dict[str, Run]:
    """Every request under every policy, each time with another one first. `done` is called after each."""
    served: dict[str, Served] = {}
    try:
        for policy in policies:
            served[policy] = Served(model, policy, kv_tokens)
        for number, request in enumerate(requests):
            first = number % len(policies)
            for policy in (*policies[first:], *policies[:first]):
                served[policy].ask(request)
                done()
    finally:
        runs = {policy: each.close() for policy, each in served.items()}
    return runs


@dataclass(frozen=True)
class Round:
    """A seed: what was asked, and what came of it under each policy."""

    seed: int
    working_set: int
    """Tokens of all different blocks."""
    kv_tokens: int
    optimum: float
    """Token hit rate of a replay that knows the future."""
    traffic: Counter[str]
    """Requests of each kind."""
    runs: dict[str, Run]


def mean(rounds: Sequence[Round], policy: str, of: Callable[[Run], float]) -> float:
    return statistics.mean(of(round_.runs[policy]) for round_ in rounds)


def describe(rounds: Sequence[Round], model: str, share: float) -> str:
    sizes = [round_.working_set for round_ in rounds]
    requests = sum(rounds[0].traffic.values())
    kinds = ", ".join(
        f"{count / requests / len(rounds):.0%} {kind}"
        for kind, count in sum((each.traffic for each in rounds), Counter[str]()).most_common()
    )
    return (
        f"{model}, {requests} requests ({kinds}) for each of {len(rounds)} seeds, a working set of "
        f"{statistics.mean(sizes):,.0f} tokens, a pool of {share:.0%} of it, {time.strftime('%Y-%m-%d')}."
    )


def pressure_table(rounds: Sequence[Round], policies: Sequence[str]) -> str:
    """A row for each policy: means over the seeds, and what is different from LRU."""
    requests = sum(rounds[0].traffic.values())

    def hit(run: Run) -> float:
        return 100 * run.hit_rate

    def ttft(run: Run) -> float:
        return 1000 * statistics.mean(run.ttft)

    def against(policy: str, of: Callable[[Run], float], relative: bool) -> str:
        """The difference to LRU, and the smallest and largest of any seed."""
        if policy == "lru" or "lru" not in policies:
            return "–"
        pairs = [(of(round_.runs[policy]), of(round_.runs["lru"])) for round_ in rounds]
        found = [100 * (ours / lru - 1) if relative else ours - lru for ours, lru in pairs]
        unit = " %" if relative else ""
        spread = f" ({min(found):+.1f} to {max(found):+.1f})" if len(found) > 1 else ""
        return f"{statistics.mean(found):+.1f}{unit}{spread}"

    lines = [
        "| policy | hit tokens, % | points to LRU | TTFT, ms | to LRU | p50 | p95 | prefill tokens a request "
        "| to LRU | evicted blocks | policy, ms a request |",
        "|---|" + "---:|" * 10,
    ]
    for policy in policies:
        cells = [
            policy,
            f"{mean(rounds, policy, hit):.1f}",
            against(policy, hit, relative=False),
            f"{mean(rounds, policy, ttft):.0f}",
            against(policy, ttft, relative=True),
            f"{1000 * mean(rounds, policy, lambda run: run.percentile(50)):.0f}",
            f"{1000 * mean(rounds, policy, lambda run: run.percentile(95)):.0f}",
            f"{mean(rounds, policy, lambda run: run.computed) / requests:.0f}",
            against(policy, lambda run: run.computed, relative=True),
            f"{mean(rounds, policy, lambda run: run.evictions):,.0f}",
            f"{1000 * mean(rounds, policy, lambda run: run.policy) / requests:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    best = 100 * statistics.mean(round_.optimum for round_ in rounds)
    lines.append(f"| optimum (replay) | {best:.1f} |" + " – |" * 9)
    return "\n".join(lines)


def overhead_table(rounds: Sequence[Round], policies: Sequence[str]) -> str:
    """A row for each policy: all of its time against LRU's."""
    requests = sum(rounds[0].traffic.values())
    lines = [
        "| policy | total, s | to LRU, all requests | to LRU, median request | policy, ms a request | policy's share "
        "| within 3 % |",
        "|---|" + "---:|" * 6,
    ]
    for policy in policies:
        runs = [round_.runs[policy] for round_ in rounds]
        total = statistics.median(sum(run.total) for run in runs)
        all_of_them, median, within = "–", "–", "–"
        if policy != "lru" and "lru" in policies:
            pairs = [(run, round_.runs["lru"]) for run, round_ in zip(runs, rounds, strict=True)]
            ratio = statistics.median(sum(ours.total) / sum(lru.total) for ours, lru in pairs) - 1
            each = [o / b for ours, lru in pairs for o, b in zip(ours.total, lru.total, strict=True)]
            all_of_them, median = f"{ratio:+.1%}", f"{statistics.median(each) - 1:+.1%}"
            within = "yes" if ratio <= OVERHEAD else "no"
        spent = statistics.median(run.policy for run in runs)
        cells = [policy, f"{total:.2f}", all_of_them, median, f"{1000 * spent / requests:.2f}"]
        lines.append(f"| {' | '.join([*cells, f'{spent / total:.2%}', within])} |")
    return "\n".join(lines)


def to_json(rounds: Sequence[Round], **about: object) -> dict[str, Any]:
    def run(each: Run) -> dict[str, Any]:
        return {
            "hit_rate": each.hit_rate,
            "ttft_mean_ms": 1000 * statistics.mean(each.ttft),
            "ttft_p50_ms": 1000 * each.percentile(50),
            "ttft_p95_ms": 1000 * each.percentile(95),
            "prefill_tokens": each.computed,
            "evictions": each.evictions,
            "total_s": sum(each.total),
            "policy_s": each.policy,
            "hit_kinds": each.hit_kinds,
            "requests": {
                "ttft_ms": [round(1000 * seconds, 2) for seconds in each.ttft],
                "total_ms": [round(1000 * seconds, 2) for seconds in each.total],
                "prompt_tokens": each.prompt,
                "cached_tokens": each.cached,
            },
        }

    return {
        **about,
        "rounds": [
            {
                "seed": each.seed,
                "working_set_tokens": each.working_set,
                "kv_tokens": each.kv_tokens,
                "optimum_hit_rate": each.optimum,
                "traffic": each.traffic,
                "policies": {policy: run(result) for policy, result in each.runs.items()},
            }
            for each in rounds
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--model", default="smollm2-135m", help="catalogue name or .gguf file")
    parser.add_argument("--workload", choices=list(MIXES), default="mixed")
    parser.add_argument("--policy", default="lru,arc,saecache,ostinato", help="policies, by commas")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.1, help="of the working set that the pool holds")
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second, as policies are told")
    parser.add_argument("--json", type=Path, help="write every value here")
    parser.add_argument("--docs", type=Path, help="replace the part between the markers of this page")
    options = parser.parse_args()
    policies: list[str] = options.policy.split(",")
    unknown = [policy for policy in policies if policy not in POLICIES]
    if unknown:
        parser.error(f"no policy {', '.join(unknown)}; there are {', '.join(POLICIES)}")
    if options.requests < 2 or options.seeds < 1 or options.rate <= 0 or not 0 < options.share <= 1:
        parser.error("needs 2 requests, 1 seed, a rate above 0, and a share above 0 and up to 1")
    name = "pressure" if options.workload == "mixed" else f"pressure {options.workload}"
    markers = (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    if options.docs and not all(marker in options.docs.read_text("utf-8") for marker in markers):
        parser.error(f"{options.docs} has no {' and '.join(markers)}")

    texts = Texts(options.data)
    model = resolve(options.model)
    tokenizer = Tokenizer.from_path(model)
    rounds: list[Round] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=options.seeds * options.requests * len(policies))
        for seed in range(options.seeds):
            bar.update(task, description=f"seed {seed + 1} of {options.seeds}")
            requests = make_workload(
                texts,
                tokenizer,
                MIXES[options.workload],
                requests=options.requests,
                seed=seed,
                rate=options.rate,
            )
            trace = as_trace(requests)
            working_set = trace.unique_blocks * BLOCK
            blocks = round(options.share * trace.unique_blocks)
            least = -(-(max(request.tokens for request in trace.requests) + REPLY[1]) // BLOCK) + 1
            if blocks < least:
                print(
                    f"seed {seed}: {options.share:.0%} is {blocks} blocks, and the longest prompt needs {least}: "
                    "these it gets. Ask for more requests, or a larger share.",
                    file=sys.stderr,
                )
                blocks = least
            optimum = replay(trace, OPT([request.keys for request in trace.requests]), blocks).token_hit_rate
            traffic = Counter(request.traffic for request in requests)
            advance = partial(bar.advance, task)
            # Who is first takes turns over requests; who is loaded first, over seeds.
            order = [*policies[seed % len(policies) :], *policies[: seed % len(policies)]]
            runs = measure(options.model, order, requests, blocks * BLOCK, advance)
            rounds.append(Round(seed, working_set, blocks * BLOCK, optimum, traffic, runs))
    table = pressure_table if options.workload == "mixed" else overhead_table
    share = sum(each.kv_tokens for each in rounds) / sum(each.working_set for each in rounds)
    text = f"{describe(rounds, model.stem, share)}\n\n{table(rounds, policies)}"
    print(text)
    if options.json:
        about = {
            "model": model.stem,
            "workload": options.workload,
            "share": options.share,
            "rate": options.rate,
        }
        options.json.write_text(json.dumps(to_json(rounds, **about)) + "\n")
    if options.docs:
        page = options.docs.read_text("utf-8")
        begin, end = (page.index(marker) for marker in markers)
        options.docs.write_text(page[: begin + len(markers[0])] + f"\n{text}\n" + page[end:], "utf-8")


if __name__ == "__main__":
    main()
