"""Calls of tools in replies: what is one, what is text, and that it does not matter how the text comes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ostinato.server.tools import Arguments, CallBegins, Event, Said, ToolCallParser

NAMES = frozenset(("weather", "find"))


def merged(events: list[Event]) -> list[Event]:
    """Adjacent pieces as one."""
    made: list[Event] = []
    for event in events:
        match (made[-1] if made else None, event):
            case (Said(before), Said(text)):
                made[-1] = Said(before + text)
            case (Arguments(before), Arguments(text)):
                made[-1] = Arguments(before + text)
            case _:
                made.append(event)
    return made


def read(pieces: list[str], live: str | None = None) -> list[Event]:
    parser = ToolCallParser(NAMES, live=live)
    events = [event for piece in pieces for event in parser.add(piece)]
    return merged(events + parser.finish())


def call(name: str = "weather", **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


ROME = call(city="Rome")
CALLED = [CallBegins("weather"), Arguments('{"city": "Rome"}')]
CASES: dict[str, tuple[str, list[Event]]] = {
    "text": ("Hello, <world>\n", [Said("Hello, <world>\n")]),
    "hermes": (f"<tool_call>\n{ROME}\n</tool_call>", CALLED),
    "hermes in text": (f"So:\n<tool_call>{ROME}</tool_call>\nDone", [Said("So:"), *CALLED, Said("Done")]),
    "hermes twice": (f"<tool_call>\n{ROME}\n</tool_call>\n<tool_call>\n{ROME}\n</tool_call>", CALLED * 2),
    "hermes unclosed": (f"<tool_call>\n{ROME}", CALLED),
    "llama": ('{"name": "weather", "parameters": {"city": "Rome"}}', CALLED),
    "llama twice": (ROME + "; " + ROME, CALLED * 2),
    "llama lines": (ROME + "\n" + ROME, CALLED * 2),
    "llama tag": ("<|python_tag|>" + ROME, CALLED),
    "mistral": (f"[TOOL_CALLS] [{ROME}, {ROME}]", CALLED * 2),
    "function inside": (json.dumps({"type": "function", "function": json.loads(ROME)}), CALLED),
    "arguments as text": (json.dumps({"name": "weather", "arguments": '{"city": "Rome"}'}), CALLED),
    "no arguments": ('{"name": "find"}', [CallBegins("find"), Arguments("{}")]),
    "braces in strings": (
        call(city='}{"]'),
        [CallBegins("weather"), Arguments(json.dumps({"city": '}{"]'}))],
    ),
    "json, no call": ('{"city": "Rome"}', [Said('{"city": "Rome"}')]),
    "unknown tool": (f"<tool_call>{call('rm')}</tool_call>", [Said(f"<tool_call>{call('rm')}</tool_call>")]),
    "one unknown of two": (f"[{ROME}, {call('rm')}]", [Said(f"[{ROME}, {call('rm')}]")]),
    "malformed": (
        "<tool_call>\n{'name': 1}\n</tool_call> x",
        [Said("<tool_call>\n{'name': 1}\n</tool_call> x")],
    ),
    "cut": ('  <tool_call>\n{"name": "weather", "argu', [Said('  <tool_call>\n{"name": "weather", "argu')]),
    "call after malformed": (
        f"<tool_call> no <tool_call>{ROME}</tool_call>",
        [Said("<tool_call> no"), *CALLED],
    ),
    "later json is text": (f"See {ROME}", [Said(f"See {ROME}")]),
    "nan": ('{"name": "find", "arguments": {"a": NaN}}', [Said('{"name": "find", "arguments": {"a": NaN}}')]),
    "surrogate": (
        '{"name": "find", "arguments": {"a": "\\ud800"}}',
        [CallBegins("find"), Arguments('{"a": "\\ud800"}')],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_a_call(case: str) -> None:
    text, events = CASES[case]
    assert read([text]) == events
    assert read(list(text)) == events


TEXTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "[", "]", "{", "}", ",", ";", "\n",
             " ", '"', "\\", ROME, call("find"), call("rm"), ROME[:20], '{"name": "find", "arguments": {', "<tool"]
        ),
        st.text(max_size=6),
    ),
    max_size=10,
).map("".join)  # fmt: skip


@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    live=st.sampled_from([None, "", "<tool_call>"]),
)
@example(text=f"{ROME} ;{{", cuts=[len(ROME) + 2], live=None)
@settings(max_examples=1500, deadline=None)
def test_cuts_change_nothing(text: str, cuts: list[int], live: str | None) -> None:
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(at)]
    whole = read([text], live)
    assert read(pieces, live) == whole
    assert read(list(text), live) == whole
    if not any(isinstance(event, CallBegins) for event in whole):
        assert whole == ([Said(text)] if text else [])


@given(text=TEXTS)
@settings(max_examples=500, deadline=None)
def test_complete_calls_are_json(text: str) -> None:
    for event in read([text]):
        if isinstance(event, Arguments):
            assert isinstance(json.loads(event.json), dict)


def test_arguments_stream_where_a_grammar_keeps_them_well_formed() -> None:
    parser = ToolCallParser(NAMES, live="<tool_call>")
    assert parser.add('Well <tool_call>\n{"name": "find", "arguments": ') == [Said("Well")]
    assert parser.add('{"what": "a') == [CallBegins("find"), Arguments('{"what": "a')]
    assert parser.add('b"}') == [Arguments('b"}')]
    assert parser.add("}\n</tool") == []
    assert parser.add("_call>") + parser.finish() == []
    bare = ToolCallParser(NAMES, live="<tool_call>")
    assert bare.add('{"name": "find", "arguments": {"what": "ab') + bare.add("}") == []
    held = ToolCallParser(NAMES)
    assert held.add('<tool_call>\n{"name": "find", "arguments": {"what": "ab"}') == []
    assert held.add("}") == [CallBegins("find"), Arguments('{"what": "ab"}')]


def test_text_is_held_back_no_longer_than_needed() -> None:
    parser = ToolCallParser(NAMES)
    assert parser.add("One two ") == [Said("One two")]
    assert parser.add("three <to") == [Said(" three")]
    assert parser.add("e> four") == [Said(" <toe> four")]


def test_without_tools_everything_is_text() -> None:
    parser = ToolCallParser(frozenset())
    assert parser.add(ROME) == [Said(ROME)]
    assert parser.finish() == []
