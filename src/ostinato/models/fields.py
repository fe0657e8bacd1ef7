"""Typed, checked access to the entries of a config.json or of GGUF metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ostinato.errors import ModelFormatError

_LIMIT = 1 << 30


class Fields:
    """Reads entries of `values`, whose keys all start with `prefix`; complains in terms of `source`."""

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self.source = source

    def error(self, message: str) -> ModelFormatError:
        """A `ModelFormatError` that starts with the source."""
        return ModelFormatError(f"{self.source}: {message}")

    def get(self, key: str) -> Any:
        """The raw entry, None where it is absent or null."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least `least`; required where there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LIMIT:
            raise self._wrong(key, value, f"an integer from {least} to {_LIMIT}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number; required where there is no default."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a positive number")
        if not math.isfinite(value) or value <= 0:
            raise self._wrong(key, value, "a positive number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite positive number, or None where the entry is absent."""
        return None if self.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string; required where there is no default."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> Fields | None:
        """A nested object, or None where it is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "an object")
        return Fields(cast("Mapping[str, Any]", value), f"{self.source}, {self._prefix}{key}")

    def strings(self, key: str) -> list[str]:
        """A required list of strings."""
        value = self.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[Any]", value)):
            raise self._wrong(key, type(value).__name__, "a list of strings")
        return cast("list[str]", value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where the entry is absent."""
        value = self.get(key)
        if value is None:
            return ()
        ids = cast("list[Any]", value) if isinstance(value, list) else [value]
        if not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _LIMIT for item in ids
        ):
            raise self._wrong(key, value, "a token id or a list of token ids")
        return tuple(ids)

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.error(f"{self._prefix}{key} is missing. Download or convert the model again.")
        return default

    def _wrong(self, key: str, value: Any, needed: str) -> ModelFormatError:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.error(f"{self._prefix}{key} is {shown}, but {needed} is needed.")
