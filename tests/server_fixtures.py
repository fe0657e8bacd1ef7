"""A real server in a thread, for the tests that speak HTTP."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import uvicorn

from ostinato import Engine
from ostinato.access.access import Access
from ostinato.server.app import create_app
from ostinato.server.limits import Limits
from ostinato.server.listen import HEADERS_WITHIN, configured
from ostinato.server.middleware import BODY_WITHIN

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

DEADLINE = 60.0
"""Seconds after which a test gives up waiting: far more than needed, so that only a hang fails."""


@contextmanager
def serving(
    engine: Engine,
    access: Access | None = None,
    *,
    limits: Limits | None = None,
    headers_within: float = HEADERS_WITHIN,
    body_within: float = BODY_WITHIN,
) -> Generator[str]:
    """Serve `engine` on a free port; yields the base URL."""
    app = create_app(engine, access, limits=limits, body_within=body_within)
    config = configured(
        app, headers_within=headers_within, log_config=None, timeout_graceful_shutdown=5, backlog=2048
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        # asyncio sets it for listeners of its own making alone; without it each answer waits 40 ms for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(done: Callable[[], bool]) -> None:
    """Poll until `done`; fail if that takes too long."""
    deadline = time.monotonic() + DEADLINE
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def idle(engine: Engine) -> bool:
    """Whether no request waits, runs or holds slots."""
    stats = engine.stats()
    return stats.waiting == stats.running == stats.slots_used == 0
