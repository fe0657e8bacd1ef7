"""A trace: what requests ask of a cache, without their text."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostinato.cache.use import TokenType
from ostinato.errors import OstinatoError


class TraceError(OstinatoError):
    """A file is no trace, or is malformed."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Block `i` of the prompt has key `keys[i]`, which stands for all tokens up to its end."""

    time: float
    """Arrival in seconds since the trace began; never before the request before it."""
    keys: tuple[bytes, ...]
    tokens: int
    """Tokens of the prompt. The last block may be partial."""
    kinds: tuple[TokenType, ...] = ()
    """Token type of each block; empty where the trace does not say."""
    reply_keys: tuple[bytes, ...] = ()
    """Blocks that the reply adds to the cache behind the prompt's."""
    session: str = ""
    """The session, where the trace names it."""
    agentic: bool = False
    templated: bool = False
    scope: str = "public"


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_size: int
    requests: tuple[TraceRequest, ...]

    @property
    def unique_blocks(self) -> int:
        """How many different blocks there are: a cache of that many never evicts."""
        return len({key for request in self.requests for key in (*request.keys, *request.reply_keys)})


def in_order(requests: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    """The requests by time of arrival, the first at 0."""
    if not requests:
        return ()
    ordered = sorted(requests, key=lambda request: request.time)
    start = ordered[0].time
    return (
        tuple(replace(request, time=request.time - start) for request in ordered) if start else tuple(ordered)
    )
