"""Cache control: what a request says of who may reuse a stretch of its prompt, and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from ostinato.access.durations import parse_duration
from ostinato.access.scope import LEVELS, Level, rank
from ostinato.errors import InvalidRequestError

MAX_TTL = 366 * 86400


@dataclass(frozen=True)
class CacheControl:
    """The scope and the lifetime asked for; None for what the request, or else the server, says of all of it."""

    level: Level | None = None
    ttl: float | None = None
    """Seconds since the latest use after which it counts as forgotten."""


NONE = CacheControl()


def narrowest(controls: Iterable[CacheControl], default: Level) -> CacheControl:
    """The narrowest scope and the shortest life of several; `default` is the scope of those that name none."""
    level: Level | None = None
    ttl: float | None = None
    for control in controls:
        level = max(level or "public", control.level or default, key=rank)
        ttl = shorter(ttl, control.ttl)
    return CacheControl(level or default, ttl)


def shorter(a: float | None, b: float | None) -> float | None:
    """The shorter of two times to live, None being for ever."""
    return b if a is None else a if b is None else min(a, b)


def cache_control(value: object, at: str) -> CacheControl:
    """What a field `cache_control` says, as in Anthropic's API and with a scope:
    `{"type": "ephemeral", "scope": "org", "ttl": "1h"}`.

    Args:
        value: the field; None says nothing.
        at: the field's name, for errors.

    Raises:
        InvalidRequestError: it is malformed.
    """
    if value is None:
        return NONE
    if not isinstance(value, Mapping):
        raise InvalidRequestError(
            f'{at} must be an object such as {{"type": "ephemeral", "scope": "org", "ttl": "1h"}}.', param=at
        )
    fields = cast("Mapping[str, Any]", value)
    if unknown := [name for name in fields if name not in ("type", "scope", "ttl")]:
        raise InvalidRequestError(
            f"{at}.{str(unknown[0])[:40]} is unknown; use type, scope and ttl.", param=at
        )
    if fields.get("type", "ephemeral") != "ephemeral":
        raise InvalidRequestError(f"{at}.type must be 'ephemeral'.", param=f"{at}.type")
    level = fields.get("scope")
    if level is not None and level not in LEVELS:
        raise InvalidRequestError(f"{at}.scope must be one of {', '.join(LEVELS)}.", param=f"{at}.scope")
    ttl = fields.get("ttl")
    return CacheControl(level, None if ttl is None else seconds(ttl, f"{at}.ttl"))


def seconds(duration: object, at: str) -> float:
    """A duration such as "5m", "1h" or "24h", or a number of seconds; `InvalidRequestError` names `at`."""
    value = math.nan
    if isinstance(duration, str):
        with suppress(InvalidRequestError):
            value = parse_duration(duration, least=0)
    elif isinstance(duration, int | float) and not isinstance(duration, bool):
        value = float(duration)
    if not 0 <= value <= MAX_TTL:
        raise InvalidRequestError(
            f'{at} must be a duration such as "5m", "1h" or "24h", from 0s (not kept) to 366d.', param=at
        )
    return value
