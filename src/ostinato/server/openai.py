"""The OpenAI dialect: what a body asks of the engine, and the JSON that answers it."""

from __future__ import annotations

import codecs
import hashlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ostinato.engine.request import (
    MAX_SESSION_NAME,
    Chunk,
    FinishReason,
    Reply,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from ostinato.errors import InvalidRequestError
from ostinato.prompt.pml import parse_prompt
from ostinato.prompt.resolve import Placement, ReuseMode
from ostinato.prompt.schema import SchemaPrompt
from ostinato.prompt.schema import Text as PlainText
from ostinato.server.messages import ChatMessage, Text, Unsupported, check_unicode, items, refuse, unicode

T = TypeVar("T")
Json = dict[str, Any]
Prompt = PlainText | list[int] | list[Json] | SchemaPrompt
"""A prompt as it came. Text is `PlainText`, so that nothing in it is ever read as PML."""

MAX_CHOICES = 128
"""Most engine requests that one body may start (prompts times `n`)."""


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[Text, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]

# What a client may ask for that would change the answer and that is not built, with the values that ask
# for nothing. Refused rather than ignored: a client that wants JSON and gets prose has no way to notice.
UNSUPPORTED: Unsupported = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "suffix": ("",),
    "min_tokens": (0,),
    "bad_words": ([],),
    "repeat_penalty": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": (),
}


SessionName = Annotated[str, Field(max_length=MAX_SESSION_NAME), AfterValidator(unicode)]


class Metadata(BaseModel):
    """`metadata` of a request. Of what a client notes there, only the session matters here."""

    model_config = ConfigDict(strict=True, extra="allow")
    session_id: SessionName | None = None


class StreamOptions(BaseModel):
    """`stream_options` of a streamed request."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class GenerationRequest(BaseModel):
    """The fields both endpoints share. null means the default, as in the OpenAI API.

    Unknown fields are accepted, since clients send many that do not bear on the answer (`store`,
    `service_tier`, `safety_identifier`...); those that would and are not built are refused.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: SessionName | None = None
    metadata: Metadata | None = None
    user: SessionName | None = None

    # Not OpenAI's; the names are vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None

    # Ostinato's own.
    pml: Text | Json | None = None
    """A prompt over a schema: PML, or the JSON form of a `SchemaPrompt`."""
    reuse_mode: ReuseMode | None = None
    link_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None

    def prompts(self) -> list[Prompt]:
        """The prompts of the body, in order."""
        raise NotImplementedError

    def sampling(self) -> SamplingParams:
        """How to sample, without what is particular to an endpoint."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(_or(self.top_k, 0), 0),  # -1 is vLLM's way to say "off"
            min_p=_or(self.min_p, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=_logit_bias(self.logit_bias or {}),
        )

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def session(self) -> str:
        """The conversation or agent run that the request belongs to, by the most particular name given."""
        of_metadata = self.metadata.session_id if self.metadata else None
        return self.prompt_cache_key or of_metadata or self.user or ""

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def mode(self) -> ReuseMode:
        """What is reused of modules."""
        return self.reuse_mode or "modular"

    def schema_prompt(self) -> SchemaPrompt:
        """The prompt in the field `pml`."""
        if isinstance(self.pml, str):
            return parse_prompt(self.pml)
        check_unicode(self.pml)
        return SchemaPrompt.from_json(self.pml)

    def engine_requests(self) -> list[tuple[Prompt, SamplingParams]]:
        """One engine request for each choice of each prompt. Choice i of a seeded request has seed + i."""
        refuse(self.model_extra or {}, UNSUPPORTED)
        if self.stream_options and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true.", param="stream_options"
            )
        params, prompts = self.sampling(), self.prompts()
        if len(prompts) * self.choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={self.choices} make {len(prompts) * self.choices} choices; "
                f"one request may have {MAX_CHOICES}.",
                param="n",
            )
        if params.seed is None:
            return [(prompt, params) for prompt in prompts for _ in range(self.choices)]
        seeds = range(params.seed, params.seed + self.choices)
        return [(prompt, replace(params, seed=seed)) for prompt in prompts for seed in seeds]


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def prompts(self) -> list[Prompt]:
        messages = self.messages or []
        for i, message in enumerate(messages):
            message.check(f"messages[{i}]")
        if self.pml is not None:
            return [self.schema_prompt().then(*items(messages))]
        if not messages:
            raise _missing("messages", "must hold a message at least")
        if any(message.documents for message in messages):
            return [SchemaPrompt(None, items(messages))]
        return [[message.for_template() for message in messages]]

    def sampling(self) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens mean the same; send one of them.", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        params = super().sampling()
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        return replace(params, logprobs=self.top_logprobs or 0) if self.logprobs else params


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Text | list[Text] | list[TokenId] | list[list[TokenId]] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    def prompts(self) -> list[Prompt]:
        if self.pml is not None:
            return [self._over_schema(self.prompt)]
        if self.prompt is None:
            raise _missing("prompt", "must be a string, token ids, or a list of either")
        if isinstance(self.prompt, str):
            return [PlainText(self.prompt)]
        if not self.prompt:
            raise InvalidRequestError("prompt is an empty list.", param="prompt")
        # pydantic has checked the elements; these tests tell the four kinds of prompt apart.
        if all(isinstance(item, int) for item in self.prompt):
            return [[item for item in self.prompt if isinstance(item, int)]]
        prompts: list[Prompt] = []
        for item in self.prompt:
            if isinstance(item, list) and not item:
                raise InvalidRequestError("A prompt is an empty list of tokens.", param="prompt")
            if not isinstance(item, int):
                prompts.append(PlainText(item) if isinstance(item, str) else item)
        return prompts

    def _over_schema(self, prompt: object) -> SchemaPrompt:
        """The prompt of `pml`, with the text of `prompt` at its end."""
        if prompt is not None and not isinstance(prompt, str):
            raise InvalidRequestError("With pml, prompt is one string: the text to end with.", param="pml")
        if self.echo:
            raise InvalidRequestError(
                "echo is not supported with pml.", param="echo", code="unsupported_parameter"
            )
        return self.schema_prompt().then(*([PlainText(prompt)] if prompt else []))

    def sampling(self) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs (log-probabilities of the prompt) is not supported.",
                param="echo",
                code="unsupported_parameter",
            )
        # 16 is the default of the OpenAI API for this endpoint.
        return replace(super().sampling(), max_tokens=_or(self.max_tokens, 16), logprobs=self.logprobs)


def _missing(field: str, must: str) -> InvalidRequestError:
    return InvalidRequestError(f"{field} {must}; or send pml.", param=field, code="invalid_value")


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 11):
            raise InvalidRequestError(
                f"logit_bias maps token ids to biases; {key[:20]!r} is not a token id.", param="logit_bias"
            )
    return {int(key): value for key, value in bias.items()}


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
class Answer:
    """One response under construction; the JSON of its whole, or of its chunks as they come."""

    model: str
    fingerprint: str
    choices: int = 1
    include_usage: bool = False
    placements: Sequence[Placement] | None = None
    """Where the parts of a prompt over a schema stand, for the client to know."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def whole(self, replies: Sequence[Reply]) -> Json:
        """The body of a response that is not streamed."""
        choices = [self._choice(index, reply) for index, reply in enumerate(replies)]
        usage = usage_json([reply.usage for reply in replies], self.choices)
        return self._body(self.kind, choices) | {"usage": usage} | self.report()

    def chunks(self, index: int, chunk: Chunk) -> Iterator[Json]:
        """The streamed chunks that bring one piece of choice `index`."""
        for choice in self._chunk_choices(index, chunk):
            yield self._chunk([choice])

    def usage(self, usages: Sequence[Usage]) -> Json:
        """The last chunk of a stream that counts tokens."""
        return self._chunk([]) | {"usage": usage_json(usages, self.choices)}

    def report(self) -> Json:
        """What only this server tells, once an answer."""
        if self.placements is None:
            return {}
        return {"ostinato": {"placements": [asdict(placement) for placement in self.placements]}}

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
class ChatAnswer(Answer):
    """The answer to `POST /v1/chat/completions`."""

    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    logprobs: bool = False
    _begun: set[int] = field(default_factory=set[int])

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def _choice(self, index: int, reply: Reply) -> Json:
        message = {"role": "assistant", "content": reply.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(reply.logprobs),
            "finish_reason": reply.finish_reason,
        }

    def _chunk_choices(self, index: int, chunk: Chunk) -> Iterator[Json]:
        def choice(delta: Json, logprobs: Json | None = None, finish: FinishReason | None = None) -> Json:
            return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

        if index not in self._begun:
            self._begun.add(index)
            yield choice({"role": "assistant", "content": "", "refusal": None})
        if chunk.text or chunk.logprobs:
            yield choice({"content": chunk.text}, self._logprobs(chunk.logprobs))
        if chunk.finish_reason:
            yield choice({}, finish=chunk.finish_reason)

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> Json | None:
        def entry(item: TokenLogprob) -> Json:
            return {"token": item.token, "logprob": _finite(item.logprob), "bytes": list(item.token_bytes)}

        if not self.logprobs:
            return None
        content = [entry(item) | {"top_logprobs": [entry(top) for top in item.top]} for item in logprobs]
        return {"content": content, "refusal": None}


@dataclass
class CompletionAnswer(Answer):
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
