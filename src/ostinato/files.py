"""Where Ostinato keeps files of its own, and the SHA-256 of files, remembered between runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, cast

_REMEMBERED = "sha256.json"


def cache_dir() -> Path:
    """`$OSTINATO_CACHE`, or `ostinato` in `$XDG_CACHE_HOME` (default `~/.cache`)."""
    chosen = os.environ.get("OSTINATO_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "ostinato"


def file_sha256(path: Path) -> bytes:
    """SHA-256 of a file's content, remembered for its real path, size and modification time."""
    real = path.resolve()
    status = real.stat()
    key = json.dumps([str(real), status.st_size, status.st_mtime_ns])
    known = _remembered().get(key)
    if known is not None:
        return known
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    _remember(key, digest)
    return digest


def _remembered() -> dict[str, bytes]:
    try:
        stored: Any = json.loads((cache_dir() / _REMEMBERED).read_text("utf-8"))
        items = cast("dict[str, str]", stored).items()
        return {key: bytes.fromhex(value) for key, value in items if len(value) == 64}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _remember(key: str, digest: bytes) -> None:
    # A lost update of a concurrent process costs one more hashing, an unwritable directory the same.
    with contextlib.suppress(OSError):
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        stored = {name: value.hex() for name, value in _remembered().items()} | {key: digest.hex()}
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=_REMEMBERED, delete=False) as file:
            json.dump(stored, file)
        os.replace(file.name, folder / _REMEMBERED)
