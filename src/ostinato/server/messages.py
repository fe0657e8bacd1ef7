"""Chat messages as clients send them: their content, and what becomes of it in a prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ostinato.access.scope import Level
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import CacheControl, cache_control, narrowest, shorter
from ostinato.prompt.chat import Chat
from ostinato.prompt.schema import Document, Documents, Item, SchemaPrompt, Turn
from ostinato.prompt.tools import in_turns, parts_of

T = TypeVar("T")
Json = dict[str, Any]
Unsupported = Mapping[str, tuple[object, ...]]

UNSUPPORTED_IN_MESSAGE: Unsupported = {
    "function_call": (),
    "audio": (),
    "prefix": (False,),
}
UNSUPPORTED_IN_DOCUMENT: Unsupported = {"citations": ({"enabled": False},), "context": ("",)}


def unicode(text: str) -> str:
    """The text, unless it holds half a surrogate pair."""
    # JSON can escape half a surrogate pair; no tokenizer can encode it.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("unicode", "Input has a lone surrogate, not valid Unicode") from None
    return text


Text = Annotated[str, AfterValidator(unicode)]

MAX_ITEMS = 4096
Many = Annotated[list[T], Field(fail_fast=True, max_length=MAX_ITEMS)]
"""A list of so many items at most, of which the first wrong one is told and no other looked at: whoever sends a million
of them is not to have a million errors found."""

MAX_NAME = 512
Name = Annotated[Text, Field(min_length=1, max_length=MAX_NAME)]
"""What a client calls a user of its own, or salts with."""


def check_unicode(value: object) -> None:
    """Refuse JSON with half a surrogate pair in any of its strings."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(
            "The body has a lone surrogate, not valid Unicode.", code="invalid_value"
        ) from None


def refuse(fields: Mapping[str, object], unsupported: Unsupported, at: str = "") -> None:
    """Raise if a field asks for something that is not built."""
    for name, neutral in unsupported.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise InvalidRequestError(
                f"{at}{name} is not supported by this server.",
                param=f"{at}{name}",
                code="unsupported_parameter",
            )


class TextPart(BaseModel):
    """A text in a message's content."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    text: Text
    cache_control: Json | None = None


class ReasoningPart(BaseModel):
    """What the assistant thought before it answered, in the content of its message."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["reasoning"]
    text: Text | None = None
    reasoning: Text | None = None
    """Another name for `text`."""
    cache_control: Json | None = None


class TextSource(BaseModel):
    """The text of a document. The models here read no other kind."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class FileSource(BaseModel):
    """A document that is registered with the server."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["file"]
    file_id: Annotated[Text, Field(min_length=1, max_length=256)]


class DocumentPart(BaseModel):
    """A document in a message's content, in the form of Anthropic's API."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["document"]
    source: Annotated[TextSource | FileSource, Field(discriminator="type")]
    title: Text | None = None
    cache_control: Json | None = None

    @property
    def document(self) -> Document:
        """The document for a prompt; one that is registered has its text yet to be looked up."""
        control, title = cache_control(self.cache_control, "cache_control"), self.title or ""
        if isinstance(self.source, FileSource):
            return Document("", title, control, file_id=self.source.file_id)
        return Document(self.source.data, title, control)


class Function(BaseModel):
    """What is called, and with what."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: Text
    arguments: Text = ""


class ToolCall(BaseModel):
    """A call of a tool, as the assistant made it."""

    model_config = ConfigDict(strict=True, extra="allow")
    id: Text
    type: Literal["function"] = "function"
    function: Function

    def for_template(self) -> Json:
        """Chat templates write arguments as JSON themselves, so they get what the JSON says."""
        arguments: Any = self.function.arguments
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


Part = Annotated[TextPart | ReasoningPart | DocumentPart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Many[Part] | None = None
    name: Text | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: Text | None = None
    cache_control: Json | None = None

    # Not OpenAI's: vLLM's names for what the assistant thought before it answered.
    reasoning_content: Text | None = None
    reasoning: Text | None = None

    @property
    def parts(self) -> list[Part]:
        """The parts of its content; none where that is a string."""
        return self.content if isinstance(self.content, list) else []

    @property
    def documents(self) -> list[DocumentPart]:
        """The documents in its content."""
        return [part for part in self.parts if isinstance(part, DocumentPart)]

    def check(self, at: str) -> None:
        """Refuse what is missing or not built; `at` names the message."""
        refuse(self.model_extra or {}, UNSUPPORTED_IN_MESSAGE, f"{at}.")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError(
                f"{at} has tool_calls; only an assistant's may.", param=f"{at}.tool_calls"
            )
        if self.role == "tool" and self.tool_call_id is None:
            raise InvalidRequestError(
                f"{at} needs tool_call_id: which call it answers.", param=f"{at}.tool_call_id"
            )
        cache_control(self.cache_control, f"{at}.cache_control")
        for number, part in enumerate(self.parts):
            cache_control(part.cache_control, f"{at}.content[{number}].cache_control")
        if self.content is None and not self.tool_calls:
            raise InvalidRequestError(f"{at} has no content.", param=f"{at}.content")
        if self.role != "assistant" and any(isinstance(part, ReasoningPart) for part in self.parts):
            raise InvalidRequestError(
                f"{at} has reasoning in its content; only an assistant's may.", param=f"{at}.content"
            )
        for document in self.documents:
            refuse(document.model_extra or {}, UNSUPPORTED_IN_DOCUMENT, f"{at}.content.")

    def for_template(self) -> Json:
        """The message as chat templates take it: `developer` goes by its older name, which they know."""
        fields = {"content", "name", "tool_call_id", "cache_control", "reasoning_content", "reasoning"}
        message = self.model_dump(include=fields, exclude_none=True)
        calls = [call.for_template() for call in self.tool_calls or ()]
        return message | {"role": self._role} | ({"tool_calls": calls} if calls else {})

    def as_text(self) -> Json:
        """Its text and calls alone, for a turn of a prompt over a schema or over documents."""
        message = self.for_template()
        if isinstance(self.content, list):
            message["content"] = [part for part in message["content"] if part["type"] == "text"]
        return message

    @property
    def _role(self) -> Literal["system", "user", "assistant", "tool"]:
        return "system" if self.role == "developer" else self.role


def chat_prompt(
    messages: Sequence[ChatMessage], tools: Sequence[Json] = (), default: Level | None = None
) -> Chat | SchemaPrompt:
    """Messages as a prompt; `default` is the scope of what names none."""
    if any(message.documents for message in messages):
        return SchemaPrompt(None, items(messages, tools, default))
    return Chat([message.for_template() for message in messages], tools)


def items(
    messages: Sequence[ChatMessage], tools: Sequence[Json] = (), default: Level | None = None
) -> tuple[Item, ...]:
    """Messages as what a prompt goes on with: their documents, behind a leading system turn, and turns.

    The documents of all messages stand together, before the conversation about them: there they are found
    cached whatever is asked, and in which turn.
    """
    for index, message in enumerate(messages):
        if message.name is not None:
            raise InvalidRequestError(
                f"messages[{index}].name is not supported together with pml or documents.",
                param=f"messages[{index}].name",
                code="unsupported_parameter",
            )
    texts = [message.as_text() for message in messages]
    turns = [_turn(message, default or "user") for message in in_turns(texts, tools)]
    documents = tuple(part.document for message in messages for part in message.documents)
    if not documents:
        return tuple(turns)
    leading = 1 if turns[0].role == "system" else 0
    return (*turns[:leading], Documents(documents), *turns[leading:])


def _turn(message: Mapping[str, Any], default: Level) -> Turn:
    """A message as a turn. It has one scope, the narrowest of its parts, and the shortest of their lives."""
    parts = parts_of(message)
    whole = cache_control(message.get("cache_control"), "")
    controls = [cache_control(part.get("cache_control"), "") for part in parts]
    named = [CacheControl(each.level or whole.level, each.ttl) for each in controls]
    found = narrowest(named, default)
    level = found.level if any(each.level for each in named) else None
    control = CacheControl(level, shorter(found.ttl, whole.ttl))
    return Turn(message["role"], "".join(part["text"] for part in parts), control=control)
