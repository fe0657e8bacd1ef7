"""Compiles the C++ kernels for this machine on first use and keeps the result.

The library has a plain C interface (no headers of torch or Python), so it takes seconds to compile and
does not depend on their versions. It shares torch's OpenMP runtime: two of them in one process would
fight over the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch  # its OpenMP runtime has to be in the process before ours is looked for

from ostinato.files import cache_dir

log = logging.getLogger(__name__)

_HERE = Path(__file__).parent
_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-w",
]
_RUNTIME = re.compile(r"/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*")


@dataclass(frozen=True)
class Library:
    """One compiled library, bound twice."""

    short: ctypes.PyDLL
    """Keeps the GIL: for calls too short to be worth handing it over."""
    long: ctypes.CDLL
    """Releases the GIL."""
    features: frozenset[str]
    """Of "avx512", "vnni", "amx": what the build and this machine make use of."""


@functools.cache
def load(arch: str = "native") -> Library | None:
    """The kernels compiled for `arch` (an argument of g++'s -march), or None where that is impossible."""
    if os.environ.get("OSTINATO_NATIVE", "1") == "0":
        log.info("native kernels are off (OSTINATO_NATIVE=0)")
        return None
    if not sys.platform.startswith("linux"):
        log.info("native kernels need Linux; using PyTorch")
        return None
    try:
        if not _share_openmp():
            log.warning("no OpenMP runtime found for the native kernels; using PyTorch")
            return None
        path = _compiled(arch)
        short, long = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        bits = int(short.ostinato_init())
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cannot build the native kernels (%s); using PyTorch", _first_line(error))
        return None
    names = ("avx512", "vnni", "amx")
    return Library(short, long, frozenset(name for i, name in enumerate(names) if bits >> i & 1))


def _first_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    errors = [line for line in text.splitlines() if "error" in line]
    return (errors or text.splitlines() or [type(error).__name__])[0]


def _share_openmp() -> bool:
    """Makes the symbols of the OpenMP runtime that torch uses visible to the library."""
    runtime = _torch_runtime()
    if runtime is None and torch.get_num_threads() > 1:
        return False
    ctypes.CDLL(runtime or "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
    return True


def _torch_runtime() -> str | None:
    loaded = sorted(set(_RUNTIME.findall(Path("/proc/self/maps").read_text())))
    # Other packages bring runtimes of their own, under the same name.
    home = str(Path(torch.__file__).parent)
    return next((path for path in loaded if path.startswith(home)), loaded[0] if loaded else None)


def _compiled(arch: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler:
        raise FileNotFoundError("no g++ on the path")
    sources = sorted(_HERE.glob("*.cpp"))
    flags = [*_FLAGS, f"-march={arch}"]
    version = _run([compiler, "--version"])
    key = hashlib.sha256()
    for part in (*flags, version, _cpu_flags()):
        key.update(part.encode() + b"\0")
    for file in (*sources, *sorted(_HERE.glob("*.h"))):
        key.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    folder = cache_dir() / "native"
    path = folder / f"{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        objects = [f"{work}/{source.stem}.o" for source in sources]
        jobs = [
            subprocess.Popen(
                [compiler, *flags, "-c", str(source), "-o", target],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for source, target in zip(sources, objects, strict=True)
        ]
        results = [(job, job.communicate()[1]) for job in jobs]
        for job, stderr in results:
            if job.returncode:
                raise subprocess.CalledProcessError(job.returncode, job.args, stderr=stderr)
        # No -fopenmp here: the runtime is torch's, see _share_openmp.
        _run([compiler, "-shared", *objects, "-o", f"{work}/kernels.so"])
        os.replace(f"{work}/kernels.so", path)  # whole or not at all, whoever else is compiling
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
