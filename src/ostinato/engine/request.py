"""What goes into the engine and what comes out: sampling parameters, replies, usage, timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ostinato.engine.grammar import Grammar
from ostinato.errors import InvalidRequestError

FinishReason = Literal["stop", "length", "cancelled"]

MAX_SESSION_NAME = 512
"""Most characters of the name that a client gives a session."""


@dataclass(frozen=True)
class SamplingParams:
    """How to pick tokens. The fields mean what they mean in the OpenAI API and in vLLM.

    `max_tokens=None` runs to the end of the context. `temperature=0` is greedy. `top_k=0` and
    `top_p=1` are off. `logprobs=k` returns the chosen token's log-probability and the k most
    likely; `None` returns none. `stop` strings are cut from the text. A reply in a `grammar` has its form
    unless it is cut by `max_tokens` or a stop, and ends where that ends, also with `ignore_eos`. `markers` are
    special tokens whose strings stay in the text.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    grammar: Grammar | None = None
    markers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, must: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{name} must be {must}, not {getattr(self, name)!r}.", param=name)

        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0.0 <= self.temperature <= 2.0, "temperature", "between 0 and 2")
        check(0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1")
        check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "between -2 and 2")
        check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "between -2 and 2")
        check(0.0 < self.repetition_penalty <= 10.0, "repetition_penalty", "above 0 and at most 10")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "between 0 and 20")
        check(all(self.stop), "stop", "strings that are not empty")


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one token, and of the most likely ones in its place (best first)."""

    token_id: int
    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Token counts. A cached token is a prompt token whose prefill was skipped, counted once."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds since the request was submitted. `ttft` is 0 until the first token."""

    queued: float = 0.0
    ttft: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed reply. The last one has `finish_reason`; usage and timing are to date."""

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    timing: Timing
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    """The stop string that ended the reply."""


@dataclass(frozen=True)
class Reply:
    """A whole reply. `text` has no stop string and no special tokens; `token_ids` is what was generated."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] = ()
    stop: str | None = None
    """The stop string that ended it, if one did."""
