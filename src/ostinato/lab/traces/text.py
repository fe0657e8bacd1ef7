"""Text of messages as token ids and chains, without a model's tokenizer.

A token here is a piece of up to six letters or digits, or one other character: about as many as a model's tokenizer
makes of English, and the same for the same text on every machine. Counts of tokens are therefore estimates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from ostinato.cache.use import TokenType
from ostinato.lab.chain import Chain

PIECE = re.compile(r"\w{1,6}|[^\w\s]")
THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
KINDS: Mapping[str, TokenType] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The token type of each role of a message."""


@lru_cache(maxsize=1 << 16)
def _token_id(piece: str) -> int:
    return int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "little")


def token_ids(text: str) -> list[int]:
    return [_token_id(piece) for piece in PIECE.findall(text)]


def add_tools(chain: Chain, tools: Any) -> None:
    chain.add("tools", token_ids(json.dumps(tools)))


def add_message(chain: Chain, message: Mapping[str, Any]) -> None:
    """Continue a prompt with a message: its role, then what it says."""
    begin_message(chain, str(message["role"]))
    add_content(chain, message)


def begin_message(chain: Chain, role: str) -> None:
    if role not in KINDS:
        raise ValueError(f"there is no role {role!r}; there are {', '.join(KINDS)}")
    chain.add(KINDS[role], [_token_id(f"<{role}>")])


def add_content(chain: Chain, message: Mapping[str, Any]) -> None:
    """What a message says: thoughts, text, calls of tools."""
    kind = KINDS[message["role"]]
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            chain.add("reasoning", token_ids(message[name]))
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        _add_part(chain, kind, part)
    for call in message.get("tool_calls") or ():
        chain.add(kind, token_ids(json.dumps(call.get("function", call))))
    chain.add(kind, [_token_id("<end>")])


def _add_part(chain: Chain, kind: TokenType, part: Any) -> None:
    if part is None:
        return
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    text = part.get("text") or part.get("thinking") or part.get("refusal")
    if text is None:  # an image or a file: the same tokens for the same one
        chain.add(kind, token_ids(json.dumps(part)))
    elif part.get("type") in ("reasoning", "thinking"):
        chain.add("reasoning", token_ids(text))
    elif kind != "assistant":
        chain.add(kind, token_ids(text))
    else:
        # Split at the thoughts, every second piece is one.
        for place, piece in enumerate(THOUGHT.split(text)):
            chain.add("reasoning" if place % 2 else kind, token_ids(piece))
