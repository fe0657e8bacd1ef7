"""Listening: how uvicorn serves, and for how long it waits for a client that says nothing."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_WITHIN = 10.0
"""Seconds that a client has to send the headers of a request, and what it still sends of one that is answered."""


class _Protocol(H11Protocol):
    """Closes a connection that is to send something and does not. uvicorn alone waits for ever for the rest of headers
    once they have begun, and for the rest of a body that nobody reads."""

    within: ClassVar[float] = HEADERS_WITHIN
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        answering = bool(self.cycle) and not self.cycle.response_complete
        if answering or self.transport.is_closing():
            self._stop()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.within, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def configured(app: FastAPI, *, headers_within: float = HEADERS_WITHIN, **options: Any) -> uvicorn.Config:
    """How uvicorn serves an app; `options` are `uvicorn.Config`'s."""

    class Protocol(_Protocol):
        within = headers_within

    return uvicorn.Config(app, http=Protocol, ws="none", server_header=False, **options)


def raise_open_files() -> None:
    """Let this process have as many connections open as the system allows it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
