"""Chat messages to tokens, through the model's chat template.

What a template writes may hold special tokens; what a message holds may not: a user who writes `<|im_end|>`
must not end a turn. So the template is rendered with placeholders in place of the contents, which shows
which part of the rendered text came from where, and only the template's own text is read for special tokens.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import jinja2

from ostinato.access.scope import PUBLIC, Level, Scope
from ostinato.errors import InvalidRequestError
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.cache_control import NONE, CacheControl, cache_control, narrowest, shorter
from ostinato.prompt.message import (
    THINK_TAG,
    Message,
    Piece,
    by_thought,
    has_thoughts,
    texts_of,
    without_texts,
)
from ostinato.prompt.span import Span, SpanKind
from ostinato.prompt.template import compiled, to_json
from ostinato.prompt.tools import block, in_turns, reads_tools

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML, for models that bring no chat template (base models, mostly)."""

_KIND_OF_ROLE: dict[str, SpanKind] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_ZERO_WIDTH_SPACE = "\u200b"
_KNOWN_TURNS = 1_000


@dataclass(frozen=True)
class Chat:
    """A conversation with the tools that the model may call, both as in OpenAI's API."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered chat."""

    text: str
    is_template: bool
    """Written by the template, so special tokens' strings in it are those tokens."""
    kind: SpanKind
    level: Level = "user"
    """The widest scope that may reuse it."""
    ttl: float | None = None
    message: int | None = None
    """Number of the message whose content it is of."""
    bare: bool = False
    """Whether nothing that the request says is in it: the template's own beginning of any chat."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    default: Level = "user",
    **template_args: Any,
) -> list[Segment]:
    """The rendered chat in segments; their texts joined are what the template makes of the messages.

    Outside of contents (names, tool calls, tools, `template_args`) special tokens' strings are broken up by
    a zero-width space, since templates format such values freely.

    Args:
        tokenizer: its chat template is used, `DEFAULT_TEMPLATE` if it has none.
        messages: `role` and `content` each, content a string or a list of `{"type": "text"}` parts. What the
            assistant thought before it answered is `<think>…</think>` in its content, or stands beside it: in
            parts of type "reasoning", in `reasoning_content` or in `reasoning`. The template decides what of it
            the model sees again. A message, a part and a tool may have `cache_control`; see `CacheControl`.
        tools: function definitions as in OpenAI's API.
        add_generation_prompt: open the assistant's turn at the end.
        default: the scope of what names none.
        template_args: further variables of the template.
    """
    chat = _Chat(
        tokenizer, messages, tools, {**template_args, "add_generation_prompt": add_generation_prompt}, default
    )
    segments = [part for each in chat.segments() for part in chat.with_tools(each) if part.text]
    return chat.scoped(segments)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    default: Level = "user",
    **template_args: Any,
) -> list[Span]:
    """The spans of a chat, each of one kind and scope; see `render_chat`."""
    segments = render_chat(
        tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        default=default,
        **template_args,
    )
    # No token may hold text of two scopes, and none before a border may depend on what comes after it.
    breaks = {i for i in range(1, len(segments)) if segments[i].level != segments[i - 1].level}
    encoded = tokenizer.encode_parts([(each.text, each.is_template) for each in segments], breaks=breaks)
    spans: list[Span] = []
    for number, (ids, segment) in enumerate(zip(encoded, segments, strict=True)):
        scope: Scope | Level = segment.level
        # What the template writes before anything the request says is everybody's, unless its last token reaches
        # into what follows.
        if number == 0 and segment.bare and ids == tokenizer.encode_parts([(segment.text, True)])[0]:
            scope = PUBLIC
        span = Span(tuple(ids), segment.kind, scope, segment.ttl)
        last = spans[-1] if spans else None
        if last and (last.kind, last.scope, last.ttl) == (span.kind, span.scope, span.ttl):
            spans[-1] = replace(span, token_ids=last.token_ids + span.token_ids)
        elif ids:
            spans.append(span)
    return spans


class TurnTexts:
    """What a chat template writes around the contents of turns, apart from the contents themselves."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}

    def around(self, earlier: Sequence[str], roles: Sequence[str]) -> list[str]:
        """The texts before, between and after the contents of turns of `roles`, which follow `earlier`.

        The last is empty where the template leaves closing a turn to the next one.
        """
        before, after = self._around((*earlier, *roles))
        texts = [*before[len(earlier) :], after]
        if earlier:
            texts[0] = texts[0].removeprefix(self._around(earlier)[1])
        return texts

    def reply(self, roles: Sequence[str]) -> str:
        """The text that opens the assistant's turn after turns of `roles`."""
        texts = self._render(roles, add_generation_prompt=True)
        return texts[-1].removeprefix(self._around(roles)[1]) if texts else ""

    def _around(self, roles: Sequence[str]) -> tuple[tuple[str, ...], str]:
        """What stands before each content, and after the last one."""
        roles = tuple(roles)
        known = self._known.get(roles)
        if known is None:
            if len(self._known) >= _KNOWN_TURNS:
                self._known.clear()
            known = self._known[roles] = self._computed(roles)
        return known

    def _computed(self, roles: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        refused: InvalidRequestError | None = None
        try:
            if texts := self._render(roles):
                return tuple(texts[:-1]), texts[-1]
        except InvalidRequestError as error:
            refused = error
        # Some templates write a system content only once there is a user's turn to hold it.
        try:
            if texts := self._render((*roles, "user")):
                return tuple(texts[: len(roles)]), ""
        except InvalidRequestError as error:
            refused = refused or error
        turns = ", ".join(roles)
        raise refused or InvalidRequestError(
            f"The model's chat template leaves out the content of one of these turns: {turns}.",
            param="messages",
        )

    def _render(self, roles: Sequence[str], *, add_generation_prompt: bool = False) -> list[str] | None:
        """The texts before, between and after the contents; None if the template drops or moves one."""
        marks = _Marks()
        placed = [marks.put("", "text") for _ in roles]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, placed, strict=True)]
        rest = _Chat(
            self._tokenizer, messages, None, {"add_generation_prompt": add_generation_prompt}, "user"
        ).rendered()
        texts: list[str] = []
        for mark in placed:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            texts.append(before)
        return [*texts, rest]


class _Marks:
    """Placeholders for texts. They cannot be guessed, so no content can pass for one."""

    end = "\ue001"

    def __init__(self) -> None:
        self.start = f"\ue000{secrets.token_hex(8)}:"
        self.texts: list[_Marked] = []

    def put(self, text: str, kind: SpanKind, message: int = 0, pieces: Sequence[Piece] = ()) -> str:
        """A placeholder for `text` of a message; `pieces` are what it is made of, if that is known."""
        self.texts.append(_Marked(text, kind, message, pieces or ((text, NONE),)))
        return f"{self.start}{len(self.texts) - 1}{self.end}"


@dataclass(frozen=True)
class _Marked:
    """What a placeholder stands for."""

    text: str
    kind: SpanKind
    message: int
    pieces: Sequence[Piece]

    def cut(self, start: int, length: int) -> Iterator[Piece]:
        """The pieces of a stretch of the text."""
        at = 0
        for text, control in self.pieces:
            inside = text[max(0, start - at) : max(0, start + length - at)]
            if inside:
                yield inside, control
            at += len(text)


class _Chat:
    """One chat, checked, ready to be rendered."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        default: Level,
    ) -> None:
        self._special = tokenizer.special_pattern
        template = tokenizer.chat_template or DEFAULT_TEMPLATE
        self._template = compiled(template)
        if not messages:
            raise InvalidRequestError(
                "messages is empty; a chat needs at least one message.", param="messages"
            )
        self._definitions: list[str] = []
        if not reads_tools(template) and (tools or any(map(_is_of_tools, messages))):
            self._definitions = [part["text"] for part in block(tools or ())]
            messages, tools = in_turns(messages, tools or ()), None
        read = [texts_of(message, index) for index, message in enumerate(messages)]
        self._pieces = [pieces for pieces, _, _ in read]
        self._contents = [
            None if pieces is None else "".join(text for text, _ in pieces) for pieces in self._pieces
        ]
        self._thoughts = [thought for _, thought, _ in read]
        self._controls = [control for _, _, control in read]
        self._tool_controls = [
            cache_control(tool.get("cache_control"), f"tools[{index}].cache_control")
            for index, tool in enumerate(tools or ())
        ]
        self._default: Level = default
        self._messages = [self._without_special(without_texts(message)) for message in messages]
        bare = [
            {name: value for name, value in tool.items() if name != "cache_control"} for tool in tools or ()
        ]
        self.tools = [self._without_special(tool) for tool in bare] or None
        self._arguments: dict[str, Any] = {
            **self._without_special(arguments),
            "tools": self.tools,
            "bos_token": tokenizer.bos_token or "",
            "eos_token": tokenizer.eos_token or "",
        }
        self._kinds: list[SpanKind] = [
            _KIND_OF_ROLE.get(message.get("kind") or cast("str", message["role"]), "user")
            for message in messages
        ]

    def rendered(self) -> str:
        """What the template makes of the chat as it is."""
        return self._render(self._contents, self._thoughts)

    def segments(self) -> list[Segment]:
        rendered = self.rendered()
        marks = _Marks()
        thoughts = [
            thought and marks.put(thought, "reasoning", i, [(thought, self._controls[i])])
            for i, thought in enumerate(self._thoughts)
        ]
        contents = [
            text and marks.put(text, kind, i, self._pieces[i] or ())
            for i, (text, kind) in enumerate(zip(self._contents, self._kinds, strict=True))
        ]
        marked = self._render(contents, thoughts)
        segments = self._aligned(rendered, marked, marks)
        if segments is None and any(map(has_thoughts, self._contents, self._kinds)):
            # The template reads the tags (it drops earlier chains of thought, say), so it has to see them.
            contents = [
                _cut(text, marks, i, self._narrowest(i)) if text and has_thoughts(text, kind) else mark
                for i, (text, kind, mark) in enumerate(
                    zip(self._contents, self._kinds, contents, strict=True)
                )
            ]
            segments = self._aligned(rendered, self._render(contents, thoughts), marks)
        if segments is not None:
            return segments
        # The template treats contents in a way that placeholders do not show (it cuts them, say).
        rendered = self._render(
            [self._without_special(text) for text in self._contents],
            [self._without_special(text) for text in self._thoughts],
        )
        if self._special.findall(rendered) != self._special.findall(marked):
            raise InvalidRequestError(
                "A message's content, as the model's chat template changes it, would hold a special token of "
                "the model. Remove such tokens from the content.",
                param="messages",
            )
        controls = [self._narrowest(i) for i in range(len(self._messages))]
        whole = narrowest([*controls, *self._tool_controls], self._default)
        return [Segment(rendered, True, "text", whole.level or self._default, whole.ttl)]

    def with_tools(self, segment: Segment) -> list[Segment]:
        """Cuts the JSON of tools out of the template's text, in the layouts that templates use.

        Where the template has no place for tools, what is said of them in the system's text.
        """
        if self._definitions and segment.kind == "system":
            return _cut_out(segment, self._definitions)
        if not self.tools or segment.kind != "template":
            return [segment]
        segments: list[Segment] = []
        rest = segment.text
        for tool, control in zip(self.tools, self._tool_controls, strict=True):
            for indent in (None, 4, 2):
                text = to_json(tool, indent=indent)
                before, found, after = rest.partition(text)
                if found:
                    segments += [
                        Segment(before, is_template=True, kind="template"),
                        Segment(text, False, "tools", control.level or self._default, control.ttl),
                    ]
                    rest = after
                    break
        return [*segments, Segment(rest, is_template=True, kind="template")]

    def scoped(self, segments: Sequence[Segment]) -> list[Segment]:
        """The segments with scopes that only narrow, and those of the template's own text.

        That is as wide as what stands before it (at the beginning: behind it), but for what the request says
        outside of contents: names, calls of tools, and definitions of tools that are not found in it.
        """
        cut = sum(segment.kind == "tools" for segment in segments)
        hidden = list(self._tool_controls) if self.tools and cut < len(self.tools) else []
        plain = {"role", "content", "cache_control", "reasoning_content", "reasoning"}
        extra = [not plain.issuperset(message) for message in self._messages]
        # The message that each segment's next content is of; the last one where no content follows.
        following = [len(extra) - 1] * len(segments)
        for number in range(len(segments) - 2, -1, -1):
            message = segments[number + 1].message
            following[number] = following[number + 1] if message is None else message
        made: list[Segment] = []
        said: list[Level] = [each.level for each in segments if each.kind != "template"]
        level = said[0] if said else self._default
        ttl: float | None = None
        before = 0
        for number, segment in enumerate(segments):
            bare = False
            if segment.kind == "template":
                between = range(before, following[number] + 1)
                wanted = [self._controls[i] for i in between if extra[i]] + hidden
                bare = number == 0 and not wanted
            else:
                wanted = [CacheControl(segment.level, segment.ttl)]
                before = before if segment.message is None else segment.message
            found = narrowest([CacheControl(level), *wanted], self._default)
            level, ttl = found.level or self._default, shorter(ttl, found.ttl)
            made.append(replace(segment, level=level, ttl=ttl, bare=bare))
        return made

    def _narrowest(self, message: int) -> CacheControl:
        """What holds for all of a message."""
        pieces = [control for _, control in self._pieces[message] or ()]
        return narrowest([self._controls[message], *pieces], self._default)

    def _aligned(self, rendered: str, marked: str, marks: _Marks) -> list[Segment] | None:
        """`rendered` cut where `marked` has placeholders, or None where the two do not go together."""
        first, *rest = marked.split(marks.start)
        if not rendered.startswith(first):
            return None
        segments = [Segment(first, is_template=True, kind="template")]
        at = len(first)
        for piece in rest:
            number, found, literal = piece.partition(marks.end)
            if not found or not number.isdigit():
                return None
            mark = marks.texts[int(number)]
            whole = mark.text
            # Many templates trim what they are given.
            lines, all_space = whole.strip("\n"), whole.strip()
            trimmed = (whole, lines, whole.lstrip("\n"), all_space, whole.lstrip(), whole.rstrip())
            for text in dict.fromkeys(trimmed):
                if rendered.startswith(text, at) and rendered.startswith(literal, at + len(text)):
                    break
            else:
                return None
            for piece, control in mark.cut(whole.index(text), len(text)):
                segments += [
                    Segment(part, False, kind, control.level or self._default, control.ttl, mark.message)
                    for part, kind in by_thought(piece, mark.kind)
                ]
            segments.append(Segment(literal, is_template=True, kind="template"))
            at += len(text) + len(literal)
        return segments if at == len(rendered) else None

    def _render(self, contents: Sequence[str | None], thoughts: Sequence[str | None]) -> str:
        messages: list[dict[str, Any]] = []
        for message, content, thought in zip(self._messages, contents, thoughts, strict=True):
            # Templates name it in either way, and test whether it is there.
            beside = {} if thought is None else {"reasoning_content": thought, "reasoning": thought}
            messages.append({**message, **({} if content is None else {"content": content}), **beside})
        try:
            return self._template.render(messages=messages, **self._arguments)
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise InvalidRequestError(
                f"The model's chat template does not take these messages: {error}", param="messages"
            ) from error

    def _without_special(self, value: Any) -> Any:
        """A copy, made of plain JSON types, in which no string holds a special token's string."""
        if isinstance(value, str):
            return self._special.sub(lambda match: match[0][0] + _ZERO_WIDTH_SPACE + match[0][1:], value)
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {self._without_special(key): self._without_special(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self._without_special(item) for item in cast("Sequence[Any]", value)]
        if value is None or isinstance(value, bool | int | float):
            return value
        # Templates are code from elsewhere: an object's methods must not come within their reach.
        raise InvalidRequestError(
            f"A chat may hold JSON values only, not {type(value).__name__}.", param="messages"
        )


def _is_of_tools(message: object) -> bool:
    if not isinstance(message, Mapping):
        return False
    fields = cast("Message", message)
    return bool(fields.get("tool_calls")) or fields.get("role") in ("tool", "function")


def _cut_out(segment: Segment, definitions: Sequence[str]) -> list[Segment]:
    """A system's text in its own part and the definitions of tools at its end."""
    segments: list[Segment] = []
    rest = segment.text
    for text in definitions:
        before, found, after = rest.partition(text)
        if found:
            segments += [replace(segment, text=before), replace(segment, text=text, kind="tools")]
            rest = after
    return [*segments, replace(segment, text=rest)]


def _cut(content: str, marks: _Marks, message: int, control: CacheControl) -> str:
    """An assistant's content with placeholders between the tags of its chain of thought, which stay."""
    return "".join(
        marks.put(text, kind, message, [(text, control)])
        if text.strip() and not THINK_TAG.fullmatch(text)
        else text
        for piece, kind in by_thought(content, "assistant")
        for text in THINK_TAG.split(piece)
    )
