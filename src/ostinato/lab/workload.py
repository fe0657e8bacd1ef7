"""Workloads: made-up traces of mixed traffic, whose tokens have types.

Four kinds of traffic: chats of several turns, agents that call tools, templates filled in once, and one-shot prompts
that share nothing. The same seed makes the same trace.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import count
from typing import Literal, TypeVar

from ostinato.errors import InvalidRequestError
from ostinato.lab.chain import Chain
from ostinato.lab.trace import Trace, TraceRequest

T = TypeVar("T")

LONGEST = 6_000
"""Tokens of a prompt at which a session ends."""

CHAT_GOES_ON = 0.8
"""Probability that another turn follows in a chat."""
CALL_FOLLOWS = 0.9
"""Probability that an agent calls another tool."""
TASK_FOLLOWS = 0.5
"""Probability that a user has another task for an agent that has ended one."""
USER_GAP = (3.6, 1.0)
"""Mean and standard deviation of the logarithm of the seconds until a user writes again: median 37 s."""
TOOL_GAP = (1.4, 0.8)
"""The same of a tool's answer: median 4 s."""

Reasoning = Literal["none", "dropped", "held"]
"""Whether an agent thinks before it calls a tool, and how long its thoughts stay in the prompt: not at all, or until
the user says something new. Chat templates do either."""


@dataclass(frozen=True)
class Mix:
    """The share of each kind of traffic, by request."""

    chat: float = 0.0
    agentic: float = 0.0
    templated: float = 0.0
    one_shot: float = 0.0


MIXES: dict[str, tuple[Mix, Mix | None]] = {
    "balanced": (Mix(chat=0.3, agentic=0.3, templated=0.2, one_shot=0.2), None),
    "rag": (Mix(chat=0.3, agentic=0.1, templated=0.4, one_shot=0.2), None),
    "polluted": (Mix(chat=0.25, agentic=0.15, templated=0.1, one_shot=0.5), None),
    "chat": (Mix(chat=0.8, agentic=0.05, templated=0.1, one_shot=0.05), None),
    "agentic": (Mix(chat=0.15, agentic=0.75, templated=0.05, one_shot=0.05), None),
    "templated": (Mix(chat=0.1, agentic=0.05, templated=0.55, one_shot=0.3), None),
    "one-shot": (Mix(chat=0.02, agentic=0.01, templated=0.02, one_shot=0.95), None),
    "shift": (
        Mix(chat=0.8, agentic=0.05, templated=0.1, one_shot=0.05),
        Mix(chat=0.1, agentic=0.35, templated=0.45, one_shot=0.1),
    ),
}
"""Mixes by name: until half of the requests have come, and from then on where it changes."""

TURNS = Mix(chat=4.9, agentic=10.3, templated=1.0, one_shot=1.0)
"""Mean requests of a session, with those that end for their length."""


@dataclass(frozen=True)
class _Ask:
    """A request of a session, before its time is known."""

    wait: float
    """Seconds since the session's request before."""
    prompt: Chain
    reply_keys: tuple[bytes, ...]


class _Traffic:
    """What sessions are made of: the texts they share, and a source of new ones."""

    def __init__(self, random: random.Random, block_size: int) -> None:
        self.random = random
        self.block_size = block_size
        self._next_token = 0
        self._sessions = 0
        self.systems = [self._text(self._size(350, 0.5, 200, 900)) for _ in range(6)]
        self.templates = [self._text(self._size(900, 0.8, 200, 4_000)) for _ in range(40)]
        modes: tuple[Reasoning, ...] = ("dropped", "held", "none")
        self.agents: list[tuple[range, range, Reasoning]] = [
            (self._text(self._size(1_200, 0.5, 400, 2_500)), self._text(self._size(400, 0.4, 150, 900)), mode)
            for mode in modes * 2
        ]

    def chat(self) -> Iterator[_Ask]:
        """Turns of a conversation: each prompt is the one before, its reply, and what the user says next."""
        prompt = Chain(self.block_size)
        if self.random.random() < 0.85:
            prompt.add("system", self._popular(self.systems))
        else:  # a bare chat begins with a text of the user's
            prompt.add("user", self._text(self._size(400, 0.7, 200, 3_000)))
        wait = 0.0
        while True:
            prompt.add("user", self._text(self._size(80, 1.0, 8, 2_000)))
            reply = self._text(self._size(180, 0.7, 8, 1_000))
            yield self._ask(wait, prompt, reply)
            prompt.add("assistant", reply)
            if prompt.tokens > LONGEST or self.random.random() < 1 - CHAT_GOES_ON:
                return
            wait = self.random.lognormvariate(*USER_GAP)

    def agent(self) -> Iterator[_Ask]:
        """Steps of an agent: a call of a tool after the other, and now and then a new task from the user."""
        tools, system, mode = self._popular(self.agents)
        prompt = Chain(self.block_size)
        prompt.add("tools", tools)
        prompt.add("system", system)
        wait = 0.0
        while True:
            prompt.add("user", self._text(self._size(150, 0.8, 20, 1_500)))
            bare = prompt.copy()  # as it will stand in prompts once the user has spoken again
            while True:
                thoughts = self._text(0 if mode == "none" else self._size(120, 0.7, 20, 600))
                call = self._text(self._size(60, 0.5, 20, 250))
                yield self._ask(wait, prompt, [*thoughts, *call])
                if mode == "held":
                    prompt.add("reasoning", thoughts)
                prompt.add("assistant", call)
                bare.add("assistant", call)
                if prompt.tokens > LONGEST:
                    return
                if self.random.random() < 1 - CALL_FOLLOWS:
                    break
                output = self._text(self._size(140, 0.9, 10, 1_500))
                prompt.add("tool", output)
                bare.add("tool", output)
                wait = self.random.lognormvariate(*TOOL_GAP)
            if self.random.random() < 1 - TASK_FOLLOWS:
                return
            prompt = bare
            wait = self.random.lognormvariate(*USER_GAP)

    def templated(self) -> Iterator[_Ask]:
        """A template that others fill in as well, a document of one's own, and a question."""
        prompt = Chain(self.block_size)
        prompt.add("template", self._popular(self.templates))
        prompt.add("document", self._text(self._size(350, 0.8, 50, 2_000)))
        prompt.add("user", self._text(self._size(40, 0.6, 8, 200)))
        yield self._ask(0.0, prompt, self._text(self._size(90, 0.8, 5, 500)))

    def one_shot(self) -> Iterator[_Ask]:
        """A prompt that has nothing in common with any other."""
        prompt = Chain(self.block_size)
        prompt.add("user", self._text(self._size(800, 0.8, 200, LONGEST)))
        yield self._ask(0.0, prompt, self._text(self._size(150, 0.8, 5, 800)))

    def session(self, starts: Sequence[float], time: float, named: float) -> Iterator[TraceRequest]:
        """The requests of one session that starts at `time`, of a kind that starts so often."""
        kinds = (self.chat, self.agent, self.templated, self.one_shot)
        make = self.random.choices(kinds, starts)[0]
        self._sessions += 1
        turns = make in (self.chat, self.agent)
        name = f"session-{self._sessions}" if turns and self.random.random() < named else ""
        for ask in make():
            time += ask.wait
            yield TraceRequest(
                time,
                tuple(ask.prompt.keys),
                ask.prompt.tokens,
                tuple(ask.prompt.kinds),
                ask.reply_keys,
                name,
                agentic=make == self.agent,
                templated=ask.prompt.templated,
            )

    def _ask(self, wait: float, prompt: Chain, reply: Sequence[int]) -> _Ask:
        replied = prompt.copy()
        replied.add("decode", reply)
        return _Ask(wait, prompt.copy(), replied.behind(prompt))

    def _text(self, tokens: int) -> range:
        """A text like no other before."""
        self._next_token += tokens
        return range(self._next_token - tokens, self._next_token)

    def _size(self, median: float, spread: float, least: int, most: int) -> int:
        return min(most, max(least, round(median * self.random.lognormvariate(0.0, spread))))

    def _popular(self, choices: Sequence[T]) -> T:
        """One of `choices`, by Zipf's law: the second half as often as the first, and so on."""
        return self.random.choices(choices, [1 / rank for rank in range(1, len(choices) + 1)])[0]


def mixed(
    seed: int = 0,
    requests: int = 4_000,
    mix: str | Mix = "chat",
    *,
    shift: Mix | None = None,
    rate: float = 2.0,
    named: float = 0.5,
    block_size: int = 16,
) -> Trace:
    """A trace of `requests` requests, `rate` of them a second.

    Args:
        seed: the same seed makes the same trace.
        requests: how many.
        mix: the shares of the kinds of traffic, or a name from `MIXES`.
        shift: another mix, of the sessions that start once half of the requests have come.
        rate: requests a second; sessions start as a Poisson process.
        named: share of the sessions of several turns that the client names.
        block_size: tokens of a block.
    """
    if requests < 0 or rate <= 0:
        raise InvalidRequestError("A workload has 0 requests or more, at a rate above 0.")
    name, first, second = _mixes(mix)
    second = shift or second or first
    traffic = _Traffic(random.Random(seed), block_size)
    pending: list[tuple[float, int, TraceRequest]] = []
    done: list[TraceRequest] = []
    time = 0.0
    number = count()
    while len(done) < requests:
        now = first if time * rate < requests / 2 else second
        starts = _starts(now)
        time += traffic.random.expovariate(rate * sum(starts) / sum(astuple(now)))
        while pending and pending[0][0] <= time:
            done.append(heapq.heappop(pending)[2])
        for request in traffic.session(starts, time, named):
            heapq.heappush(pending, (request.time, next(number), request))
    return Trace(name, block_size, tuple(done[:requests]))


def _starts(mix: Mix) -> list[float]:
    """How often sessions of each kind start: where they have many requests, more seldom."""
    return [share / turns for share, turns in zip(astuple(mix), astuple(TURNS), strict=True)]


def _mixes(mix: str | Mix) -> tuple[str, Mix, Mix | None]:
    if isinstance(mix, str):
        if mix not in MIXES:
            raise InvalidRequestError(f"There is no mix '{mix}'. There are: {', '.join(MIXES)}.")
        return (f"workload:{mix}", *MIXES[mix])
    if min(astuple(mix)) < 0 or not sum(astuple(mix)):
        raise InvalidRequestError(f"The shares of a mix are 0 or more, one of them more: {mix}.")
    return "workload", mix, None
