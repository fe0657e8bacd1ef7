"""A reply while it comes, and all of it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator

from ostinato.engine.request import Chunk, Reply


class Stream(Iterator[Chunk]):
    """The chunks of one reply. The request is cancelled if this is closed or dropped before its end."""

    def __init__(self, chunks: queue.SimpleQueue[Chunk | Exception], cancel: Callable[[], None]) -> None:
        self._chunks, self._cancel, self._ended = chunks, cancel, False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        item = self._chunks.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Cancel the request, if it still runs."""
        if not self._ended:
            self._ended = True
            self._cancel()

    def __del__(self) -> None:
        self.close()


def collect(chunks: list[Chunk]) -> Reply:
    """The whole reply that a stream's chunks make."""
    last = chunks[-1]
    return Reply(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason or "cancelled",
        usage=last.usage,
        timing=last.timing,
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        stop=last.stop,
    )
