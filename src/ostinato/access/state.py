"""The state of access in one SQLite file: keys, groups, issuers, grants, scopes' secrets and the audit log."""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostinato.access.errors import StateError
from ostinato.access.migrations import APPLICATION_ID, MIGRATIONS, migrate, version
from ostinato.errors import InvalidRequestError

log = logging.getLogger(__name__)

MEMORY = ":memory:"

BUSY_SECONDS = 10.0
"""How long to wait for another process's write, which takes milliseconds."""

_GUARDS = {sqlite3.SQLITE_DROP_TABLE, sqlite3.SQLITE_DROP_TRIGGER, sqlite3.SQLITE_ALTER_TABLE}


_OURS = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISUSE, sqlite3.SQLITE_AUTH}
"""Errors of a statement or a rule of the tables, for the caller to tell; all others are the file's."""


def state_path() -> Path:
    """`$OSTINATO_ACCESS`, or `ostinato/access.db` in `$XDG_DATA_HOME` (default `~/.local/share`)."""
    chosen = os.environ.get("OSTINATO_ACCESS")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "share") / "ostinato" / "access.db"


class State:
    """One connection behind a lock: safe from any thread, and beside other processes on the same file.

    Readers never wait for writers of other processes (WAL), and a write that has returned is on the disk: a
    revocation survives a power cut.
    """

    def __init__(self, path: Path | str | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self.path = str(state_path() if path is None else path)
        self.now = clock
        self._lock = threading.RLock()
        self._due: list[Callable[[], object]] = []
        if self.path != MEMORY:
            _make_private(Path(self.path))
        with self._explained():
            self._db = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise

    def _prepare(self) -> None:
        db = self._db
        # Deleted secrets are overwritten, and what SQLite sorts does not go to files that outlive it.
        for pragma in (
            "secure_delete = ON",
            "temp_store = MEMORY",
            "foreign_keys = ON",
            "recursive_triggers = ON",
        ):
            db.execute(f"PRAGMA {pragma}")
        db.execute("BEGIN")  # one moment of a file that another process may just be making
        known, application = version(db), db.execute("PRAGMA application_id").fetchone()[0]
        empty = db.execute("SELECT 1 FROM sqlite_schema").fetchone() is None
        db.execute("COMMIT")
        if application != APPLICATION_ID and not empty:
            raise StateError(
                f"{self.path} is an SQLite file of another program. Set OSTINATO_ACCESS to another path."
            )
        if known > len(MIGRATIONS):
            raise StateError(
                f"{self.path} was written by a newer Ostinato (version {known} of its tables; this one knows "
                f"{len(MIGRATIONS)}). Upgrade with: pip install -U ostinato"
            )
        if self.path != MEMORY:
            self._use_wal()
        if known < len(MIGRATIONS):
            migrate(db)
        # Made once for the connection, by a statement that looks like one against the tables of tables.
        db.execute("SELECT 1 FROM json_each('[]')")
        db.set_authorizer(_authorise)

    def _use_wal(self) -> None:
        # SQLite does not wait for other connections here as it does elsewhere: it fails at once.
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)

    @contextmanager
    def transaction(self) -> Generator[sqlite3.Connection]:
        """All writes in it or none. One inside another is part of the outer one."""
        with self._lock, self._explained():
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                due, self._due = self._due, []
                for work in due:
                    work()

    @contextmanager
    def locked(self) -> Generator[None]:
        """Keep this process's other threads out, without a transaction."""
        with self._lock:
            yield

    def outside(self, work: Callable[[], object]) -> None:
        """Do it once no transaction of this thread is open, however that ends; now, if none is."""
        with self._lock:
            if self._db.in_transaction:
                self._due.append(work)
            else:
                work()

    def rows(self, sql: str, *values: object) -> list[Any]:
        """What a query finds."""
        with self._lock, self._explained():
            return self._db.execute(sql, values).fetchall()

    def row(self, sql: str, *values: object) -> Any:
        """The first row that a query finds, or None."""
        with self._lock, self._explained():
            return self._db.execute(sql, values).fetchone()

    def data_version(self) -> int:
        """A number that changes when another connection, of this process or another, has written."""
        return self.row("PRAGMA data_version")[0]

    def scrub(self) -> None:
        """Take what was deleted out of the write-ahead log too, which still holds the pages as they were."""
        if self.path != MEMORY:
            self.outside(self._empty_log)

    def _empty_log(self) -> None:
        if self.row("PRAGMA wal_checkpoint(TRUNCATE)")[0]:
            # Another process reads on and on: the next call does it, or whoever is the last to close the file.
            log.warning("%s-wal keeps what was deleted until other processes let go of it.", self.path)

    def close(self) -> None:
        """Close the file. Whatever is used of the state afterwards fails."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _explained(self) -> Generator[None]:
        try:
            yield
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "A name or text holds half a surrogate pair: it is not Unicode."
            ) from None
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # without its subkind
            if code in _OURS:
                raise
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise StateError(
                    f"{self.path} is not a readable state file: {error}. Restore it from a backup; or move it away, "
                    "and then make new keys with `ostinato keys create`."
                ) from error
            raise StateError(
                f"{self.path} cannot be used: {error}. Check its folder, the disk's space, and that no other "
                "program holds it."
            ) from error


_making = threading.Lock()
# Whoever closes a file loses its process's locks on it, SQLite's among them: a file that another thread may have open
# already is only looked at.


def _make_private(path: Path) -> None:
    """Make the file, for its owner alone; SQLite gives its companions (-wal, -shm) the same mode."""
    try:
        with _making:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            mode = path.stat().st_mode
    except OSError as error:
        raise StateError(
            f"{path} cannot be opened: {error.strerror}. Set OSTINATO_ACCESS to a path that can."
        ) from None
    if not stat.S_ISREG(mode):
        raise StateError(f"{path} is not a file. Set OSTINATO_ACCESS to the path of one.")
    if os.name == "posix" and mode & 0o077:
        raise StateError(
            f"{path} holds secrets and is open to other users (mode {mode & 0o777:03o}). Run: chmod 600 '{path}'"
        )


def _authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """No statement, whoever wrote it, changes the audit log's rows or takes away the triggers that guard them."""
    changes = action in (sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE)
    guarded = first in ("audit", "sqlite_master", "sqlite_schema")
    unlocks = action == sqlite3.SQLITE_PRAGMA and first == "writable_schema" and second is not None
    return sqlite3.SQLITE_DENY if action in _GUARDS or (changes and guarded) or unlocks else sqlite3.SQLITE_OK
