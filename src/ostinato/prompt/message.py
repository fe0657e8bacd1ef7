"""Chat messages as the prompt layer reads them: their texts, and who may reuse which."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import CacheControl, cache_control
from ostinato.prompt.span import SpanKind

Message = Mapping[str, Any]
Piece = tuple[str, CacheControl]
"""A stretch of a content, and what the message says of it."""

THINK_TAG = re.compile("(<think>|</think>)")


def texts_of(message: Message, index: int) -> tuple[list[Piece] | None, str | None, CacheControl]:
    """A message's content in its parts, its chain of thought as one string (None where it has none), and what it says
    of all of itself."""
    at = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidRequestError(f"{at} needs a role, such as 'user'.", param=f"{at}.role")
    thoughts: list[str] = []
    for name in ("reasoning_content", "reasoning"):
        thought = message.get(name)
        if thought is not None and not isinstance(thought, str):
            raise InvalidRequestError(f"{at}.{name} must be a string.", param=f"{at}.{name}")
        if thought is not None and not thoughts:
            thoughts.append(thought)
    content = message.get("content")
    whole = cache_control(message.get("cache_control"), f"{at}.cache_control")
    pieces: list[Piece] | None = None
    if isinstance(content, list):
        pieces = []
        for number, part in enumerate(cast("list[Any]", content)):
            where = f"{at}.content[{number}]"
            text, is_thought = _part(part, message["role"], where)
            own = cache_control(part.get("cache_control"), f"{where}.cache_control")
            if is_thought:
                thoughts.append(text)
                continue
            control = CacheControl(own.level or whole.level, whole.ttl if own.ttl is None else own.ttl)
            if pieces and pieces[-1][1] == control:
                pieces[-1] = pieces[-1][0] + text, control
            else:
                pieces.append((text, control))
    elif isinstance(content, str):
        pieces = [(content, whole)]
    elif content is not None:
        raise InvalidRequestError(f"{at}.content must be a string or a list of parts.", param=f"{at}.content")
    return pieces, "".join(thoughts) if thoughts else None, whole


def _part(part: Any, role: str, where: str) -> tuple[str, bool]:
    """The text of a part of a content, and whether it is chain of thought."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "reasoning" and role == "assistant":
        text = part.get("text", part.get("reasoning"))
    elif kind == "text":
        text = part.get("text")
    else:
        raise InvalidRequestError(
            f"{where} has type {kind!r}, but this model reads text only; send parts of type 'text'.",
            param=f"{where}.type",
        )
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.text must be a string.", param=f"{where}.text")
    return text, kind == "reasoning"


def without_texts(message: Message) -> dict[str, Any]:
    # Templates test whether a key is there, so null entries are left out.
    texts = ("content", "reasoning_content", "reasoning", "cache_control", "kind")
    return {key: value for key, value in message.items() if key not in texts and value is not None}


def has_thoughts(content: str | None, kind: SpanKind) -> bool:
    return kind == "assistant" and content is not None and THINK_TAG.search(content) is not None


def by_thought(text: str, kind: SpanKind) -> Iterator[tuple[str, SpanKind]]:
    """A text cut into chain of thought and answers, if it is the assistant's.

    The opening tag may be missing at its beginning: some templates write it into the generation prompt.
    """
    for piece in re.split("(?<=</think>)|(?=<think>)", text) if kind == "assistant" else [text]:
        thought = kind == "assistant" and (piece.startswith("<think>") or piece.endswith("</think>"))
        yield piece, "reasoning" if thought else kind
