"""Answers in the OpenAI dialect: the JSON that engine replies become."""

from __future__ import annotations

import codecs
import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ostinato.engine.request import Chunk, FinishReason, Reply, TokenLogprob, Usage
from ostinato.server.answer import Answer, event
from ostinato.server.errors import ErrorAnswer
from ostinato.server.tools import Arguments, CallBegins, Event, Said, ToolCallParser

Json = dict[str, Any]


def usage_json(usages: Sequence[Usage], choices: int) -> Json:
    """`usage` of a response with `choices` answers a prompt.

    The prompt is counted once however many answers it got, as OpenAI does. So are its cached tokens: the
    fewest of any answer, because the answers that came later were served from what the first computed.
    """
    first = usages[::choices]
    cached = [
        min(usage.cached_tokens for usage in usages[start : start + choices])
        for start in range(0, len(usages), choices)
    ]
    prompt = sum(usage.prompt_tokens for usage in first)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def fingerprint(model_fingerprint: str, version: str) -> str:
    """`system_fingerprint`: the same while the same weights run in the same version."""
    return "fp_" + hashlib.sha256(f"{model_fingerprint}|{version}".encode()).hexdigest()[:12]


@dataclass
class OpenAIAnswer(Answer):
    """One response. Choice i of prompt p has index p * choices + i."""

    model: str
    fingerprint: str
    choices: int = 1
    include_usage: bool = False
    """Whether a stream ends with a chunk that counts tokens."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _usages: dict[int, Usage] = field(default_factory=dict[int, Usage])

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def whole(self, replies: Sequence[Reply]) -> Json:
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        usage = usage_json([reply.usage for reply in replies], self.choices)
        return self._body(self.kind, choices) | {"usage": usage} | self.report()

    def events(self, index: int, chunk: Chunk, *, last: bool) -> Iterator[str]:
        self._usages[index] = chunk.usage
        chunks = [self._chunk([choice]) for choice in self._chunk_choices(index, chunk)]
        if last and not self.include_usage:
            chunks[-1] |= self.report()
        yield from map(event, chunks)

    def end(self) -> Iterator[str]:
        if self.include_usage:
            usages = [self._usages[index] for index in sorted(self._usages)]
            yield event(self._chunk([]) | {"usage": usage_json(usages, self.choices)} | self.report())
        yield "data: [DONE]\n\n"

    def failed(self, error: ErrorAnswer) -> str:
        return event(error.body())

    def _chunk(self, choices: list[Json]) -> Json:
        body = self._body(self.chunk_kind, choices)
        # As OpenAI does: with include_usage each chunk has the field, without it none has.
        return body | {"usage": None} if self.include_usage else body

    def _body(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }

    def _choice(self, index: int, reply: Reply) -> Json:
        raise NotImplementedError

    def _chunk_choices(self, index: int, chunk: Chunk) -> Iterator[Json]:
        raise NotImplementedError


@dataclass
class ChatAnswer(OpenAIAnswer):
    """The answer to `POST /v1/chat/completions`. `parser` makes what finds the calls of tools in a reply."""

    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    logprobs: bool = False
    parser: Callable[[], ToolCallParser] = field(default=lambda: ToolCallParser(frozenset()))
    _parsers: dict[int, ToolCallParser] = field(default_factory=dict[int, ToolCallParser])

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def _choice(self, index: int, reply: Reply) -> Json:
        parser = self.parser()
        content = ""
        calls: list[Json] = []
        for said in (*parser.add(reply.text), *parser.finish()):
            match said:
                case Said():
                    content += said.text
                case CallBegins():
                    calls.append(_call(said.name))
                case Arguments():
                    calls[-1]["function"]["arguments"] += said.json
        message: Json = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        return {
            "index": index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": _finish(reply.finish_reason, parser),
        }

    def _chunk_choices(self, index: int, chunk: Chunk) -> Iterator[Json]:
        def choice(delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self.parser()
            yield choice({"role": "assistant", "content": "", "refusal": None})
        found = parser.add(chunk.text) + (parser.finish() if chunk.finish_reason else [])
        first = parser.calls - sum(isinstance(each, CallBegins) for each in found)
        deltas = list(_deltas(found, first))
        if not deltas and chunk.logprobs:
            deltas = [{"content": ""}]
        for number, delta in enumerate(deltas):
            yield choice(delta, None if number else self._logprobs(chunk.logprobs))
        if chunk.finish_reason:
            yield choice({}, finish=_finish(chunk.finish_reason, parser))

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        def entry(item: TokenLogprob) -> Json:
            return {"token": item.token, "logprob": _finite(item.logprob), "bytes": list(item.token_bytes)}

        if not self.logprobs:
            return None
        content = [entry(item) | {"top_logprobs": [entry(top) for top in item.top]} for item in logprobs]
        return {"content": content, "refusal": None}


def _deltas(events: Sequence[Event], calls: int) -> Iterator[Json]:
    """What a stream says of events that come after that many calls."""
    for each in events:
        match each:
            case Said():
                yield {"content": each.text}
            case CallBegins():
                yield {"tool_calls": [{"index": calls, **_call(each.name)}]}
                calls += 1
            case Arguments():
                yield {"tool_calls": [{"index": calls - 1, "function": {"arguments": each.json}}]}


def _call(name: str) -> Json:
    function = {"name": name, "arguments": ""}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _finish(reason: FinishReason, parser: ToolCallParser) -> str:
    return "tool_calls" if reason == "stop" and parser.calls else reason


@dataclass
class CompletionAnswer(OpenAIAnswer):
    """The answer to `POST /v1/completions`. `echoes` are the texts to send before the answers, if any."""

    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    logprobs: bool = False
    echoes: Sequence[str] = ()
    _offsets: dict[int, _TextOffsets] = field(default_factory=dict[int, "_TextOffsets"])

    def _choice(self, index: int, reply: Reply) -> Json:
        return {
            "index": index,
            "text": self._echo(index) + reply.text,
            "logprobs": self._logprobs(index, reply.logprobs),
            "finish_reason": reply.finish_reason,
        }

    def _chunk_choices(self, index: int, chunk: Chunk) -> Iterator[Json]:
        text = chunk.text
        if index not in self._offsets:
            text = self._echo(index) + text
            self._offsets[index] = _TextOffsets()
        if text or chunk.logprobs or chunk.finish_reason:
            yield {
                "index": index,
                "text": text,
                "logprobs": self._logprobs(index, chunk.logprobs),
                "finish_reason": chunk.finish_reason,
            }

    def _echo(self, index: int) -> str:
        return self.echoes[index // self.choices] if self.echoes else ""

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> Json | None:
        if not self.logprobs:
            return None
        offsets = self._offsets.setdefault(index, _TextOffsets())
        return {
            "tokens": [item.token for item in logprobs],
            "token_logprobs": [_finite(item.logprob) for item in logprobs],
            "top_logprobs": [_top(item) for item in logprobs],
            "text_offset": [offsets.of(item) for item in logprobs],
        }


class _TextOffsets:
    """Where each token begins in the text. Counted over bytes: a character may span several tokens."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, token: TokenLogprob) -> int:
        offset = self._length
        self._length += len(self._decoder.decode(token.token_bytes))
        return offset


def _top(item: TokenLogprob) -> dict[str, float]:
    """The legacy form: token text to log-probability, of the chosen token too if not among the top."""
    top: dict[str, float] = {}
    for other in (*item.top, item):
        top.setdefault(other.token, _finite(other.logprob))
    return top


def _finite(logprob: float) -> float:
    """JSON has no -inf; OpenAI writes -9999 for a token that cannot be."""
    return max(logprob, -9999.0)
