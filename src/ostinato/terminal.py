"""What a person sees while a model is fetched, compiled for and loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine

err = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
"""The option of every command that prints a table."""


@contextmanager
def open_engine(model: str, **options: Any) -> Generator[Engine]:
    """An engine for `model`, fetched if need be; bars on standard error show what is going on.

    `options` are the engine's own.
    """
    from ostinato.models import catalogue

    with progress_bar(f"Pulling {model}") as progress:
        catalogue.resolve(model, progress=progress)
    with err.status("Starting PyTorch, and compiling the CPU kernels if they are new …"):
        from ostinato.engine.engine import Engine
        from ostinato.native import kernels

        kernels.load()
    with progress_bar(f"Loading {model}") as progress:
        engine = Engine(model, progress=progress, **options)
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


def fail(message: str, hint: str | None = None, status: int = 1) -> NoReturn:
    """End the program with one line that says what was wrong, and one that says what to do."""
    err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    if hint:
        err.print(f"[dim]hint:[/] {escape(hint)}", highlight=False, soft_wrap=True)
    sys.exit(status)
