"""Lengths of time as people write them: 90d, 1h, 30m."""

from __future__ import annotations

import re

from ostinato.errors import InvalidRequestError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}


def parse_duration(text: str, param: str | None = None, *, least: int = 1) -> float:
    """Seconds of a duration: a whole number (of at most six digits, `least` or more) and a unit."""
    match = re.fullmatch(r"([0-9]{1,6})([smhdwy])", text.strip().lower())
    seconds = int(match[1]) * _UNITS[match[2]] if match else -1
    if seconds < least:
        raise InvalidRequestError(
            f"{text[:40]!r} is not a length of time. Write a number and s, m, h, d, w or y: 90d.", param=param
        )
    return float(seconds)
