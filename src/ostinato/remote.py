"""A server at an address, as the commands ask it."""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from ostinato.terminal import fail

Json = dict[str, Any]


class Remote:
    """Asks with the key in `OSTINATO_API_KEY`, if there is one. What goes wrong ends the program."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/").removesuffix("/v1")
        if not self._address.startswith(("http://", "https://")):
            fail(f"'{address}' is no address of a server.", "Write http://127.0.0.1:8000", status=2)

    def get(self, path: str, name: str, end: str = "", *, hint: str | None = None) -> Json:
        """What is at `path`, the name quoted, and `end`."""
        return self._answer(Request(self._address + path + quote(name, safe="") + end), hint)

    def post(self, path: str, body: Json, *, hint: str | None = None) -> Json:
        """What the server answers to a body."""
        headers = {"Content-Type": "application/json"}
        return self._answer(Request(self._address + path, json.dumps(body).encode(), headers), hint)

    def _answer(self, request: Request, hint: str | None) -> Json:
        key = os.environ.get("OSTINATO_API_KEY")
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urlopen(request, timeout=30) as reply:
                return json.load(reply)
        except HTTPError as error:
            says = _message(error)
            if error.code == 401:
                hint = "Put your key into the variable OSTINATO_API_KEY."
            fail(f"The server refuses ({error.code}): {says}", hint)
        except (URLError, ValueError, OSError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            fail(
                f"{request.full_url} cannot be read: {reason}.",
                "Is the server running? `ostinato serve` starts one.",
            )


def _message(error: HTTPError) -> str:
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return error.reason
