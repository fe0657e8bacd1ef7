"""The commands that ask a running server about its cache."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ostinato.remote import Remote
from ostinato.terminal import AsJson, fail

Server = Annotated[
    str, typer.Option(help="Address of the server; OSTINATO_API_KEY has the key, if it asks for one.")
]
HERE = "http://127.0.0.1:8000"

EXPLAIN_EXAMPLE = "Example: ostinato explain chatcmpl-4f0c…  (the id of the answer)"
FORGET_EXAMPLES = """Examples:

ostinato forget --user alice

ostinato forget --session 42

ostinato forget --end-user customer-17

ostinato forget --document doc_4f0c…"""


def explain(
    request: Annotated[
        str, typer.Argument(help="The id of the answer, or of the request.", show_default=False)
    ],
    server: Server = HERE,
    as_json: AsJson = False,
) -> None:
    """Show what of a request's prompt was found cached, why the rest was not, and what would help."""
    found = Remote(server).get(
        "/v1/requests/",
        request,
        "/cache",
        hint="Ids are those of answers to the same user, the latest 10,000.",
    )
    if as_json:
        print(json.dumps(found))
        return
    right = ("token", "tokens", "hit")
    table = Table(
        *(Column(name, justify="right") for name in right),
        "kind",
        "scope",
        Column("not found because", overflow="fold"),
        box=SIMPLE,
    )
    for span in found["spans"]:
        table.add_row(
            f"{span['start']:,}",
            f"{span['tokens']:,}",
            f"{span['hit_tokens']:,}",
            span["kind"],
            escape(span["scope"]),
            escape(reason(span.get("miss"))),
        )
    console = Console()
    console.print(table)
    share = found["cached_tokens"] / max(1, found["prompt_tokens"])
    console.print(
        f"{found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens were cached ({share:.0%})."
    )
    if found["advice"]:
        console.print(f"[bold]{escape(found['advice'])}[/]", soft_wrap=True)


def reason(miss: dict[str, Any] | None) -> str:
    """A miss in words."""
    if miss is None:
        return ""
    if miss.get("earlier"):
        return f"what it follows was not found ({miss['reason']})"
    ago = f" {miss['seconds_ago']:,.0f} s ago" if "seconds_ago" in miss else ""
    match miss["reason"]:
        case "diverged":
            other = f", cached: {miss['cached']!r}" if "cached" in miss else ""
            return f"diverged at token {miss['at']:,}; here: {miss.get('yours', '')!r}{other}"
        case "evicted":
            return f"evicted{ago} by {miss['policy']}"
        case "expired":
            return f"expired{ago}"
        case "scope":
            return f"cached in another scope of yours: {miss['scope']}"
        case other:
            return str(other)


def forget(
    user: Annotated[str | None, typer.Option(help="All of this user.", show_default=False)] = None,
    session: Annotated[
        str | None, typer.Option(help="This session of the user (yours, without --user).", show_default=False)
    ] = None,
    end_user: Annotated[
        str | None,
        typer.Option(help="What was asked for this one of the user's own users.", show_default=False),
    ] = None,
    cache_salt: Annotated[
        str | None, typer.Option(help="What the user has computed under this salt.", show_default=False)
    ] = None,
    org: Annotated[
        str | None,
        typer.Option(help="All of this organisation; with --user, whose user.", show_default=False),
    ] = None,
    document: Annotated[
        str | None, typer.Option(help="The document or schema of this id.", show_default=False)
    ] = None,
    request: Annotated[str | None, typer.Option(help="What this request sent.", show_default=False)] = None,
    server: Server = HERE,
    as_json: AsJson = False,
) -> None:
    """Forget what a server has cached of someone or something, and all that was computed from it."""
    asked = {"user": user, "session": session, "end_user": end_user, "cache_salt": cache_salt}
    asked |= {"org": org, "document": document, "request": request}
    body = {name: value for name, value in asked.items() if value is not None}
    if not body:
        fail(
            "Say what to forget.",
            "One of --user, --session, --end-user, --cache-salt, --org, --document and --request.",
            status=2,
        )
    told = Remote(server).post("/v1/forget", body)
    if as_json:
        print(json.dumps(told))
        return
    documents = f" and {len(told['documents'])} documents and schemas" if told["documents"] else ""
    print(f"Forgot {told['tokens']:,} tokens of your KV in {told['blocks']:,} blocks{documents}.")
