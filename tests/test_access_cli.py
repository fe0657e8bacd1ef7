"""The commands for keys, groups, issuers and the audit log, run as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostinato.access.access import Access


def keys_json() -> str:
    """A set with one public key, of RFC 7517's example."""
    key = {
        "kty": "EC",
        "crv": "P-256",
        "kid": "1",
        "x": "MKBCTNIcKUSDii11ySs3526iDZ8AiTo7Tu6KPAqv7D4",
        "y": "4Etl6SRW2YiLUrN5vfvVHuhp7x8PxltmWWlbbM4IFyM",
    }
    return json.dumps({"keys": [key]})


class Shell:
    """Runs the command on a state of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OSTINATO_ACCESS": str(self.path), "COLUMNS": "200", "NO_COLOR": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "ostinato.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=environment,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def ok(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path / "new" / "access.db")


def test_help() -> None:
    shell = Shell(Path("unused"))
    shown = shell.ok("--help")
    for name in ("keys", "groups", "issuers", "audit"):
        assert name in shown
    for name in (
        "keys create",
        "keys list",
        "keys revoke",
        "groups add",
        "groups remove",
        "groups list",
        "issuers add",
        "issuers list",
        "issuers remove",
        "audit",
    ):
        assert "Example" in shell.ok(*name.split(), "--help")
    assert not shell.path.exists()


def test_help_needs_no_cryptography() -> None:
    code = (
        "import sys, ostinato.cli; print([m for m in ('jwt', 'cryptography', 'sqlite3') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_key_from_making_to_revoking(shell: Shell) -> None:
    who = ("--org", "acme", "--user", "alice")
    made = shell.run(
        "keys", "create", *who, "--group", "finance", "--permission", "publish:org", "--expires", "90d"
    )
    assert made.returncode == 0, made.stderr
    secret = made.stdout.strip()
    assert made.stdout == f"{secret}\n"  # alone, for KEY=$(ostinato keys create ...)
    assert "cannot be shown again" in made.stderr
    assert "From now on" in made.stderr
    assert secret[-64:] not in made.stderr
    with Access(shell.path) as access:
        principal = access.authenticate(f"Bearer {secret}")
        assert principal.groups == {"finance"}
        assert principal.permissions == {"publish:org"}
        (listed,) = json.loads(shell.ok("keys", "list", "--json"))
        assert (listed["id"], listed["org"], listed["groups"]) == (principal.credential, "acme", ["finance"])
        assert 89 < (listed["expires"] - listed["created"]) / 86_400 < 91
        table = shell.ok("keys", "list")
        for part in (principal.credential, "acme", "alice", "finance", "publish:org", "until"):
            assert part in table
        assert secret[-64:] not in table + json.dumps(listed)
        assert "From now on" not in shell.run("keys", "create", *who).stderr
        shell.ok("groups", "add", *who, "--group", "hr")
        assert access.authenticate(f"Bearer {secret}").groups == {"finance", "hr"}
        shell.ok("groups", "remove", *who, "--group", "finance")
        assert access.authenticate(f"Bearer {secret}").groups == {"hr"}
        assert json.loads(shell.ok("groups", "list", "--json")) == [
            {"org": "acme", "user": "alice", "group": "hr"}
        ]
        assert "hr" in shell.ok("groups", "list", "--org", "acme")
        shell.ok("keys", "revoke", principal.credential)
        assert access.keys.authenticate(secret) is None
    assert "revoked" in shell.ok("keys", "list")
    assert json.loads(shell.ok("keys", "list", "--org", "other", "--json")) == []
    entries = json.loads(shell.ok("audit", "--org", "acme", "--since", "1d", "--json"))
    actions = [entry["action"] for entry in entries]
    assert actions == ["group.add", "key.create", "key.create", "group.add", "group.remove", "key.revoke"]
    assert {entry["actor_user"] for entry in entries} == {"local"}
    table = shell.ok("audit", "--action", "key.revoke")
    assert principal.credential in table
    assert "key.create" not in table


def test_issuers(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(keys_json())
    arguments = (
        "--audience",
        "ostinato",
        "--jwks",
        str(tmp_path / "keys.json"),
        "--permission",
        "publish:org",
    )
    added = shell.run("issuers", "add", "https://login.acme.com", *arguments, "--org", "acme")
    assert added.returncode == 0, added.stderr
    assert "From now on" in added.stderr
    (listed,) = json.loads(shell.ok("issuers", "list", "--json"))
    assert (listed["org"], listed["user_claim"], listed["permissions"]) == ("acme", "sub", ["publish:org"])
    assert "https://login.acme.com" in shell.ok("issuers", "list")
    # A set that cannot be fetched now may well be later.
    unreachable = ("--audience", "a", "--jwks", "http://127.0.0.1:9/keys")
    added = shell.run("issuers", "add", "other", *unreachable)
    assert added.returncode == 0
    assert "warning" in added.stderr
    shell.ok("issuers", "remove", "other")
    assert len(json.loads(shell.ok("issuers", "list", "--json"))) == 1


def test_empty_tables_say_what_next(shell: Shell) -> None:
    for arguments, says in (
        (("keys", "list"), "ostinato keys create"),
        (("groups", "list"), "ostinato groups add"),
        (("issuers", "list"), "ostinato issuers add"),
        (("audit",), "nothing"),
    ):
        done = shell.run(*arguments)
        assert (done.returncode, done.stdout) == (0, "")
        assert says in done.stderr
        assert json.loads(shell.ok(*arguments, "--json")) == []


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("keys", "create", "--org", "acme"), 2, "--user"),
        (("keys", "create", "--org", "", "--user", "a"), 2, "organisation"),
        (("keys", "create", "--org", "a\nb", "--user", "a"), 2, "organisation"),
        (("keys", "create", "--org", "a", "--user", "a", "--permission", "root"), 2, "publish:org"),
        (("keys", "create", "--org", "a", "--user", "a", "--expires", "soon"), 2, "90d"),
        (("keys", "create", "--org", "a", "--user", "a", "--expires", "0d"), 2, "90d"),
        (("keys", "revoke", "ost_0"), 1, "ostinato keys list"),
        (("keys", "revoke", "x' OR '1'='1"), 1, "ostinato keys list"),
        (("groups", "remove", "--org", "a", "--user", "b", "--group", "c"), 1, "ostinato groups list"),
        (("issuers", "remove", "nobody"), 1, "ostinato issuers list"),
        (("issuers", "add", "x", "--audience", "a", "--jwks", "http://example.com/keys"), 2, "https"),
        (("issuers", "add", "x", "--audience", "a", "--jwks", "missing.json"), 2, "missing.json"),
        (("keys", "revoke", "\udcff"), 2, "not Unicode"),
        (("audit", "--org", "\udcff"), 2, "not Unicode"),
        (("audit", "--since", "yesterday"), 2, "2026-01-31"),
        (("audit", "--action", "dance"), 2, "key.create"),
    ],
)
def test_errors_are_clear(shell: Shell, arguments: tuple[str, ...], status: int, says: str) -> None:
    done = shell.run(*arguments)
    assert done.returncode == status, done.stderr
    assert says in done.stderr
    assert done.stdout == ""


def test_a_state_that_cannot_be_used(shell: Shell) -> None:
    shell.path.parent.mkdir()
    shell.path.write_text("no database at all, but long enough to be looked at" * 100)
    shell.path.chmod(0o600)
    done = shell.run("keys", "list")
    assert done.returncode == 1
    assert str(shell.path) in done.stderr
    assert "backup" in done.stderr


def test_names_are_not_markup(shell: Shell) -> None:
    shell.ok("keys", "create", "--org", "[red]acme[/red]", "--user", "[/]", "--group", "[link=x]")
    table = shell.ok("keys", "list") + shell.ok("groups", "list") + shell.ok("audit")
    for name in ("[red]acme[/red]", "[/]", "[link=x]"):
        assert name in table


def test_times(shell: Shell) -> None:
    shell.ok("keys", "create", "--org", "acme", "--user", "alice")
    for since, count in (("2000-01-01", 1), ("2000-01-01T00:00:00+02:00", 1), ("2999-12-31", 0)):
        assert len(json.loads(shell.ok("audit", "--since", since, "--json"))) == count
