"""Calls of tools: what a request says of them, the grammar that follows from it, and calls found in a reply."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ostinato.engine.grammar import Grammar, json_options
from ostinato.errors import InvalidRequestError
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.tools import HERMES, CallFormat, call_format

Json = dict[str, Any]

TAGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What announces a call, whatever the model. Without a tag, JSON at the beginning of a reply may be a call."""
CLOSING = "</tool_call>"

_HEADER = re.compile(
    r'\{\s*"name"\s*:\s*("(?:[^"\\\n]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL
)


@dataclass(frozen=True)
class Calls:
    """How a model writes calls of tools."""

    form: CallFormat
    tag_id: int | None
    """The tag of `form`, where that is a special token."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Calls:
        """How the model of a tokenizer does."""
        form = call_format(tokenizer.chat_template)
        tag_id = tokenizer.token_id(form.tag) if form.tag else None
        return cls(form, tag_id if tag_id in tokenizer.special_ids else None)

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens that are to stay in the text of a reply."""
        return () if self.tag_id is None else (self.form.tag,)


@dataclass(frozen=True)
class Tool:
    """A tool that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """A JSON schema of the arguments."""
    strict: bool = False
    """Whether arguments are always valid by the schema."""
    cache_control: Any = None
    field: str = "tools"
    """The field of the request that holds the schema."""

    def for_prompt(self) -> Json:
        """In OpenAI's form, as chat templates take it."""
        schema = self.parameters or {"type": "object", "properties": {}}
        described = {"description": self.description} if self.description else {}
        function = {"name": self.name, **described, "parameters": dict(schema)}
        made: Json = {"type": "function", "function": function}
        return made if self.cache_control is None else made | {"cache_control": self.cache_control}


@dataclass(frozen=True)
class ToolUse:
    """What a request says of tools."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """The one tool that must be called."""
    parallel: bool = True
    """Whether there may be several calls in one reply."""

    @classmethod
    def checked(
        cls,
        tools: Sequence[Tool],
        choice: Literal["none", "auto", "required"],
        name: str | None,
        *,
        parallel: bool,
    ) -> ToolUse:
        """As given, if it goes together."""
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidRequestError(f"tools has {twice!r} twice.", param="tools", code="invalid_value")
        if name is not None and name not in names:
            raise InvalidRequestError(
                f"tool_choice names {name!r}, which is not in tools.",
                param="tool_choice",
                code="invalid_value",
            )
        if choice == "required" and not tools:
            raise InvalidRequestError(
                "tool_choice asks for a call, but there are no tools.",
                param="tool_choice",
                code="invalid_value",
            )
        return cls(tuple(tools), choice, name, parallel)

    @property
    def may_call(self) -> bool:
        return bool(self.tools) and self.choice != "none"

    def grammar(
        self,
        calls: Calls,
        answer: Mapping[str, Any] | None = None,
        *,
        field: str = "response_format",
        lenient: bool = False,
    ) -> Grammar | None:
        """What a reply that may call is held to; None if it is free.

        Args:
            calls: how the model writes calls.
            answer: the JSON schema of a reply that is no call, of the request's field `field`.
            lenient: leave out what is not supported of that schema.
        """
        form, tag_id = calls.form, calls.tag_id
        forced = self.choice == "required"
        named = [tool for tool in self.tools if self.name in (None, tool.name)]
        rules = [_rule(number, tool, form, forced=forced) for number, tool in enumerate(named)]
        rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(named))))
        several = f"({_text(form.between)} call)*" if self.parallel and self.name is None else ""
        rules.append(f"calls: call {several}")
        tag = _text(form.tag) if tag_id is None else f"<[{tag_id}]>"
        whole = f"{tag} {_text(form.begin)} calls {_text(form.end)}"
        if answer is not None and not forced:
            schema = json.dumps(json_options(answer, lenient=lenient))
            return _grammar(f"start: answer | {whole}", f"answer: %json {schema}", *rules, field=field)
        field = next((tool.field for tool in named if tool.strict or forced), "tools")
        if forced:
            return _grammar(f"start: {whole}", *rules, field=field)
        if form is HERMES:  # each call has its own tag; the line breaks within are often left out
            return _grammar(
                'start: "\\n"? call "\\n"? "</tool_call>"',
                *rules,
                field=field,
                trigger=form.tag,
                once=not self.parallel,
            )
        if form.tag:
            start = f"start: {_text(form.begin)} calls {_text(form.end)}"
            return _grammar(start, *rules, field=field, trigger=form.tag, once=True)
        if self.parallel and not any(tool.strict for tool in self.tools):
            return None
        # Nothing announces a call, so the whole reply is either calls or text.
        return _grammar(f"start: text | {whole}", r"text: /([^{\[\s](.|\n)*)?/", *rules, field=field)

    def parser(self, calls: Calls, grammar: Grammar | None) -> ToolCallParser:
        """Reads a reply that is held to `grammar`."""
        names = frozenset(tool.name for tool in self.tools) if self.may_call else frozenset[str]()
        return ToolCallParser(names, live=None if grammar is None else calls.form.tag)


def _grammar(*rules: str, field: str, trigger: str = "", once: bool = False) -> Grammar:
    return Grammar("\n".join(("%llguidance {}", *rules)), field, trigger, once)


def _text(text: str) -> str:
    return json.dumps(text) if text else ""


def _rule(number: int, tool: Tool, form: CallFormat, *, forced: bool) -> str:
    before, _, after = form.call(tool.name, "\0").partition("\0")
    if tool.strict or forced:
        schema = json_options(tool.parameters or {"type": "object"}, lenient=not tool.strict)
    else:
        schema = json_options({"type": "object"})
    return f"call_{number}: {_text(before)} args_{number} {_text(after)}\nargs_{number}: %json {json.dumps(schema)}"


# -- reading calls ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Said:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallBegins:
    """A tool is called; its arguments follow."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """A piece of the JSON of a call's arguments."""

    json: str


Event = Said | CallBegins | Arguments


class ToolCallParser:
    """Finds calls in a reply as it comes. How the text is cut into pieces changes nothing but the cuts.

    Text that may turn out to be a call is held back, and given as text if it does not.

    Args:
        names: of the tools. What calls another one is text.
        live: the tag whose calls a grammar keeps well-formed ("" for calls without one). Their arguments are given
            as they come, and those of others once they are complete and known to be JSON.
    """

    def __init__(self, names: frozenset[str], *, live: str | None = None) -> None:
        self._names = names
        self._live = live
        self._held = ""
        self._state: _Between | _Inside = _Between()
        self._events: list[Event] = []
        self.calls = 0
        """How many calls have begun."""

    def add(self, text: str) -> list[Event]:
        """Take more text; what is certain now."""
        if not self._names:
            return [Said(text)] if text else []
        self._held += text
        return self._read(final=False)

    def finish(self) -> list[Event]:
        """What was held back, once nothing more will come."""
        return self._read(final=True)

    def _read(self, *, final: bool) -> list[Event]:
        self._events = []
        going_on = True
        while going_on:
            state = self._state
            going_on = (
                self._between(state, final) if isinstance(state, _Between) else self._inside(state, final)
            )
        return self._events

    def _between(self, state: _Between, final: bool) -> bool:
        """Look for the next call; whether there is more to do with what is held."""
        held = self._held
        text = held.lstrip()
        if state.after_call:
            # White space and the closing tag belong to the call.
            if text.startswith(CLOSING):
                self._held, self._state = text[len(CLOSING) :], _Between(first=False, after_call=True)
                return True
            if not final and (not text or CLOSING.startswith(text)):
                return False
            if state.bare and text[:1] in (";", ","):
                following = text[1:].lstrip()
                if following[:1] == "{":
                    self._state = _Inside(text[: len(text) - len(following)], "")
                    self._held = following
                    return True
                if not following and not final:
                    return False
            self._held, self._state = text, _Between(first=False, bare=state.bare)
            return True
        if (state.first or state.bare) and text[:1] and text[0] in "{[" and not text.startswith(TAGS[1]):
            if text[0] == "[" and not final and TAGS[1].startswith(text):
                return False
            self._state = _Inside(held[: len(held) - len(text)], "")
            self._held = text
            return True
        found = [(at, tag) for tag in TAGS if (at := held.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            before = held[:at].rstrip()
            self._say(before)
            self._state = _Inside(held[len(before) : at] + tag, tag)
            self._held = held[at + len(tag) :]
            return True
        shown = len(held) if final else _certain(held)
        if shown:
            self._say(held[:shown])
            self._held = held[shown:]
            if held[:shown].strip():
                self._state = _Between(first=False)
        return False

    def _inside(self, state: _Inside, final: bool) -> bool:
        """Read a call; whether there is more to do with what is held."""
        held = self._held
        if state.start is None:
            text = held.lstrip()
            if not text and not final:
                return False
            if text[:1] not in ("{", "["):
                return self._reject(state)
            state.start = state.value.at = len(held) - len(text)
        end = state.value.end(held)
        if self._live == state.tag and state.begun is None and (header := _HEADER.match(held, state.start)):
            name = _loads(header[1])
            if isinstance(name, str) and name in self._names:
                self._begin(name)
                state.begun = _End(header.end())
        if state.begun is not None:
            already = state.given or state.begun.first
            until = state.begun.end(held)
            upto = len(held) if until is None else until
            if upto > already:
                self._events.append(Arguments(held[already:upto]))
            state.given = max(upto, already)
        if end is None:
            if final and state.begun is None:
                return self._reject(state)
            return False
        if state.begun is None:
            calls = self._calls(held[state.start : end])
            if not calls:
                return self._reject(state)
            for name, arguments in calls:
                self._begin(name)
                self._events.append(Arguments(arguments))
        self._held = held[end:]
        self._state = _Between(after_call=True, bare=not state.tag, first=False)
        return True

    def _reject(self, state: _Inside) -> bool:
        """It is no call: its beginning is text, and what follows is read anew."""
        if state.tag:
            self._say(state.before)
        else:
            self._say(state.before + self._held[:1])
            self._held = self._held[1:]
        self._state = _Between(first=False)
        return True

    def _begin(self, name: str) -> None:
        self.calls += 1
        self._events.append(CallBegins(name))

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Said(text))

    def _calls(self, value: str) -> list[tuple[str, str]]:
        """The calls that a JSON value makes; none if anything in it is not a call of a known tool."""
        read = _loads(value)
        items = cast("list[Any]", read) if isinstance(read, list) else [read]
        calls: list[tuple[str, str]] = []
        for item in items:
            if not isinstance(item, dict):
                return []
            fields = cast("Json", item)
            function = fields.get("function")
            fields = cast("Json", function) if isinstance(function, dict) else fields
            name = fields.get("name")
            arguments = fields.get("arguments", fields.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = _loads(arguments)
            if name not in self._names or not isinstance(arguments, dict):
                return []
            calls.append((cast("str", name), _dumps(arguments)))
        return calls


@dataclass
class _Between:
    """Outside of calls."""

    first: bool = True
    """Nothing has been said yet."""
    after_call: bool = False
    bare: bool = False
    """The calls have no tags."""


class _Inside:
    """In what may be a call."""

    def __init__(self, before: str, tag: str) -> None:
        self.before = before
        """What stood before it, the tag included, which is text if this is no call."""
        self.tag = tag
        self.start: int | None = None
        self.value = _End(0)
        self.begun: _End | None = None
        """The arguments, once they are being given."""
        self.given = 0


class _End:
    """Finds where a JSON object or array ends, reading each character once."""

    def __init__(self, at: int) -> None:
        self.first = self.at = at
        self._depth = 0
        self._in_string = self._escaped = False
        self._found: int | None = None

    def end(self, text: str) -> int | None:
        """The place behind its end; None while there is none."""
        while self._found is None and self.at < len(text):
            char = text[self.at]
            self.at += 1
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._found = self.at
        return self._found


def _certain(text: str) -> int:
    """How much of a text is no beginning of a call, nor white space before one."""
    keep = max(
        (length for tag in TAGS for length in range(1, len(tag)) if text.endswith(tag[:length])), default=0
    )
    return len(text[: len(text) - keep].rstrip())


def _loads(text: str) -> Any:
    """The JSON value; None if it is none."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None


def _dumps(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can write
        return json.dumps(value)
    return text
