"""The dialect of Anthropic's API: what a body asks of the engine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from ostinato.engine.grammar import Grammar, json_grammar
from ostinato.engine.request import SamplingParams
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import CacheControl, cache_control
from ostinato.prompt.chat import Chat
from ostinato.prompt.resolve import ReuseMode
from ostinato.prompt.schema import SchemaPrompt
from ostinato.server.messages import (
    UNSUPPORTED_IN_DOCUMENT,
    ChatMessage,
    DocumentPart,
    Function,
    Json,
    Many,
    Name,
    Part,
    ReasoningPart,
    Text,
    TextPart,
    ToolCall,
    Unsupported,
    chat_prompt,
    check_unicode,
    refuse,
)
from ostinato.server.openai import Count, SessionName, Stop, ToolName
from ostinato.server.tools import Calls, Tool, ToolCallParser, ToolUse

UNSUPPORTED: Unsupported = {
    "container": (),
    "context_management": ({"edits": []},),
    "mcp_servers": ([],),
    "prefill": (),
    "thinking": ({"type": "disabled"},),
}
UNSUPPORTED_IN_OUTPUT: Unsupported = {"effort": ()}
ANSWER_FIELD = "output_config.format.schema"
HOUR = 3600


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)


class ToolUseBlock(_Model):
    """A call of a tool, as the assistant made it."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Json
    cache_control: Json | None = None


class ToolResultBlock(_Model):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Many[TextPart] | None = None
    is_error: bool | None = None
    cache_control: Json | None = None


class ThinkingBlock(_Model):
    """What the assistant thought before it answered."""

    type: Literal["thinking"]
    thinking: Text
    cache_control: Json | None = None


class RedactedThinkingBlock(_Model):
    """The same, for the eyes of another server alone."""

    type: Literal["redacted_thinking"]
    cache_control: Json | None = None


Block = Annotated[
    TextPart | DocumentPart | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]

_OF_ASSISTANT = (ToolUseBlock, ThinkingBlock, RedactedThinkingBlock)
_OF_USER = (DocumentPart, ToolResultBlock)


class InputMessage(_Model):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Many[Block]

    @property
    def blocks(self) -> list[Block]:
        """Its content as blocks."""
        return [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ToolParam(_Model):
    """A tool that the model may call."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: Json
    strict: bool | None = None
    cache_control: Json | None = None


class ToolChoice(_Model):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Metadata(_Model):
    """`metadata` of a request. Who asks is for authentication to say: this only names the session."""

    user_id: SessionName | None = None


class OutputFormat(_Model):
    """The form of a reply."""

    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(_Model):
    """What a reply is to be like."""

    format: OutputFormat | None = None


class Conversation(_Model):
    """The fields of a body that make the prompt: all that counting its tokens takes."""

    model: str
    messages: Annotated[Many[InputMessage], Field(min_length=1)]
    system: Text | Many[TextPart] | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=512)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    cache_control: Json | None = None

    # Ostinato's own.
    reuse_mode: ReuseMode | None = None
    link_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    cache_salt: Name | None = None
    """vLLM's: what is computed is found again under the same salt alone, and by the same caller."""
    end_user: Name | None = None
    """Which of the caller's own users asks: what is computed in the scope of a user or session is that one's."""

    @property
    def mode(self) -> ReuseMode:
        """What is reused of modules."""
        return self.reuse_mode or "modular"

    @property
    def prompt_field(self) -> str:
        """The field that the prompt came in."""
        return "messages"

    def prompt(self) -> Chat | SchemaPrompt:
        """The conversation as a prompt."""
        tools = [tool.for_prompt() for tool in self.tool_use().tools]
        return chat_prompt(self.chat(), tools, cache_control(self.cache_control, "cache_control").level)

    def check(self) -> None:
        """Refuse what is not built, and what does not go together."""
        refuse(self.model_extra or {}, UNSUPPORTED)
        if self.output_config is not None:
            refuse(self.output_config.model_extra or {}, UNSUPPORTED_IN_OUTPUT, "output_config.")
        for at, control in self.controls():
            cache_control(control, at)
        for number, message in enumerate(self.messages):
            self._check(message, f"messages[{number}]")
        if self.messages[-1].role == "assistant":
            at = f"messages[{len(self.messages) - 1}]"
            raise InvalidRequestError(
                f"{at} is the assistant's and the last: to go on with what it began to say is not supported.",
                param=at,
                code="unsupported_parameter",
            )

    def chat(self) -> list[ChatMessage]:
        """The messages in the other dialect, whose forms chat templates know."""
        system = _texts(self.system) if self.system else []
        chat = [ChatMessage(role="system", content=list[Part](system))] if system else []
        for message in self.messages:
            chat += _assistant(message) if message.role == "assistant" else _others(message)
        return chat

    def tool_use(self) -> ToolUse:
        """What the body says of tools."""
        tools: list[Tool] = []
        for number, tool in enumerate(self.tools or ()):
            check_unicode(tool.input_schema)
            field = f"tools[{number}].input_schema"
            described = tool.description or ""
            strict = bool(tool.strict)
            tools.append(Tool(tool.name, described, tool.input_schema, strict, tool.cache_control, field))
        choice = self.tool_choice or ToolChoice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise InvalidRequestError(
                "tool_choice has a name if its type is 'tool', and only then.", param="tool_choice.name"
            )
        kinds: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto"}
        return ToolUse.checked(
            tools,
            kinds.get(choice.type, "required"),
            choice.name,
            parallel=not choice.disable_parallel_tool_use,
        )

    def cached_part(self) -> Conversation | None:
        """The conversation up to its last breakpoint: what the client asks to be cached.

        All of it is the conversation itself; None if there is no breakpoint.
        """
        if self.cache_control is not None:
            return self
        for number in reversed(range(len(self.messages))):
            message = self.messages[number]
            blocks = message.blocks
            for last in reversed(range(len(blocks))):
                if blocks[last].cache_control is not None:
                    if number == len(self.messages) - 1 and last == len(blocks) - 1:
                        return self
                    cut = message.model_copy(update={"content": blocks[: last + 1]})
                    return self.model_copy(update={"messages": [*self.messages[:number], cut]})
        marked = [*(self.system if isinstance(self.system, list) else ()), *(self.tools or ())]
        if all(each.cache_control is None for each in marked):
            return None
        # A template may want a user's turn, though there is none before the breakpoint.
        empty = InputMessage(role="user", content="")
        return self.model_copy(update={"messages": [empty]})

    @property
    def long(self) -> bool:
        """Whether any of it is to be kept for an hour at least."""
        return any((cache_control(control, at).ttl or 0) >= HOUR for at, control in self.controls())

    def controls(self) -> Iterator[tuple[str, Json | None]]:
        """All that the body says of who may reuse what, and in which field."""
        yield "cache_control", self.cache_control
        for number, tool in enumerate(self.tools or ()):
            yield f"tools[{number}].cache_control", tool.cache_control
        for number, part in enumerate(self.system if isinstance(self.system, list) else ()):
            yield f"system[{number}].cache_control", part.cache_control
        for number, message in enumerate(self.messages):
            for at, block in enumerate(message.blocks):
                yield f"messages[{number}].content[{at}].cache_control", block.cache_control

    def _check(self, message: InputMessage, at: str) -> None:
        others = {"assistant": _OF_USER, "user": _OF_ASSISTANT, "system": _OF_USER + _OF_ASSISTANT}
        for number, block in enumerate(message.blocks):
            where = f"{at}.content[{number}]"
            if isinstance(block, others[message.role]):
                raise InvalidRequestError(
                    f"{where} is of type '{block.type}', which a message of role '{message.role}' cannot have.",
                    param=f"{where}.type",
                )
            if isinstance(block, DocumentPart):
                refuse(block.model_extra or {}, UNSUPPORTED_IN_DOCUMENT, f"{where}.")
            if isinstance(block, ToolUseBlock):
                check_unicode(block.input)


class MessagesRequest(Conversation):
    """The body of `POST /v1/messages`."""

    max_tokens: Count
    """0 to have the prompt cached, and no answer."""
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    explain: bool | None = None
    """Whether the answer says what was cached of the prompt, and why the rest was not."""

    @property
    def session(self) -> str:
        """The conversation or agent run that the request belongs to."""
        return (self.metadata.user_id if self.metadata else None) or ""

    @property
    def control(self) -> CacheControl:
        """Who may reuse, and for how long, what nothing in the prompt says more of."""
        return cache_control(self.cache_control, "cache_control")

    def engine_requests(self, calls: Calls) -> list[tuple[Chat | SchemaPrompt, SamplingParams]]:
        """The one engine request."""
        self.check()
        return [(self.prompt(), self.sampling(calls))]

    def sampling(self, calls: Calls) -> SamplingParams:
        """How to sample; `calls` is how the model writes calls of tools."""
        return SamplingParams(
            max_tokens=max(self.max_tokens, 1),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
            grammar=self._grammar(calls),
            markers=calls.markers if self.tools else (),
        )

    def parser(self, calls: Calls) -> ToolCallParser:
        """Finds the calls of tools in a reply."""
        return self.tool_use().parser(calls, self._grammar(calls))

    def _grammar(self, calls: Calls) -> Grammar | None:
        form = self.output_config.format if self.output_config else None
        if form is not None:
            check_unicode(form.schema_)
        tools = self.tool_use()
        if tools.may_call:
            return tools.grammar(calls, form and form.schema_, field=ANSWER_FIELD)
        return None if form is None else json_grammar(form.schema_, ANSWER_FIELD)


def _assistant(message: InputMessage) -> list[ChatMessage]:
    parts: list[Part] = []
    calls: list[ToolCall] = []
    for block in message.blocks:
        match block:
            case TextPart():
                parts.append(block)
            case ThinkingBlock():
                parts.append(ReasoningPart(type="reasoning", text=block.thinking))
            case ToolUseBlock():
                function = Function(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False))
                calls.append(ToolCall(id=block.id, function=function))
            case _:
                pass
    control = _control(block for block in message.blocks if isinstance(block, ToolUseBlock))
    return [ChatMessage(role="assistant", content=parts, tool_calls=calls or None, cache_control=control)]


def _others(message: InputMessage) -> list[ChatMessage]:
    """A user's or a system's message: the answers of tools in it are messages of their own."""
    chat: list[ChatMessage] = []
    parts: list[Part] = []

    def said() -> None:
        if parts:
            chat.append(ChatMessage(role="system" if message.role == "system" else "user", content=[*parts]))
            parts.clear()

    for block in message.blocks:
        if isinstance(block, TextPart | DocumentPart):
            parts.append(block)
        elif isinstance(block, ToolResultBlock):
            said()
            content = [*_failed(block), *_texts(block.content)]
            chat.append(
                ChatMessage(
                    role="tool",
                    tool_call_id=block.tool_use_id,
                    content=list[Part](content),
                    cache_control=block.cache_control,
                )
            )
    said()
    return chat


def _texts(content: str | Sequence[TextPart] | None) -> list[TextPart]:
    return [TextPart(type="text", text=content)] if isinstance(content, str) else list(content or ())


def _failed(block: ToolResultBlock) -> list[TextPart]:
    return [TextPart(type="text", text="Error: ")] if block.is_error else []


def _control(blocks: Iterator[ToolUseBlock]) -> Json | None:
    """Of several calls, which are one message: the last that is given."""
    return next((block.cache_control for block in reversed(list(blocks)) if block.cache_control), None)
