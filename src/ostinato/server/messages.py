"""Chat messages as clients send them: their content, and what becomes of it in a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ostinato.errors import InvalidRequestError
from ostinato.prompt.schema import Document, Documents, Item, Turn

Json = dict[str, Any]
Unsupported = Mapping[str, tuple[object, ...]]

UNSUPPORTED_IN_MESSAGE: Unsupported = {
    "tool_calls": ([],),
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


class ReasoningPart(BaseModel):
    """What the assistant thought before it answered, in the content of its message."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["reasoning"]
    text: Text | None = None
    reasoning: Text | None = None
    """Another name for `text`."""


class DocumentSource(BaseModel):
    """The text of a document. The models here read no other kind."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["text"]
    media_type: Literal["text/plain"] = "text/plain"
    data: Text


class DocumentPart(BaseModel):
    """A document in a message's content, in the form of Anthropic's API."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["document"]
    source: DocumentSource
    title: Text | None = None


Part = Annotated[TextPart | ReasoningPart | DocumentPart, Field(discriminator="type")]


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[Part] | None = None
    name: Text | None = None

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
        if self.content is None:
            raise InvalidRequestError(f"{at} has no content.", param=f"{at}.content")
        if self.role != "assistant" and any(isinstance(part, ReasoningPart) for part in self.parts):
            raise InvalidRequestError(
                f"{at} has reasoning in its content; only an assistant's may.", param=f"{at}.content"
            )
        for document in self.documents:
            refuse(document.model_extra or {}, UNSUPPORTED_IN_DOCUMENT, f"{at}.content.")

    def for_template(self) -> Json:
        """The message as chat templates take it: `developer` goes by its older name, which they know."""
        fields = {"content", "name", "reasoning_content", "reasoning"}
        message = self.model_dump(include=fields, exclude_none=True)
        return message | {"role": self._role}

    def turn(self) -> Turn:
        """Its text as a turn of a prompt over a schema or over documents. What was thought beside it is left out."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.text for part in self.parts if isinstance(part, TextPart))
        return Turn(self._role, content)

    @property
    def _role(self) -> Literal["system", "user", "assistant"]:
        return "system" if self.role == "developer" else self.role


def items(messages: Sequence[ChatMessage]) -> tuple[Item, ...]:
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
    turns = [message.turn() for message in messages]
    documents = tuple(
        Document(part.source.data, part.title or "") for message in messages for part in message.documents
    )
    if not documents:
        return tuple(turns)
    leading = 1 if turns[0].role == "system" else 0
    return (*turns[:leading], Documents(documents), *turns[leading:])
