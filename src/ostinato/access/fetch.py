"""A small document over HTTP, had by a deadline or not at all.

Timeouts of sockets are for each wait anew: a server that sends a byte now and then is waited for without end. Here one
deadline is for everything, from the look-up of the host's name to the last byte, and the connection is cut at it.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from ostinato.errors import OstinatoError


class FetchError(OstinatoError):
    """The document could not be had."""


class Fetch:
    """One request for a document, on a thread of its own that ends with it.

    Args:
        url: where it is; it is not looked for anywhere else (no redirects).
        most: bytes after which no more is read.
        seconds: until the connection is cut.
    """

    def __init__(self, url: str, *, most: int, seconds: float) -> None:
        self._url = url
        self._most = most
        self._ends = time.monotonic() + seconds
        self._lock = threading.Lock()
        self._line: socket.socket | None = None
        self._over = False
        self.done: Future[bytes] = Future()
        """The document, or `FetchError`; at the deadline at the latest."""
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        threading.Thread(target=self._run, name="ostinato-fetch", daemon=True).start()
        self._timer.start()

    def _run(self) -> None:
        try:
            body, problem = self._read(), ""
        except urllib.error.HTTPError as error:
            body, problem = b"", f"HTTP status {error.code}"
            error.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            body, problem = b"", str(error)
        self._timer.cancel()
        self._settle(body, problem)

    def _read(self) -> bytes:
        opener = urllib.request.build_opener(_NoRedirect, _Http(self), _Https(self))
        request = urllib.request.Request(
            self._url, headers={"Accept": "application/json", "User-Agent": "ostinato"}
        )
        body = b""
        try:
            with opener.open(request) as response:
                while len(body) <= self._most and (piece := response.read1(self._most)):
                    body += piece
        finally:
            with self._lock:
                if self._line is not None:
                    self._line.close()
                self._line = None
        return body

    def connect(self, address: tuple[str, int], *options: Any) -> socket.socket:  # noqa: ARG002
        """A connection that ends at the deadline."""
        problem: OSError = OSError("its host has no address")
        for family, kind, protocol, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(max(0.001, self._ends - time.monotonic()))
                made.connect(where)
                self._keep(made)
                return made
            except OSError as error:
                made.close()
                problem = error
        raise problem

    def _keep(self, line: socket.socket) -> None:
        with self._lock:
            if self._over:
                raise TimeoutError("it takes too long")
            # TLS takes the socket over; a second handle on the connection stays good for cutting it.
            self._line = line.dup()

    def _cut(self) -> None:
        with self._lock:
            self._over = True
            if self._line is not None:
                with suppress(OSError):
                    self._line.shutdown(socket.SHUT_RDWR)
        self._settle(b"", "")

    def _settle(self, body: bytes, problem: str) -> None:
        with self._lock:
            if self.done.done():
                return
            # What came until the connection was cut may look whole.
            problem = "it takes too long" if self._over else problem
            settle = partial(self.done.set_result, body)
            if problem:
                error = FetchError(f"{self._url} cannot be fetched: {problem}.")
                settle = partial(self.done.set_exception, error)
            settle()


class _Http(urllib.request.HTTPHandler):
    def __init__(self, fetch: Fetch) -> None:
        super().__init__()
        self._fetch = fetch

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_through, http.client.HTTPConnection, self._fetch), req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, fetch: Fetch) -> None:
        super().__init__()
        self._fetch = fetch

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_through, http.client.HTTPSConnection, self._fetch), req)


def _through(
    kind: type[http.client.HTTPConnection], fetch: Fetch, host: str, **options: Any
) -> http.client.HTTPConnection:
    made = kind(host, **options)
    made._create_connection = fetch.connect  # pyright: ignore[reportAttributeAccessIssue]
    return made


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """None: a redirect is an error. It could lead anywhere, and to plain http."""
