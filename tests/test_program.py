"""Prompt programs: Python functions as schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest

from ostinato.prompt.program import PromptProgram, assistant, prompt_program, system, user
from ostinato.prompt.schema import Import, Module, Parameter, Role, Schema, SchemaError, Text, Union, use

LIMIT = 2


@prompt_program
def guide(style: Annotated[str, 8], verbose: bool = False):
    """Documentation, which is no text of the prompt."""
    f"The guide is {style}."
    if verbose:
        "He says much."


@prompt_program
def trip(days: Annotated[int, 4], city: Literal["rome", "paris", "oslo"], children: int = 0):
    with system:
        "You plan trips."
    f"""
    The trip takes {days} days.
      That is {days}
    """
    if children > LIMIT:
        "Many children come along."
    elif children:
        f"Some children come along for {days} days."
    else:
        guide("strict", verbose=city == "rome")
    match city:
        case "rome":
            "Rome."
        case "paris" | "oslo":
            "The north."
        case _:
            pass
    guide(style=city)


def test_the_schema() -> None:
    inner = (
        Text("The guide is "),
        Parameter("style", 8),
        Text(".\n"),
        Module("verbose", (Text("He says much.\n"),)),
    )
    assert trip.schema == Schema(
        "trip",
        (
            Role("system", (Text("You plan trips."),)),
            Text("The trip takes "),
            Parameter("days", 4),
            Text(" days.\n  That is "),
            Parameter("days-2", 4),
            Text("\n"),
            Union(
                (
                    Module("children-LIMIT", (Text("Many children come along.\n"),)),
                    Module(
                        "children",
                        (Text("Some children come along for "), Parameter("days", 4), Text(" days.\n")),
                    ),
                    Module("else", (Module("guide", inner),)),
                )
            ),
            Union(
                (
                    Module("rome", (Text("Rome.\n"),)),
                    Module("paris-or-oslo", (Text("The north.\n"),)),
                    Module("otherwise"),
                )
            ),
            Module("guide", inner),
        ),
    )


def test_the_prompts() -> None:
    assert trip.prompt(3, "rome") == trip.schema.prompt(
        use("else", use("guide", use("verbose"), style="strict")),
        use("rome"),
        use("guide", style="rome"),
        **{"days": 3, "days-2": 3},
    )
    assert trip(3, children=5, city="oslo").items == (
        Import("children-LIMIT"),
        Import("paris-or-oslo"),
        use("guide", style="oslo"),
    )
    assert trip(3, "bonn", 1).items[:2] == (use("children", days=3), Import("otherwise"))


def test_names_of_a_closure_and_of_programs_defined_later() -> None:
    seen = "rain"

    @prompt_program
    def outer(weather: str):
        if weather == seen:
            later(weather)
        with user:
            "Hello"
        with assistant:
            "Hi"

    @prompt_program
    def later(weather: Annotated[str, 3]):
        f"{weather}"  # noqa: B021

    assert outer.prompt("rain").items == (use("weather-seen", use("later", weather="rain")),)
    assert outer.prompt("sun").items == ()
    assert outer.schema.children[-1] == Role("assistant", (Text("Hi"),))


def program_of(body: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> PromptProgram:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    head = "from typing import Annotated\nfrom ostinato.prompt.program import *\n"
    text = f"{head}\n@prompt_program\ndef p(a: Annotated[str, 3], b: str):\n{lines}\n"
    (tmp_path / "bad_program.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "bad_program", raising=False)
    return __import__("bad_program").p


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("x = 1", r"bad_program.py, line 6: .*\(Assign\)"),
        ("for c in a:\n    'x'", r"line 6: .*\(For\)"),
        ("return a", r"line 6: .*\(Return\)"),
        ("'doc'\n'text'\nprint(a)", r"line 8: print is no prompt program"),
        ("f'{b}'", r"line 6: The field {b} needs a length.*b: Annotated\[str, 20\]"),
        ("f'{a.upper()}'", r"line 6: A field must be one argument"),
        ("f'{a!r}'", r"line 6: A field must be one argument"),
        ("f'{a:>3}'", r"line 6: A field must be one argument"),
        ("match a:\n    case [x]:\n        'y'", r"line 7: A case must be a value"),
        ("match a:\n    case 'x' if b:\n        'y'", r"line 7: A case cannot have a condition"),
        ("with open(b):\n    'y'", r"line 6: `with` opens a turn"),
        ("p(a, b)", r"calls itself"),
        ("with user:\n    with system:\n        'x'", r"turns do not nest"),
    ],
)
def test_what_a_program_cannot_hold(
    body: str, message: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of(body, tmp_path, monkeypatch)
    with pytest.raises(SchemaError, match=message):
        _ = program.schema


def test_wrong_arguments() -> None:
    with pytest.raises(SchemaError, match=r"trip\(.*missing a required argument: 'city'"):
        trip.prompt(3)


def test_without_source() -> None:
    scope: dict[str, Any] = {}
    exec("def p():\n    'x'", scope)
    with pytest.raises(SchemaError, match="Define prompt programs in a file"):
        _ = prompt_program(scope["p"]).schema
    with pytest.raises(TypeError, match="@prompt_program"), system:
        pass
