"""Tools in a chat: how the models of a template write a call, and tools for templates that know of none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from ostinato.prompt.message import Message


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls of tools: each is a JSON object, with something around it."""

    tag: str
    """What announces calls; nothing does if it is empty. In some vocabularies it is a special token."""
    begin: str
    """What stands between the tag and the first call."""
    between: str
    end: str
    arguments: str = "arguments"
    """The name under which the arguments stand, next to `name`."""

    def call(self, name: str, arguments: str) -> str:
        """The JSON object of one call; `arguments` are JSON."""
        return f'{{"name": {json.dumps(name)}, "{self.arguments}": {arguments}}}'


HERMES = CallFormat("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
LLAMA = CallFormat("", "", "; ", "", arguments="parameters")
MISTRAL = CallFormat("[TOOL_CALLS]", " [", ", ", "]")

_INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>"""
_INSTRUCTION = """
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


def reads_tools(template: str) -> bool:
    """Whether a chat template has a place for tools. Many leave them out without a word."""
    return re.search(r"\btools\b", template) is not None


def call_format(template: str | None) -> CallFormat:
    """How the models of a chat template write calls. Where it does not say, as they are told by `in_turns`."""
    if template is None or not reads_tools(template) or "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    return LLAMA if '"parameters"' in template else HERMES


def block(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Definitions of tools as parts of a system content; each has the `cache_control` of its tool."""
    if not tools:
        return []
    parts: list[dict[str, Any]] = [_part(_INTRODUCTION, tools[0])]
    for tool in tools:
        definition = {key: value for key, value in tool.items() if key != "cache_control"}
        parts.append(_part("\n" + json.dumps(definition, ensure_ascii=False), tool))
    return [*parts, _part(_INSTRUCTION, tools[-1])]


def in_turns(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """A chat for a template that has no place for tools: definitions stand at the end of the system's text,
    calls in the assistant's, results in turns of the user. Those have `"kind": "tool"`.
    """
    turned: list[Message] = []
    for message in messages:
        result = _result(message)
        last = turned[-1] if turned else None
        if result is None:
            turned.append(_with_calls(message))
        elif last is not None and last.get("kind") == "tool":
            # Templates want the turns of user and assistant to alternate.
            turned[-1] = {**last, "content": [*last["content"], _part("\n"), *result]}
        else:
            turned.append({"role": "user", "kind": "tool", "content": result})
    added = block(tools)
    if not added:
        return turned
    if not turned or turned[0].get("role") not in ("system", "developer"):
        return [{"role": "system", "content": added}, *turned]
    own = _parts_in(turned[0])
    return [{**turned[0], "content": [*own, _part("\n\n", own[-1]), *added] if own else added}, *turned[1:]]


def parts_of(message: Message) -> list[Any]:
    """A message's content as parts."""
    content = message.get("content")
    if isinstance(content, list):
        return list(cast("list[Any]", content))
    return [_part(content)] if content else []


def _result(message: Message) -> list[Any] | None:
    """The output of a tool, in the tags that models know from their training; None for other messages."""
    if message.get("role") not in ("tool", "function"):
        return None
    return [_part("<tool_response>\n", message), *_parts_in(message), _part("\n</tool_response>", message)]


def _with_calls(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls or not isinstance(calls, list):
        return message
    written: list[str] = []
    for call in cast("list[Any]", calls):
        function = call.get("function", {})
        arguments = function.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        written.append(HERMES.call(function.get("name", ""), arguments))
    text = HERMES.tag + HERMES.begin + HERMES.between.join(written) + HERMES.end
    own = _parts_in(message)
    bare = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**bare, "content": [*own, _part("\n" + text if own else text, message)]}


def _parts_in(message: Message) -> list[Any]:
    """Its parts, each with the `cache_control` of the message if it has none of its own."""
    control = message.get("cache_control")
    if control is None:
        return parts_of(message)
    return [{"cache_control": control, **part} for part in parts_of(message)]


def _part(text: Any, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    control = None if like is None else like.get("cache_control")
    return {"type": "text", "text": text} | ({} if control is None else {"cache_control": control})
