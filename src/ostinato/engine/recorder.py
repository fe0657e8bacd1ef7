"""The recorder: writes what requests asked of the cache to a file, as a trace that a policy can be replayed on.

A trace holds no text and no token ids: blocks are told apart, and nothing more is told of them.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from ostinato.engine.sequence import Sequence
from ostinato.lab.trace import TraceRequest
from ostinato.lab.traces import TraceWriter

log = logging.getLogger(__name__)


class Recorder:
    """Records requests in order of arrival, each once it and all before it have ended."""

    def __init__(self, path: Path, block_size: int) -> None:
        self.lost = 0
        """Requests that could not be written."""
        self._block_size = block_size
        self._writer = TraceWriter(path, block_size)
        self._started = time.perf_counter()
        self._open: dict[Sequence, TraceRequest | None] = {}
        self._sessions: dict[str, str] = {}

    def begin(self, sequence: Sequence) -> None:
        """A request came in: what came later is written behind it."""
        self._open[sequence] = None

    def end(self, sequence: Sequence) -> None:
        """The request ended, in whatever way. One that was never admitted asked nothing of the cache."""
        if sequence.admitted:
            self._open[sequence] = self._request(sequence)
        else:
            self._open.pop(sequence, None)
        while self._open:
            first, request = next(iter(self._open.items()))
            if request is None:
                return
            del self._open[first]
            self._write(request)

    def close(self) -> None:
        """Finish the file; all requests have ended."""
        try:
            self._writer.close()
        except OSError as error:
            log.error("the recording could not be finished: %s", error)

    def _write(self, request: TraceRequest) -> None:
        try:
            self._writer.write(request)
        except OSError as error:  # a full disk costs the recording, not the requests
            if not self.lost:
                log.error("requests are missing from the recording: %s", error)
            self.lost += 1

    def _request(self, sequence: Sequence) -> TraceRequest:
        """The chains of a prompt as one, in whole blocks, with the chain that the reply continues at the end."""
        size, last, use = self._block_size, sequence.last, sequence.use
        # What is moved to its place counts there, not at its home.
        homes = [chain.source for chain in sequence.chains]
        others = [chain for chain in sequence.chains[:-1] if chain not in homes]
        prompt = len(last.token_ids) - sequence.generated
        # The token that was sampled last is not computed.
        blocks, written = prompt // size, (prompt + max(0, sequence.generated - 1)) // size
        placed = [(chain, block) for chain in others for block in range(len(chain.keys))]
        asked = [*placed, *((last, block) for block in range(blocks))]
        return TraceRequest(
            time=max(0.0, use.time - self._started),
            keys=tuple(chain.keys[block] for chain, block in asked),
            tokens=len(placed) * size + prompt,
            kinds=tuple(chain.kind_of(block, size) for chain, block in asked),
            reply_keys=tuple(last.keys[blocks:written]),
            session=self._numbered(sequence.session),
            agentic=use.agentic,
            templated=use.templated,
            scope=use.scope,
        )

    def _numbered(self, session: str) -> str:
        """A session's number in the recording; empty if the client named none, as its blocks tell."""
        return session and self._sessions.setdefault(session, str(len(self._sessions) + 1))
