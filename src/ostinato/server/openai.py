"""The OpenAI dialect: what a body asks of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ostinato.engine.grammar import Grammar, json_grammar
from ostinato.engine.request import MAX_SESSION_NAME, SamplingParams
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import CacheControl, cache_control, seconds
from ostinato.prompt.chat import Chat
from ostinato.prompt.pml import parse_prompt
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.schema import SchemaPrompt
from ostinato.prompt.schema import Text as PlainText
from ostinato.server.messages import (
    ChatMessage,
    Many,
    Name,
    Text,
    Unsupported,
    chat_prompt,
    check_unicode,
    items,
    refuse,
    unicode,
)
from ostinato.server.tools import Calls, Tool, ToolCallParser, ToolUse

T = TypeVar("T")
Json = dict[str, Any]
Prompt = PlainText | list[int] | Chat | SchemaPrompt
"""A prompt as it came. Text is `PlainText`, so that nothing in it is ever read as PML."""

MAX_CHOICES = 128
"""Most engine requests that one body may start (prompts times `n`)."""
MAX_BIASES = 1024


def _few(biases: object) -> object:
    # pydantic counts the entries of an object only once it has found fault with each.
    if isinstance(biases, dict) and len(cast("Json", biases)) > MAX_BIASES:
        raise PydanticCustomError(
            "too_long", "Dictionary should have at most {limit} items", {"limit": MAX_BIASES}
        )
    return biases


Count = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=2**20)]
Stop = Annotated[Text, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias], BeforeValidator(_few), Field(max_length=MAX_BIASES)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]

# What a client may ask for that would change the answer and that is not built, with the values that ask
# for nothing. Refused rather than ignored: a client that wants JSON and gets prose has no way to notice.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
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


ANSWER_FIELD = "response_format.json_schema.schema"

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
    unsupported: ClassVar[Unsupported] = UNSUPPORTED

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    logit_bias: Biases | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: SessionName | None = None
    metadata: Metadata | None = None
    prompt_cache_retention: str | None = None
    user: SessionName | None = None

    # Not OpenAI's; the names are vLLM's.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Many[TokenId] | None = None
    ignore_eos: bool | None = None

    # Ostinato's own.
    pml: Text | Json | None = None
    """A prompt over a schema: PML, or the JSON form of a `SchemaPrompt`."""
    reuse_mode: ReuseMode | None = None
    link_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    cache_control: Json | None = None
    """The scope and the time to live of what nothing in the prompt says more of."""
    explain: bool | None = None
    """Whether the answer says what was cached of the prompt, and why the rest was not."""
    cache_salt: Name | None = None
    """vLLM's: what is computed is found again under the same salt alone, and by the same caller."""
    end_user: Name | None = None
    """Which of the caller's own users asks: what is computed in the scope of a user or session is that one's."""

    def prompts(self) -> list[Prompt]:
        """The prompts of the body, in order."""
        raise NotImplementedError

    def sampling(self, calls: Calls) -> SamplingParams:
        """How to sample; `calls` is how the model writes calls of tools."""
        del calls
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
    def control(self) -> CacheControl:
        """Who may reuse, and for how long, what nothing in the prompt says more of."""
        control = cache_control(self.cache_control, "cache_control")
        if control.ttl is not None or self.prompt_cache_retention in (None, "in_memory", "in-memory"):
            return control
        return CacheControl(control.level, seconds(self.prompt_cache_retention, "prompt_cache_retention"))

    def controls(self) -> Iterator[tuple[str, Json | None]]:
        """All that the body says of who may reuse what, and in which field."""
        yield "cache_control", self.cache_control

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        raise NotImplementedError

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

    def engine_requests(self, calls: Calls) -> list[tuple[Prompt, SamplingParams]]:
        """One engine request for each choice of each prompt. Choice i of a seeded request has seed + i."""
        refuse(self.model_extra or {}, self.unsupported)
        if self.stream_options and not self.stream:
            raise InvalidRequestError(
                "stream_options is only allowed when stream is true.", param="stream_options"
            )
        params, prompts = self.sampling(calls), self.prompts()
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


class FunctionDefinition(BaseModel):
    """A tool's name, what it is for, and the JSON schema of its arguments."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: ToolName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolDefinition(BaseModel):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Json | None = None


class FunctionName(BaseModel):
    """Names a function."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: ToolName


class ToolChoice(BaseModel):
    """The one tool that must be called."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: FunctionName


class JsonSchema(BaseModel):
    """The schema of a reply in JSON."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)
    name: Text | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of a reply."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatCompletionRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Many[ChatMessage] | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None

    def controls(self) -> Iterator[tuple[str, Json | None]]:
        yield from super().controls()
        for number, tool in enumerate(self.tools or ()):
            yield f"tools[{number}].cache_control", tool.cache_control
        for number, message in enumerate(self.messages or ()):
            yield f"messages[{number}].cache_control", message.cache_control
            for at, part in enumerate(message.parts):
                yield f"messages[{number}].content[{at}].cache_control", part.cache_control

    @property
    def prompt_field(self) -> str:
        return "messages" if self.pml is None else "pml"

    def tool_use(self) -> ToolUse:
        """What the body says of tools."""
        tools: list[Tool] = []
        for number, tool in enumerate(self.tools or ()):
            at = f"tools[{number}]"
            check_unicode(tool.function.parameters)
            cache_control(tool.cache_control, f"{at}.cache_control")
            function = tool.function
            tools.append(
                Tool(
                    function.name,
                    function.description or "",
                    function.parameters,
                    bool(function.strict),
                    tool.cache_control,
                    f"{at}.function.parameters",
                )
            )
        choice = self.tool_choice or "auto"
        name = None if isinstance(choice, str) else choice.function.name
        return ToolUse.checked(
            tools,
            choice if isinstance(choice, str) else "required",
            name,
            parallel=self.parallel_tool_calls is not False,
        )

    def parser(self, calls: Calls) -> Callable[[], ToolCallParser]:
        """Makes what finds the calls of tools in a reply; all that takes a while is done by then."""
        return partial(self.tool_use().parser, calls, self._grammar(calls))

    def _grammar(self, calls: Calls) -> Grammar | None:
        schema, lenient = self._answer_schema()
        tools = self.tool_use()
        if tools.may_call:
            return tools.grammar(calls, schema, field=ANSWER_FIELD, lenient=lenient)
        return None if schema is None else json_grammar(schema, ANSWER_FIELD, lenient=lenient)

    def _answer_schema(self) -> tuple[Json | None, bool]:
        """The JSON schema of the reply, if it has one, and whether what is not supported in it is left out."""
        form = self.response_format
        if form is None or form.type == "text":
            return None, False
        if form.type == "json_object":
            return {"type": "object"}, False
        given = form.json_schema
        if given is None or given.schema_ is None:
            at = "response_format.json_schema" + ("" if given is None else ".schema")
            raise InvalidRequestError(f"{at} is missing.", param=at, code="invalid_value")
        check_unicode(given.schema_)
        return given.schema_, not given.strict

    def prompts(self) -> list[Prompt]:
        messages = self.messages or []
        for i, message in enumerate(messages):
            message.check(f"messages[{i}]")
        tools = [tool.for_prompt() for tool in self.tool_use().tools]
        if self.pml is not None:
            return [self.schema_prompt().then(*items(messages, tools, self.control.level))]
        if not messages:
            raise _missing("messages", "must hold a message at least")
        return [chat_prompt(messages, tools, self.control.level)]

    def sampling(self, calls: Calls) -> SamplingParams:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens mean the same; send one of them.", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        params = replace(super().sampling(calls), grammar=self._grammar(calls))
        if self.tools:
            params = replace(params, markers=calls.markers)
        if self.max_completion_tokens is not None:
            params = replace(params, max_tokens=self.max_completion_tokens)
        return replace(params, logprobs=self.top_logprobs or 0) if self.logprobs else params


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    unsupported = UNSUPPORTED | {
        "response_format": ({"type": "text"},),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }

    prompt: Text | Many[Text] | TokenIds | Many[TokenIds] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None

    @property
    def prompt_field(self) -> str:
        return "prompt" if self.pml is None else "pml"

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

    def sampling(self, calls: Calls) -> SamplingParams:
        if self.echo and self.logprobs is not None:
            raise InvalidRequestError(
                "echo with logprobs (log-probabilities of the prompt) is not supported.",
                param="echo",
                code="unsupported_parameter",
            )
        # 16 is the default of the OpenAI API for this endpoint.
        return replace(super().sampling(calls), max_tokens=_or(self.max_tokens, 16), logprobs=self.logprobs)


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
