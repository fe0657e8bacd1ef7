"""The tables of the state, as a list of changes: a file's `user_version` is the number of those it has had."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

Migration = tuple[str, ...]
"""Statements one by one: sqlite3's `executescript` would commit what is pending."""

_WHO: Migration = (
    """CREATE TABLE api_keys (
        id TEXT PRIMARY KEY, hash BLOB NOT NULL, org TEXT NOT NULL, user TEXT NOT NULL,
        permissions TEXT NOT NULL, created REAL NOT NULL, expires REAL, revoked REAL
    ) STRICT""",
    """CREATE TABLE memberships (
        org TEXT NOT NULL, user TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (org, user, name)
    ) STRICT, WITHOUT ROWID""",
    # A removed issuer keeps its row: authentication that was once wanted stays on.
    """CREATE TABLE issuers (
        issuer TEXT PRIMARY KEY, audience TEXT NOT NULL, jwks TEXT NOT NULL, org TEXT,
        org_claim TEXT NOT NULL, user_claim TEXT NOT NULL, groups_claim TEXT NOT NULL,
        permissions_claim TEXT NOT NULL, permissions TEXT NOT NULL, removed REAL
    ) STRICT""",
)

_AUDIT: Migration = (
    """CREATE TABLE audit (
        id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, org TEXT NOT NULL,
        actor_org TEXT, actor_user TEXT, credential TEXT,
        action TEXT NOT NULL, target TEXT NOT NULL, outcome TEXT NOT NULL, detail TEXT NOT NULL
    ) STRICT""",
    "CREATE INDEX audit_by_org ON audit (org, time)",
    """CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    """CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
    # INSERT OR REPLACE deletes without a DELETE trigger where a connection has recursive_triggers off.
    """CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit
    WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END""",
)

_RESOURCES: Migration = (
    """CREATE TABLE resources (
        id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, org TEXT NOT NULL, user TEXT NOT NULL,
        level TEXT NOT NULL, session TEXT NOT NULL, content TEXT NOT NULL, ttl REAL, created REAL NOT NULL,
        UNIQUE (org, user, session, kind, name)
    ) STRICT""",
    "CREATE INDEX resources_by_name ON resources (kind, name)",
    "CREATE INDEX resources_by_level ON resources (level)",
    """CREATE TABLE readers (
        resource TEXT NOT NULL REFERENCES resources (id) ON DELETE CASCADE, reader TEXT NOT NULL,
        PRIMARY KEY (resource, reader)
    ) STRICT, WITHOUT ROWID""",
)

_SECRETS: Migration = (
    "CREATE TABLE secrets (scope BLOB PRIMARY KEY, secret BLOB NOT NULL) STRICT, WITHOUT ROWID",
)

_BOUNDS: Migration = (
    # What is published under a name in an organisation is found without a look at what is others' own.
    "CREATE INDEX resources_by_publication ON resources (kind, name, org, level)",
    "CREATE INDEX resources_by_org ON resources (org, level)",
    "DROP INDEX resources_by_name",
    "CREATE INDEX readers_by_reader ON readers (reader)",
    # Clients name as many of these scopes as they like: the oldest of an owner's go. Those kept until now have no
    # owner that can be told without taking their bytes apart; what was computed under them is computed again.
    """CREATE TABLE named_secrets (
        made INTEGER PRIMARY KEY AUTOINCREMENT, org TEXT NOT NULL, user TEXT NOT NULL,
        scope BLOB NOT NULL UNIQUE, secret BLOB NOT NULL
    ) STRICT""",
    "CREATE INDEX named_secrets_by_owner ON named_secrets (org, user, made)",
    "DELETE FROM secrets WHERE substr(scope, 9, 7) = CAST('session' AS BLOB)",
)

APPLICATION_ID = 0x4F535449
"""Tells our files from other programs' SQLite files: "OSTI"."""

MIGRATIONS: tuple[Migration, ...] = (_WHO, _AUDIT, _RESOURCES, _SECRETS, _BOUNDS)


def version(db: sqlite3.Connection) -> int:
    """How many migrations the file has had."""
    return int(db.execute("PRAGMA user_version").fetchone()[0])


def migrate(db: sqlite3.Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Apply those that are missing, all or none. Processes that start at once wait for one another."""
    db.execute("BEGIN IMMEDIATE")
    try:
        for migration in migrations[version(db) :]:
            for statement in migration:
                db.execute(statement)
        if version(db) < len(migrations):
            db.execute(f"PRAGMA user_version = {len(migrations)}")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
