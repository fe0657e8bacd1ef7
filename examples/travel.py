"""A travel plan with parameters, as a prompt program: an ordinary Python function that is compiled to a schema.

python examples/travel.py

The function is never run. Its strings are text, its `if` is a module, its `match` is a union, and the fields of
its f-strings are parameters, whose annotations say how many tokens an argument may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import show
from ostinato import Engine
from ostinato.prompt.program import prompt_program, system
from ostinato.prompt.schema import user

City = Literal["lisbon", "bergen", "kyoto"]


@prompt_program
def money(currency: Annotated[str, 6], budget: Annotated[int, 8]):
    """What the traveller can spend. As everywhere, the first string is documentation."""
    f"""
    The traveller has {budget} {currency} for the whole journey. Name the price of whatever costs something. Museums
    are cheaper or free on one day of the week, and a ticket for several days pays off from the third ride on.
    """


@prompt_program
def plan(days: Annotated[int, 4], city: City, budget: int = 0, children: bool = False, rain: bool = False):
    with system:
        f"""
        You plan journeys. Answer from the notes below. The journey takes {days} days.
        """
        match city:
            case "lisbon":
                """
                Lisbon lies on seven hills above the river Tejo. Tram 28 climbs through the old quarters of Graca and
                Alfama; take it before nine, later it is full. The castle opens at nine and has the widest view. In
                Belem there are the monastery, a tower in the river, and the bakery that has made custard tarts since
                1837. The ferry to Cacilhas costs little more than a euro, and the fish there is good. Houses are
                covered with tiles, and a museum in an old convent tells their history. In summer it is hot: walk
                in the morning, rest at noon, eat late.
                """
            case "bergen":
                """
                Bergen lies between seven mountains and the sea. A railway goes up Mount Floyen in six minutes; the
                way down on foot takes an hour. The wooden houses of Bryggen belonged to merchants of the Hansa.
                The fish market is on the quay, but people of the town buy their fish indoors, next door. The composer
                Grieg lived outside the town at Troldhaugen, where concerts are given at noon in summer. Boats to the
                fjords leave at eight in the morning and are back for dinner. It rains on two days of three.
                """
            case "kyoto":
                """
                Kyoto was the capital of Japan for a thousand years. The ten thousand red gates of Fushimi Inari climb
                a mountain; at sunrise one has them alone. The Golden Pavilion is best in the afternoon, when the sun
                stands on it. In the market of Nishiki a hundred shops sell pickles, fish and sweets. The Path of
                Philosophy follows a canal under cherry trees for two kilometres, from the Silver Pavilion to the south.
                Buses are slow and full; hire a bicycle. Many temples close at half past four.
                """
        if budget:
            money("euros", budget)
        if children:
            """
            Children come along. No walk is longer than half an hour, there is a playground or water every day, and
            dinner is at six. Ferries, trams and mountain railways count as amusements.
            """
        if rain:
            """
            Rain is expected. Give for each day one thing to do under a roof: a museum, a covered market, a bath.
            """


JOURNEYS = (
    (plan(3, "lisbon"), "When shall I take tram 28?"),
    (plan(2, "bergen", children=True, rain=True), "How long does the railway up Mount Floyen take?"),
    (plan(5, "kyoto", budget=900), "When shall I go to the Golden Pavilion?"),
    (plan(4, "lisbon", budget=400, children=True), "Where shall we eat custard tarts?"),
)


def main(engine: Engine, ask: show.Ask = show.ask) -> Sequence[show.Asked]:
    show.register(engine, plan.schema)
    return [ask(engine, question, journey.then(user(question))) for journey, question in JOURNEYS]


if __name__ == "__main__":
    show.run(main)
