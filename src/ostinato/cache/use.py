"""A use: one request's use of the cache, as far as an eviction policy may learn from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Use:
    """Who asks, and when."""

    time: float
    """Arrival in seconds, on the engine's or the trace's clock."""
    session: str = ""
    """The conversation or agent run that the request belongs to; empty where it is nobody's."""
    turn: int = 1
    """1 for the session's first request."""
    tokens: int = 0
    """Length of the prompt."""
    agentic: bool = False
    """The session calls tools: its turns follow each other at a machine's pace."""
    templated: bool = False
    """The prompt begins with text that is not the user's: a system prompt, a template, tools, a module."""
    returns: float | None = None
    """Predicted probability that the session comes back, for a first turn; None where nothing predicts it."""
    scope: str = "public"
    """Who may reuse what the request computes."""


NOBODY = Use(0.0)
