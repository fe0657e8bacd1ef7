"""Output: turns a sequence's tokens into text, finds where it stops, and hands it to whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from ostinato.engine.request import Chunk, FinishReason, SamplingParams, Timing, TokenLogprob, Usage
from ostinato.engine.sampler import Sampled
from ostinato.engine.sequence import Sequence
from ostinato.models.tokenizer import IncrementalDecoder, Tokenizer

Sink = Callable[[Chunk | Exception], None]
"""Called by the engine's thread with every chunk, the last of which has a finish reason, or with an error."""


class Output:
    """The reply to one sequence, as it grows."""

    def __init__(
        self, sequence: Sequence, tokenizer: Tokenizer, stop_token_ids: frozenset[int], sink: Sink
    ) -> None:
        self.sink = sink
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer)
        self._stop_token_ids = stop_token_ids
        self._stop = StopStrings(sequence.params)
        self._started = self._first = 0.0

    def started(self) -> None:
        """The sequence left the queue."""
        self._started = self._started or time.perf_counter()

    def add(self, sampled: Sampled) -> FinishReason | None:
        """Take the next token and hand on what can be read. Returns why the reply ended, if it did."""
        sequence = self._sequence
        self._first = self._first or time.perf_counter()
        reason: FinishReason | None = None
        if sampled.token_id in self._stop_token_ids:
            text, reason = self._stop.add(self._decoder.finish())[0] + self._stop.rest(), "stop"
        else:
            text, stopped = self._stop.add(self._decoder.add(sampled.token_id))
            if stopped:
                reason = "stop"
            elif sequence.generated >= sequence.max_tokens:
                text += self._stop.add(self._decoder.finish())[0] + self._stop.rest()
                reason = "length"
        self._hand_on(text, (sampled,), reason)
        return reason

    def cancelled(self) -> None:
        self._hand_on("", (), "cancelled")

    def failed(self, error: Exception) -> None:
        self.sink(error)

    def _hand_on(self, text: str, sampled: tuple[Sampled, ...], reason: FinishReason | None) -> None:
        sequence = self._sequence
        now = time.perf_counter()
        usage = Usage(sequence.prompt_tokens, sequence.cached_tokens, sequence.generated)
        timing = Timing(
            queued=(self._started or now) - sequence.arrived,
            ttft=self._first - sequence.arrived if self._first else 0.0,
            total=now - sequence.arrived,
        )
        logprobs = () if sequence.params.logprobs is None else tuple(self._logprob(s) for s in sampled)
        self.sink(Chunk(text, tuple(s.token_id for s in sampled), usage, timing, reason, logprobs))

    def _logprob(self, sampled: Sampled) -> TokenLogprob:
        top = tuple(self._named(token, logprob) for token, logprob in sampled.top)
        return self._named(sampled.token_id, sampled.logprob, top)

    def _named(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TokenLogprob(token, raw.decode("utf-8", errors="replace"), raw, logprob, top)


class StopStrings:
    """Cuts text at the first stop string; holds back what may be the beginning of one."""

    def __init__(self, params: SamplingParams) -> None:
        self._stops = params.stop
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Take more text. Returns what may be shown, and whether a stop string ended it."""
        if not self._stops:
            return text, False
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def rest(self) -> str:
        """What was held back, once nothing more will come."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
