"""The `ostinato` command.

PyTorch takes seconds to import, so the engine and the server are imported inside the commands that need
them: `ostinato --help` and `ostinato models` answer at once.
"""

from __future__ import annotations

import gc
import json
import signal
import socket
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ostinato import __version__
from ostinato.access.cli import AUDIT_EXAMPLES, audit, groups_app, issuers_app, keys_app
from ostinato.access.principal import LOOPBACK
from ostinato.access.scope import LEVELS, Level, Scope
from ostinato.cache.policy import DEFAULT_POLICY, POLICIES
from ostinato.errors import InvalidRequestError, ModelNotFoundError, OstinatoError
from ostinato.lab.cli import EXAMPLES, replay, train_predictor
from ostinato.prompt.cli import schema_app
from ostinato.prompt.pml import load_schema
from ostinato.server.cli import EXPLAIN_EXAMPLE, FORGET_EXAMPLES, explain, forget
from ostinato.terminal import AsJson, err, fail, open_engine, progress_bar

if TYPE_CHECKING:
    from ostinato.access.access import Access
    from ostinato.engine.engine import Engine
    from ostinato.engine.request import Chunk
    from ostinato.lab.quality import Report
    from ostinato.prompt.schema import Schema
    from ostinato.server.limits import Limits

app = typer.Typer(
    name="ostinato",
    help="An LLM server that computes the repeating parts of prompts once.",
    epilog="Start with: ostinato pull smollm2-135m, then ostinato generate smollm2-135m 'Hello!'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(schema_app, name="schema")

Model = Annotated[
    str, typer.Argument(help="A name from `ostinato models`, a Hugging Face folder, or a .gguf file.")
]
KvTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Size of the KV pool in tokens. Default: a quarter of the free memory."),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32 (exact, slower).")]


def main() -> None:
    """Run the command; what goes wrong is one line that says so, and one that says what to do."""
    try:
        app()
    except InvalidRequestError as error:
        fail(str(error), status=2)
    except ModelNotFoundError as error:
        fail(str(error), "`ostinato models` lists the models that can be pulled.")
    except OstinatoError as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ostinato {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    del version  # its callback has dealt with it


@app.command(
    epilog="Examples: ostinato serve smollm2-135m --port 8000 \n\n"
    "ostinato serve smollm2-135m --limit requests=64 --limit tokens=100000"
)
def serve(
    model: Model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8000,
    kv_tokens: KvTokens = None,
    dtype: Dtype = "auto",
    schema: Annotated[
        list[Path] | None,
        typer.Option(show_default=False, help="A PML file whose schema to register (repeat for more)."),
    ] = None,
    encode: Annotated[bool, typer.Option("--encode", help="Compute the schemas' modules at once.")] = False,
    policy: Annotated[
        str, typer.Option(help=f"Which cached blocks go first: {', '.join(POLICIES)}.")
    ] = DEFAULT_POLICY,
    record: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            show_default=False,
            help="Write what requests ask of the cache there, without their text; overwrites.",
        ),
    ] = None,
    predictor: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            show_default=False,
            help="Foretell whether sessions come back: a file of `ostinato lab train-predictor`, or a new one. "
            "It goes on learning and is saved at the end.",
        ),
    ] = None,
    ttl: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Longest that KV of a scope stays without being used, such as session=1h (repeat for more).",
        ),
    ] = None,
    release_once: Annotated[
        bool,
        typer.Option(
            "--release-once",
            help="Text in a scope of several users is found by who has sent it itself, or once two others have: nobody "
            "senses what another wrote by asking for it.",
        ),
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            show_default=False,
            help="Most that each user may have: requests=64 running and waiting at once (default: 256), tokens=100000 "
            "computed in a minute (default: any number). Repeat for both.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, as the OpenAI and the Anthropic API do.

    Once `ostinato keys create` has made a key, or `ostinato issuers add` has named whose tokens to trust, every request
    has to say who asks. Until then the server is this machine's alone.
    """
    # Ctrl-C and SIGTERM end the same way: uvicorn finishes what is in flight, and the engine is closed.
    signal.signal(signal.SIGTERM, _interrupt)
    if policy not in POLICIES:
        fail(f"There is no policy '{policy}'.", f"Choose one of {', '.join(POLICIES)}.", status=2)
    schemas = [load_schema(path) for path in schema or ()]  # so that an error in them is known as soon
    ttls, limits = _ttls(ttl or ()), _limits(limit or ())
    listener = _bind(host, port)  # before the model loads: a port in use is known in no time
    access = open_access(host)
    if record is not None:
        try:
            record.touch()
        except OSError as error:
            fail(f"Cannot write to {record}: {error.strerror}.", "Choose another file with --record.")
    try:
        with (
            access,
            open_engine(
                model,
                kv_tokens=kv_tokens,
                dtype=dtype,
                policy=policy,
                record=record,
                predictor=predictor,
                secrets=access.secrets,
                ttls=ttls,
                release_once=release_once,
            ) as engine,
        ):
            import uvicorn

            from ostinato.server.app import create_app
            from ostinato.server.listen import configured, raise_open_files

            _register(engine, schemas, encode)
            raise_open_files()
            gc.freeze()  # what is loaded by now stays: a collection that looked at it would hold everybody up
            web = create_app(engine, access, limits=limits)
            server = uvicorn.Server(configured(web, timeout_graceful_shutdown=10))
            url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
            err.print(f"Serving {escape(engine.model_name)} at {url} (Ctrl-C stops)", soft_wrap=True)
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        err.print("Stopped.")


def open_access(host: str) -> Access:
    """Who may use a server at that address; without authentication only this machine may."""
    from ostinato.access.access import Access

    access = Access()
    if not access.required and host not in LOOPBACK:
        access.close()
        fail(
            f"Nobody has a key yet, so whoever reaches {host} could use the server.",
            "`ostinato keys create --org acme --user alice` makes a key; or serve on 127.0.0.1.",
            status=2,
        )
    return access


def _ttls(texts: Iterable[str]) -> dict[Level, float]:
    """Times to live by scope, from "session=1h" and the like."""
    from ostinato.prompt.cache_control import seconds

    ttls: dict[Level, float] = {}
    for text in texts:
        name, _, duration = text.partition("=")
        level: Level | None = next((level for level in LEVELS if level == name), None)
        if level is None:
            fail(
                f"--ttl {text} names no scope.",
                f"Write {LEVELS[-1]}=1h; scopes are {', '.join(LEVELS)}.",
                status=2,
            )
        ttls[level] = seconds(duration, f"--ttl {name}")
    return ttls


def _limits(texts: Iterable[str]) -> Limits:
    """Limits, from "requests=64" and the like."""
    from ostinato.server.limits import REQUESTS, Limits

    limits: dict[str, int] = {}
    for text in texts:
        name, _, most = text.partition("=")
        if name not in ("requests", "tokens") or not (most.isascii() and most.isdigit() and int(most)):
            fail(
                f"--limit {text} is no limit.",
                "Write requests=64 or tokens=100000, with a number of 1 or more.",
                status=2,
            )
        limits[name] = int(most)
    return Limits(requests=limits.get("requests", REQUESTS), tokens=limits.get("tokens"))


def _register(engine: Engine, schemas: list[Schema], encode: bool) -> None:
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        for schema in schemas:
            task = bar.add_task(f"Encoding {escape(schema.name)}", total=None, visible=encode)
            layout = engine.register(
                schema,
                encode=encode,
                scope=Scope("public", resource=f"operator's {schema.name}"),
                progress=lambda done, total, task=task: bar.update(task, completed=done, total=total),
            )
            err.print(f"Schema {escape(schema.name)}: {layout.root.tokens:,} tokens", soft_wrap=True)


@app.command(
    epilog="Examples: ostinato generate smollm2-135m 'Why is the sky blue?' \n\n"
    "cat notes.txt | ostinato generate smollm2-135m - --max-tokens 64"
)
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from standard input.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 picks the likeliest token each time.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Ask as a chat message, or continue the bare text.")
    ] = True,
    as_json: AsJson = False,
    kv_tokens: KvTokens = None,
    dtype: Dtype = "auto",
) -> None:
    """Answer one prompt, printed as it comes; token counts and times go to standard error."""
    from ostinato.engine.request import SamplingParams

    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # an argument that is not UTF-8 comes with surrogates, which no tokenizer takes
    except UnicodeError:
        fail("The prompt is not valid UTF-8.", status=2)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_engine(model, kv_tokens=kv_tokens, dtype=dtype) as engine:
        chunks: list[Chunk] = []
        for chunk in engine.stream([{"role": "user", "content": text}] if chat else text, params):
            chunks.append(chunk)
            if not as_json:
                print(chunk.text, end="", flush=True)
        last = chunks[-1]
        if as_json:
            reply = {"text": "".join(each.text for each in chunks), "finish_reason": last.finish_reason}
            print(json.dumps(reply | {"usage": asdict(last.usage), "timing": asdict(last.timing)}))
        else:
            print()
            _print_usage(last)


def _print_usage(last: Chunk) -> None:
    usage, timing = last.usage, last.timing
    table = Table("prompt tokens", "cached", "generated", "TTFT", "tokens/s", "finish")
    decoded = usage.completion_tokens - 1  # the first token is prefill's
    table.add_row(
        str(usage.prompt_tokens),
        str(usage.cached_tokens),
        str(usage.completion_tokens),
        f"{timing.ttft * 1000:.0f} ms",
        f"{decoded / (timing.total - timing.ttft):.1f}" if decoded > 0 else "-",
        last.finish_reason,
    )
    err.print(table)


@app.command(epilog="Example: ostinato pull smollm2-135m")
def pull(name: Annotated[str, typer.Argument(help="A name from `ostinato models`.")]) -> None:
    """Fetch a model of the catalogue into the user's cache folder."""
    from ostinato.models import catalogue

    with progress_bar(f"Pulling {name}") as progress:
        path = catalogue.pull(name, progress=progress)
    print(path)


@app.command(epilog="Example: ostinato models --json")
def models(as_json: AsJson = False) -> None:
    """List the models that can be pulled, and which are here."""
    from ostinato.models.catalogue import catalogue

    entries = catalogue()
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], default=str))
        return
    table = Table("name", "size", Column("licence", overflow="fold"), "installed", "description")
    for entry in entries:
        size, installed = f"{entry.size / 2**20:.0f} MiB", "yes" if entry.path else "no"
        table.add_row(entry.name, size, entry.licence, installed, entry.description)
    Console().print(table)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio sets it for listeners of its own making alone; without it an answer in two writes waits for an ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
    except OSError as error:
        fail(f"Cannot listen on {host}:{port}: {error.strerror}.", "Choose another with --host or --port.")
    return listener


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@app.command(
    epilog="Example: ostinato quality qmsum.jsonl essays/ --questions 12 --json quality.json --plot quality.png"
)
def quality(
    data: Annotated[
        list[Path], typer.Argument(help="QMSum files (.jsonl), and folders of .txt to hide needles in.")
    ],
    model: Annotated[
        str, typer.Option(help="A name from `ostinato models`, a folder, or a .gguf file.")
    ] = "smollm2-135m",
    questions: Annotated[int, typer.Option(min=1, help="Questions of each data set.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=64, help="Most tokens of passages in a prompt.")] = 4096,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 0,
    dtype: Dtype = "auto",
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, writable=True, help="Write every measure there.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(dir_okay=False, writable=True, help="Draw the means there (needs matplotlib)."),
    ] = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="A file that --json wrote, to show beside this run (repeat for more)."),
    ] = None,
) -> None:
    """Measure how far answers on reused modules are from those of full attention."""
    from rich.progress import Progress

    with err.status("Starting PyTorch …"):
        from ostinato.lab import quality as lab

    for file in (json_file, plot):
        if file is not None and not file.absolute().parent.is_dir():
            fail(f"There is no folder {file.parent} to write {file.name} to.", status=2)
    if plot is not None:
        lab.pyplot()  # what is missing is said now, not after an hour
    try:
        reports = [lab.Report.from_json(json.loads(file.read_text())) for file in beside or ()]
    except (OSError, ValueError, TypeError, KeyError) as error:
        fail(f"--beside takes files that `ostinato quality --json` wrote: {error}", status=2)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("Asking", total=None)
        report = lab.run(
            model,
            data,
            questions=questions,
            max_tokens=max_tokens,
            dtype=dtype,
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if json_file is not None:
        json_file.write_text(json.dumps(report.to_json(), indent=1))
    for each in (*reports, report):
        _print_quality(each)
    if plot is not None:
        lab.plot([*reports, report], plot)


def _print_quality(report: Report) -> None:
    headings = ("recomputed", "KL", "95 %", "KL ratio", "top-1", "score")
    for data in dict.fromkeys(row.data for row in report.rows):
        rows = [row for row in report.rows if row.data == data]
        columns = (Column(name, justify="right", no_wrap=True) for name in headings)
        table = Table(Column("mode", no_wrap=True), *columns, box=SIMPLE)
        table.title = f"{escape(report.model)}, {report.dtype}, {escape(data)}, n = {rows[0].questions}"
        for row in rows:
            table.add_row(
                row.mode,
                f"{row.recomputed:.1%}",
                f"{row.kl:.4f}",
                f"{row.kl_interval[0]:.3f}–{row.kl_interval[1]:.3f}",
                f"{row.of_isolated:.2f}",
                f"{row.agreement:.3f}",
                "" if row.score is None else f"{row.score:.3f}",
            )
        Console().print(table)


app.add_typer(keys_app, name="keys")
app.add_typer(groups_app, name="groups")
app.add_typer(issuers_app, name="issuers")
app.command(epilog=AUDIT_EXAMPLES)(audit)
app.command(epilog=EXPLAIN_EXAMPLE)(explain)
app.command(epilog=FORGET_EXAMPLES)(forget)
app.command(epilog=EXAMPLES)(replay)
lab_app = typer.Typer(no_args_is_help=True, help="Train and measure what the server uses.")
app.add_typer(lab_app, name="lab")
lab_app.command(
    epilog="Example: ostinato lab train-predictor smollm2-135m requests.jsonl --out sessions.predictor"
)(train_predictor)


if __name__ == "__main__":
    main()
