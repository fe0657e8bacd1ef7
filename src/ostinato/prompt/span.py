"""A prompt as the engine sees it: spans of token ids, each of one kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SpanKind = Literal["text", "system", "tools", "template", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Span:
    """A stretch of a prompt of one kind."""

    token_ids: tuple[int, ...]
    kind: SpanKind = "text"


@dataclass(frozen=True)
class Prompt:
    """What a request asks the model to continue; its tokens stand at positions 0, 1, 2, …"""

    spans: tuple[Span, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for span in self.spans for token in span.token_ids]
