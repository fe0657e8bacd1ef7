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
        self._markers = {
            token: marker
            for marker in sequence.params.markers
            if (token := tokenizer.token_id(marker)) in tokenizer.special_ids
        }
        self._started = self._first = 0.0
        self._end: Chunk | Exception | None = None

    def started(self) -> None:
        """The sequence left the queue."""
        self._started = self._started or time.perf_counter()

    def add(self, sampled: Sampled) -> FinishReason | None:
        """Take the next token and hand on what can be read, but for the reply's end. Returns why it ended, if it did."""
        sequence = self._sequence
        if sampled.error is not None:
            self._end = sampled.error
            return "cancelled"
        self._first = self._first or time.perf_counter()
        reason: FinishReason | None = None
        if sampled.token_id in self._stop_token_ids:
            text, reason = self._rest(), "stop"
        else:
            text = self._stop.add(self._text(sampled.token_id))
            if self._stop.found is not None:
                reason = "stop"
            elif sampled.ends or sequence.generated >= sequence.max_tokens:
                text += self._rest()
                reason = "stop" if sampled.ends else "length"
        self._hand_on(text, (sampled,), reason)
        return reason

    def cancelled(self) -> None:
        self._hand_on("", (), "cancelled")

    def failed(self, error: Exception) -> None:
        self._end = error

    def end(self) -> None:
        """Hand on the end. Who waits for it may count on all that the request held being free by then."""
        if self._end is not None:
            self.sink(self._end)

    def _text(self, token_id: int) -> str:
        return self._markers.get(token_id) or self._decoder.add(token_id)

    def _rest(self) -> str:
        """What was held back, once nothing more will come."""
        return self._stop.add(self._decoder.finish()) + self._stop.rest()

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
        token_ids = tuple(s.token_id for s in sampled)
        chunk = Chunk(text, token_ids, usage, timing, reason, logprobs, self._stop.found)
        if reason is None:
            self.sink(chunk)
        else:
            self._end = chunk

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
        self.found: str | None = None
        """The stop string that was found: nothing that comes behind it is shown."""

    def add(self, text: str) -> str:
        """Take more text. Returns what of it, and of what was held back, may be shown."""
        if not self._stops:
            return text
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.found = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

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
