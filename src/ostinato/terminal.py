"""What a person sees while a model is fetched, compiled for and loaded."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from ostinato.cache.policy import DEFAULT_POLICY

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine

err = Console(stderr=True)


@contextmanager
def open_engine(
    model: str,
    kv_tokens: int | None = None,
    dtype: str = "auto",
    policy: str = DEFAULT_POLICY,
    record: Path | None = None,
    predictor: Path | None = None,
) -> Generator[Engine]:
    """An engine for `model`, fetched if need be; bars on standard error show what is going on."""
    from ostinato.models import catalogue

    with progress_bar(f"Pulling {model}") as progress:
        catalogue.resolve(model, progress=progress)
    with err.status("Starting PyTorch, and compiling the CPU kernels if they are new …"):
        from ostinato.engine.engine import Engine
        from ostinato.native import kernels

        kernels.load()
    with progress_bar(f"Loading {model}") as progress:
        engine = Engine(
            model,
            kv_tokens=kv_tokens,
            dtype=dtype,
            policy=policy,
            record=record,
            predictor=predictor,
            progress=progress,
        )
    with engine:
        yield engine


@contextmanager
def progress_bar(description: str) -> Generator[Callable[[int, int], None]]:
    """A progress bar on standard error, as a function of bytes done and bytes in all; shown once called."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(escape(description), total=None, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        yield update
