"""An agent with a catalogue of tools, each a module: a conversation imports the tools it may use.

python examples/agent.py

The schema is typed Python, made from the tools themselves. The agent's loop is the usual one: the model writes a
call, the program does it, and the result goes back as the next turn. With every turn the prompt grows at its end,
and all that came before is cached: the system prompt, the tools, and the conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import show
from ostinato import Engine
from ostinato.prompt.schema import Module, Role, Schema, SchemaPrompt, Text, assistant, use, user


@dataclass(frozen=True)
class Tool:
    """What the model may call: described to it in words, with an example of a call."""

    name: str
    description: str
    example: str
    do: Callable[[str], str]

    @property
    def text(self) -> str:
        return f"\nTool: {self.name}\n{self.description}\nExample: {self.example}\n"


WEATHER = {"oslo": "4 degrees and snow", "lisbon": "19 degrees and sun", "kyoto": "12 degrees and rain"}
PHONES = {"ada": "4417", "grace": "4420", "linus": "4431"}

TOOLS = (
    Tool(
        "weather",
        "Says what the weather is in a city now: the temperature in degrees Celsius and the sky. The argument is "
        "the name of one city, without the country.",
        "weather(Oslo)",
        lambda city: WEATHER.get(city.lower(), "no such city"),
    ),
    Tool(
        "number",
        "Finds the telephone number of a colleague in the directory of the company. The argument is the first name "
        "of one person.",
        "number(Ada)",
        lambda name: PHONES.get(name.lower(), "no such person"),
    ),
    Tool(
        "length",
        "Counts the letters of a word, including those with accents. The argument is one word.",
        "length(house)",
        lambda word: str(len(word)),
    ),
    Tool(
        "reverse",
        "Writes a word backwards. The argument is one word.",
        "reverse(house)",
        lambda word: word[::-1],
    ),
    Tool(
        "kilometres",
        "Converts miles to kilometres. The argument is the number of miles, with a point before the decimals.",
        "kilometres(3.5)",
        lambda miles: f"{float(miles) * 1.609344:.2f} kilometres",
    ),
    Tool(
        "celsius",
        "Converts a temperature from degrees Fahrenheit to degrees Celsius. The argument is a number.",
        "celsius(72)",
        lambda degrees: f"{(float(degrees) - 32) / 1.8:.1f} degrees Celsius",
    ),
    Tool(
        "room",
        "Reserves a meeting room for the next hour. The argument is the number of people who will come. The result "
        "is the name of the room.",
        "room(6)",
        lambda people: "the Library" if int(people) <= 6 else "the Great Hall",
    ),
    Tool(
        "menu",
        "Says what the canteen has for lunch. The argument is a day of the week.",
        "menu(Monday)",
        lambda day: {"monday": "lentil soup", "friday": "fish"}.get(day.lower(), "pasta"),
    ),
    Tool(
        "remind",
        "Puts a reminder into the user's calendar for tomorrow morning at nine. The argument is what to remind of.",
        "remind(water the plants)",
        lambda what: f"reminder set: {what}",
    ),
    Tool(
        "print",
        "Prints a document on the printer in the hall. The argument is the name of the file.",
        "print(report.pdf)",
        lambda file: f"{file} is being printed",
    ),
)

AGENT = Schema(
    "agent",
    (
        Role(
            "system",
            (
                Text(
                    "You are an office assistant with tools. To use a tool, write its call on a line of its own and "
                    "nothing else. You will be told the result.\n"
                ),
                *(Module(tool.name, (Text(tool.text),)) for tool in TOOLS),
            ),
        ),
        # How it goes, for models that learn by example: turns of the schema are in every prompt.
        Role("user", (Text("What is the weather in Oslo?"),)),
        Role("assistant", (Text("weather(Oslo)"),)),
        Role("user", (Text("Result: 4 degrees and snow"),)),
        Role("assistant", (Text("In Oslo there are 4 degrees and snow."),)),
        Role("user", (Text("What is Ada's number?"),)),
        Role("assistant", (Text("number(Ada)"),)),
        Role("user", (Text("Result: 4417"),)),
        Role("assistant", (Text("Ada has the number 4417."),)),
    ),
)

CONVERSATIONS = (
    (("weather", "number", "room", "menu"), ("What is the weather in Lisbon?", "And in Kyoto?")),
    (tuple(tool.name for tool in TOOLS), ("What is Grace's number?", "What is the weather in Oslo?")),
)


def call(reply: str) -> str | None:
    """Do what the model asked for; the result, or None if it called no tool."""
    for tool in TOOLS:
        if found := re.search(rf"\b{tool.name}\(([^()\n]*)\)", reply):
            try:
                return tool.do(found[1].strip(" \"'"))
            except ValueError:
                return f"{found[1]} is not a number"
    return None


def main(engine: Engine, ask: show.Ask = show.ask) -> Sequence[show.Asked]:
    agent = show.register(engine, AGENT)
    asked: list[show.Asked] = []
    for tools, questions in CONVERSATIONS:
        prompt: SchemaPrompt = agent.prompt(*(use(tool) for tool in tools))
        for question in questions:
            prompt = prompt.then(user(question))
            asked.append(ask(engine, question, prompt))
            prompt = prompt.then(assistant(asked[-1].answer))
            if (result := call(asked[-1].answer)) is not None:
                told = f"Result: {result}"
                prompt = prompt.then(user(told))
                asked.append(ask(engine, told, prompt))
                prompt = prompt.then(assistant(asked[-1].answer))
    return asked


if __name__ == "__main__":
    show.run(main)
