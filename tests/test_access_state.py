"""The file of the state: who may open it, how it grows up, and what happens to it that is not its fault."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ostinato.access.access import Access
from ostinato.access.errors import StateError
from ostinato.access.migrations import MIGRATIONS, migrate, version
from ostinato.access.state import State, state_path


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "access.db"
    with Access(path) as access:
        access.keys.create("acme", "alice")
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for file in path.parent.iterdir():  # the write-ahead log and its index, too
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert len(list(path.parent.iterdir())) == 3


def test_a_file_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "access.db"
    State(path).close()
    path.chmod(0o644)
    with pytest.raises(StateError, match="chmod 600"):
        State(path)


def test_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSTINATO_ACCESS", str(tmp_path / "mine.db"))
    assert state_path() == tmp_path / "mine.db"
    monkeypatch.delenv("OSTINATO_ACCESS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert state_path() == tmp_path / "ostinato" / "access.db"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_path() == tmp_path / ".local" / "share" / "ostinato" / "access.db"


@pytest.mark.parametrize("count", range(1, len(MIGRATIONS)))
def test_an_older_file_is_migrated(tmp_path: Path, count: int) -> None:
    path = tmp_path / "access.db"
    db = sqlite3.connect(path, isolation_level=None)
    migrate(db, MIGRATIONS[:count])
    db.execute("INSERT INTO memberships VALUES ('acme', 'alice', 'finance')")
    db.close()
    path.chmod(0o600)
    with Access(path) as access:
        assert access.groups.of("acme", "alice") == {"finance"}
        assert access.keys.create("acme", "alice")[0].org == "acme"
        assert access.state.row("PRAGMA user_version")[0] == len(MIGRATIONS)


def test_a_migration_that_fails_leaves_the_file_as_it_was() -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    migrate(db, MIGRATIONS[:1])
    with pytest.raises(sqlite3.OperationalError):
        migrate(db, (*MIGRATIONS, ("CREATE TABLE more (a)", "CREATE TABLE audit (a)")))
    assert version(db) == 1
    assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name IN ('more', 'audit')").fetchone() == (0,)


def test_a_newer_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "access.db"
    State(path).close()
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    db.close()
    with pytest.raises(StateError, match="newer Ostinato"):
        State(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "access.db"
    path.write_bytes(os.urandom(8192))
    path.chmod(0o600)
    with pytest.raises(StateError, match="not a readable state file"):
        State(path)
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE bookmarks (url)")
    foreign.close()
    path.chmod(0o600)
    with pytest.raises(StateError, match="another program"):
        State(path)
    with pytest.raises(StateError, match="not a file"):
        State(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="cannot be opened"):
        State(tmp_path / "file" / "access.db")


def test_a_page_that_is_destroyed_later(tmp_path: Path) -> None:
    path = tmp_path / "access.db"
    with Access(path) as access:
        access.keys.create("acme", "alice")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    with pytest.raises(StateError, match="backup"), Access(path) as access:
        access.keys.all()


def test_processes_that_start_at_once(tmp_path: Path) -> None:
    code = "import sys; from ostinato.access.state import State; s = State(sys.argv[1]); print(s.row('PRAGMA user_version')[0])"
    command = [sys.executable, "-c", code, str(tmp_path / "access.db")]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert out.strip() == str(len(MIGRATIONS)), err


def test_threads_share_it(tmp_path: Path) -> None:
    with Access(tmp_path / "access.db") as access:

        def work(name: str) -> None:
            for group in range(10):
                access.groups.add("acme", name, str(group))
                access.keys.create("acme", name, [f"g{group}"])

        threads = [threading.Thread(target=work, args=(f"u{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(access.keys.all()) == 80
        assert len(access.groups.all()) == 160
        assert len(access.audit.read(limit=1000)) == 240


def test_a_transaction_is_all_or_nothing() -> None:
    done: list[str] = []
    with Access(":memory:") as access:

        def fail() -> None:
            with access.state.transaction():
                access.keys.create("acme", "alice", ["finance"])
                access.state.outside(lambda: done.append("later"))
                assert not done
                raise LookupError

        with pytest.raises(LookupError):
            fail()
        assert done == ["later"]
        assert not access.required
        assert not access.groups.all()
        assert not access.audit.read()
