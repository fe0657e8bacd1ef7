"""The commands that say who may use the server: keys, groups, issuers, and the audit log.

They work on the state's file; a server that runs sees the change with its next request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ostinato.access.durations import parse_duration
from ostinato.errors import InvalidRequestError
from ostinato.terminal import AsJson, err

if TYPE_CHECKING:
    from ostinato.access.access import Access

keys_app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys.")
groups_app = typer.Typer(no_args_is_help=True, help="Say which users are in which groups.")
issuers_app = typer.Typer(no_args_is_help=True, help="Say whose signed tokens (OIDC, JWT) to trust.")

AUDIT_EXAMPLES = """Examples:

ostinato audit --org acme --since 7d

ostinato audit --action refused --json"""

Org = Annotated[str, typer.Option(help="The organisation.", show_default=False)]
OneOrg = Annotated[
    str | None, typer.Option("--org", help="Only those of this organisation.", show_default="all")
]
User = Annotated[str, typer.Option(help="The user.", show_default=False)]
Group = Annotated[str, typer.Option(help="The group.", show_default=False)]
Permission = Annotated[
    list[str] | None,
    typer.Option(
        "--permission",
        show_default=False,
        help="publish:org, publish:public, admin:org, admin, or metrics (to read /metrics); repeat for more.",
    ),
]


@contextmanager
def _access() -> Generator[Access]:
    from ostinato.access.access import Access  # with cryptography, which --help does without

    with Access() as access:
        yield access


@keys_app.command(
    "create",
    epilog="Example: ostinato keys create --org acme --user alice --group finance --permission publish:org "
    "--expires 90d",
)
def create_key(
    org: Org,
    user: User,
    group: Annotated[
        list[str] | None,
        typer.Option("--group", show_default=False, help="Put the user into a group (repeat for more)."),
    ] = None,
    permission: Permission = None,
    expires: Annotated[
        str | None, typer.Option(help="How long it holds: 90d, 12h, 1y.", show_default="for ever")
    ] = None,
) -> None:
    """Make a key. It goes to standard output, this once; the server keeps only a hash of it."""
    ends = None if expires is None else time.time() + parse_duration(expires, "expires")
    with _access() as access:
        first = not access.required
        info, secret = access.keys.create(org, user, group or (), permission or (), expires=ends)
        groups = sorted(access.groups.of(org, user))
    print(secret, flush=True)
    about = f"Key {info.id} of {user} ({org})" + (f", in {', '.join(groups)}" if groups else "")
    until = f", until {_day(info.expires)}" if info.expires is not None else ""
    _say(f"{about}{until}. It cannot be shown again: keep it where the client finds it.")
    if first:
        _say("From now on the server asks everyone for a key.")


@keys_app.command("list", epilog="Example: ostinato keys list --org acme")
def list_keys(org: OneOrg = None, as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    with _access() as access:
        keys = access.keys.all(org)
        groups = {(key.org, key.user): sorted(access.groups.of(key.org, key.user)) for key in keys}
    if as_json:
        rows = [
            asdict(key) | {"permissions": sorted(key.permissions), "groups": groups[key.org, key.user]}
            for key in keys
        ]
        print(json.dumps(rows))
        return
    table = _table("id", "org", "user", "groups", "permissions", "created", "state")
    now = time.time()
    for key in keys:
        state = "valid" if key.expires is None else f"until {_day(key.expires)}"
        if key.expires is not None and key.expires <= now:
            state = f"expired {_day(key.expires)}"
        if key.revoked is not None:
            state = f"revoked {_day(key.revoked)}"
        cells = (key.id, key.org, key.user, ", ".join(groups[key.org, key.user]))
        _row(table, *cells, ", ".join(sorted(key.permissions)), _day(key.created), state)
    _print(table, "There are no keys. Make one: ostinato keys create --org ORG --user USER")


@keys_app.command("revoke", epilog="Example: ostinato keys revoke ost_0123456789abcdef")
def revoke_key(
    key_id: Annotated[
        str, typer.Argument(metavar="ID", help="As `ostinato keys list` shows it.", show_default=False)
    ],
) -> None:
    """Revoke a key. A running server refuses it from its next request on."""
    with _access() as access:
        info = access.keys.revoke(key_id)
    _say(f"Key {info.id} of {info.user} ({info.org}) is revoked.")


@groups_app.command("add", epilog="Example: ostinato groups add --org acme --user bob --group finance")
def add_to_group(org: Org, user: User, group: Group) -> None:
    """Put a user into a group."""
    with _access() as access:
        access.groups.add(org, user, group)
    _say(f"{user} ({org}) is in {group}.")


@groups_app.command("remove", epilog="Example: ostinato groups remove --org acme --user bob --group finance")
def remove_from_group(org: Org, user: User, group: Group) -> None:
    """Take a user out of a group, whatever key it uses."""
    with _access() as access:
        access.groups.remove(org, user, group)
    _say(f"{user} ({org}) is not in {group} any more.")


@groups_app.command("list", epilog="Example: ostinato groups list --org acme")
def list_groups(org: OneOrg = None, as_json: AsJson = False) -> None:
    """List who is in which group."""
    with _access() as access:
        members = access.groups.all(org)
    if as_json:
        print(json.dumps([asdict(member) for member in members]))
        return
    table = _table("org", "group", "user")
    for member in members:
        _row(table, member.org, member.group, member.user)
    _print(table, "Nobody is in a group. Add one: ostinato groups add --org ORG --user USER --group GROUP")


@issuers_app.command(
    "add",
    epilog="Examples: ostinato issuers add https://login.acme.com --audience ostinato "
    "--jwks https://login.acme.com/jwks.json --org acme \n\n"
    "ostinato issuers add ci --audience ostinato --jwks keys.json --org acme --permission publish:org",
)
def add_issuer(
    issuer: Annotated[
        str, typer.Argument(help="As the claim `iss` of its tokens has it.", show_default=False)
    ],
    audience: Annotated[
        str, typer.Option(help="What `aud` must hold: the name of this server there.", show_default=False)
    ],
    jwks: Annotated[
        str, typer.Option(help="Its public keys: a JWKS file, or an https URL.", show_default=False)
    ],
    org: Annotated[
        str | None,
        typer.Option(
            help="The organisation of all its users. Without, its tokens may name any.",
            show_default="a claim says",
        ),
    ] = None,
    org_claim: Annotated[str, typer.Option(help="The claim with the organisation.")] = "org",
    user_claim: Annotated[str, typer.Option(help="The claim with the user.")] = "sub",
    groups_claim: Annotated[str, typer.Option(help="The claim with the user's groups.")] = "groups",
    permissions_claim: Annotated[
        str, typer.Option(help="The claim with the user's permissions.")
    ] = "permissions",
    permission: Permission = None,
) -> None:
    """Trust an issuer's tokens. --permission names what they may give; by default nothing."""
    from ostinato.access.jwks import JwksError, find, open_jwks
    from ostinato.access.permissions import parse_permissions
    from ostinato.access.tokens import Issuer

    wanted = Issuer(
        issuer,
        audience,
        jwks,
        org,
        org_claim,
        user_claim,
        groups_claim,
        permissions_claim,
        parse_permissions(permission or ()),
    )
    with _access() as access:
        first = not access.required
        added = access.issuers.add(wanted)
    _say(f"Tokens of {added.issuer} are trusted.")
    try:
        find(open_jwks(added.jwks), None, "RS256")
    except JwksError as error:  # perhaps the server has the network that this shell has not
        err.print(f"[yellow]warning:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    if first:
        _say("From now on the server asks everyone for a key or token.")


@issuers_app.command("list", epilog="Example: ostinato issuers list --json")
def list_issuers(as_json: AsJson = False) -> None:
    """List the issuers whose tokens are trusted."""
    with _access() as access:
        issuers = access.issuers.all()
    if as_json:
        print(json.dumps([asdict(each) | {"permissions": sorted(each.permissions)} for each in issuers]))
        return
    table = _table("issuer", "audience", "org", "permissions", "keys")
    for each in issuers:
        org = each.org if each.org is not None else f"claim {each.org_claim}"
        _row(table, each.issuer, each.audience, org, ", ".join(sorted(each.permissions)), each.jwks)
    _print(table, "No issuer is trusted. Add one: ostinato issuers add ISSUER --audience AUD --jwks URL")


@issuers_app.command("remove", epilog="Example: ostinato issuers remove https://login.acme.com")
def remove_issuer(
    issuer: Annotated[str, typer.Argument(help="As `ostinato issuers list` shows it.", show_default=False)],
) -> None:
    """Trust an issuer no more."""
    with _access() as access:
        access.issuers.remove(issuer)
    _say(f"Tokens of {issuer} are refused.")


def audit(
    org: OneOrg = None,
    since: Annotated[
        str | None,
        typer.Option(help="From then on: 7d (ago), or 2026-01-31 (UTC).", show_default="the beginning"),
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="Only these: key.create, grant, forget, refused, …", show_default="all")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="The most rows to show, the last ones.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show the audit log: who registered, granted, revoked and forgot, and who was refused."""
    with _access() as access:
        entries = access.audit.read(org=org, since=_since(since), action=action, limit=limit)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries]))
        return
    table = _table("time (UTC)", "org", "who", "action", "target", "detail")
    table.columns[4].min_width = min(
        36, max((len(entry.target) for entry in entries), default=0)
    )  # an id in one piece
    for entry in entries:
        known = [part for part in (entry.actor_org, entry.actor_user) if part]
        detail = " ".join(f"{name}={_cell(value)}" for name, value in entry.detail.items() if value)
        when = datetime.fromtimestamp(entry.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        _row(table, when, entry.org, "/".join(known), entry.action, entry.target, detail)
    _print(table, "The log has nothing of the kind.")


def _since(text: str | None) -> float | None:
    if text is None:
        return None
    if re.fullmatch(r"[0-9]+[a-z]", text):
        return time.time() - parse_duration(text, "since")
    try:
        day = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequestError(
            f"--since {text[:40]!r} is no time: write 7d, 2026-01-31 or 2026-01-31T12:00.", param="since"
        ) from None
    return (day if day.tzinfo else day.replace(tzinfo=UTC)).timestamp()


def _cell(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d")


def _table(*headings: str) -> Table:
    # An id is copied from the table: it stays in one piece.
    return Table(*(Column(each, overflow="fold", no_wrap=each == "id") for each in headings), box=SIMPLE)


def _row(table: Table, *cells: str) -> None:
    table.add_row(*(escape(cell) for cell in cells))


def _print(table: Table, empty: str) -> None:
    if table.row_count:
        Console().print(table, highlight=False)
    else:
        _say(empty)


def _say(text: str) -> None:
    err.print(escape(text), highlight=False, soft_wrap=True)
