"""Answers in the dialect of Anthropic's API: the JSON that engine replies become."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ostinato.engine.request import Chunk, FinishReason, Reply, Usage
from ostinato.server.answer import Answer, event
from ostinato.server.errors import ErrorAnswer
from ostinato.server.tools import Arguments, CallBegins, Said, ToolCallParser

Json = dict[str, Any]


@dataclass
class MessagesAnswer(Answer):
    """The answer to `POST /v1/messages`. `parser` finds the calls of tools in it."""

    model: str
    parser: ToolCallParser
    request_id: str = ""
    cacheable: int = 0
    """Prompt tokens up to the last breakpoint, which the client asks to be cached."""
    long: bool = False
    """Whether for an hour."""
    silent: bool = False
    """Whether the prompt is computed for the cache alone, and what is generated is dropped."""
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _begun: bool = False
    _open: str | None = None
    """The type of the block that is being streamed."""
    _block: int = -1
    """Its index."""

    def whole(self, replies: Sequence[Reply]) -> Json:
        [reply] = replies
        if self.silent:
            return self._message([], reply.usage) | self._end("length", None) | self.report()
        content: list[Json] = []
        arguments: list[str] = []
        for said in (*self.parser.add(reply.text), *self.parser.finish()):
            match said:
                case Said() if content and content[-1]["type"] == "text":
                    content[-1]["text"] += said.text
                case Said():
                    content.append({"type": "text", "text": said.text})
                case CallBegins():
                    content.append(_tool_use(said.name))
                    arguments.append("")
                case Arguments():
                    arguments[-1] += said.json
        used = [block for block in content if block["type"] == "tool_use"]
        for block, text in zip(used, arguments, strict=True):
            block["input"] = _object(text)
        end = self._end(reply.finish_reason, reply.stop)
        return self._message(content, reply.usage) | end | self.report()

    def events(self, index: int, chunk: Chunk, *, last: bool) -> Iterator[str]:  # noqa: ARG002 (there is one choice)
        if not self._begun:
            self._begun = True
            yield _named("message_start", message=self._message([], chunk.usage))
            yield _named("ping")
        found = self.parser.add(chunk.text) + (self.parser.finish() if chunk.finish_reason else [])
        for said in [] if self.silent else found:
            match said:
                case Said():
                    if self._open != "text":
                        yield from self._opened({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": said.text})
                case CallBegins():
                    yield from self._opened(_tool_use(said.name))
                case Arguments():
                    yield self._delta({"type": "input_json_delta", "partial_json": said.json})
        if chunk.finish_reason:
            yield from self._closed()
            end = self._end("length" if self.silent else chunk.finish_reason, chunk.stop)
            yield _named("message_delta", delta=end, usage=self._usage(chunk.usage), **self.report())

    def end(self) -> Iterator[str]:
        yield _named("message_stop")

    def failed(self, error: ErrorAnswer) -> str:
        return event(error.anthropic_body(self.request_id), "error")

    def _opened(self, block: Json) -> Iterator[str]:
        yield from self._closed()
        self._block += 1
        self._open = block["type"]
        yield _named("content_block_start", index=self._block, content_block=block)

    def _closed(self) -> Iterator[str]:
        if self._open is not None:
            self._open = None
            yield _named("content_block_stop", index=self._block)

    def _delta(self, delta: Json) -> str:
        return _named("content_block_delta", index=self._block, delta=delta)

    def _message(self, content: list[Json], usage: Usage) -> Json:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(usage),
        }

    def _end(self, reason: FinishReason, stop: str | None) -> Json:
        if reason == "length":
            stopped = "max_tokens"
        elif stop is not None:
            stopped = "stop_sequence"
        else:
            stopped = "tool_use" if self.parser.calls else "end_turn"
        return {"stop_reason": stopped, "stop_sequence": stop}

    def _usage(self, usage: Usage) -> Json:
        """Three kinds of input tokens, none of which includes another: together they are the prompt."""
        read = usage.cached_tokens
        created = max(0, min(self.cacheable, usage.prompt_tokens) - read)
        return {
            "input_tokens": usage.prompt_tokens - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": 0 if self.long else created,
                "ephemeral_1h_input_tokens": created if self.long else 0,
            },
            "output_tokens": 0 if self.silent else usage.completion_tokens,
        }


def _named(name: str, **fields: Any) -> str:
    return event({"type": name, **fields}, name)


def _tool_use(name: str) -> Json:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}


def _object(arguments: str) -> Json:
    """The arguments of a call; nothing of them if they were cut."""
    try:
        value: Any = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
