"""The `ostinato` command.

PyTorch takes seconds to import, so the engine and the server are imported inside the commands that need
them: `ostinato --help` and `ostinato models` answer at once.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.tree import Tree

from ostinato import __version__
from ostinato.access.cli import AUDIT_EXAMPLES, audit, groups_app, issuers_app, keys_app
from ostinato.cache.policy import DEFAULT_POLICY, POLICIES
from ostinato.errors import InvalidRequestError, ModelNotFoundError, OstinatoError
from ostinato.lab.cli import EXAMPLES, replay, train_predictor
from ostinato.prompt.pml import load_schema
from ostinato.terminal import err, open_engine, progress_bar

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine
    from ostinato.engine.request import Chunk
    from ostinato.lab.quality import Report
    from ostinato.models.config import ModelConfig
    from ostinato.models.tokenizer import Tokenizer
    from ostinato.prompt.layout import Node
    from ostinato.prompt.schema import Schema

app = typer.Typer(
    name="ostinato",
    help="An LLM server that computes the repeating parts of prompts once.",
    epilog="Start with: ostinato pull smollm2-135m, then ostinato generate smollm2-135m 'Hello!'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

schema_app = typer.Typer(no_args_is_help=True, help="Look at schemas, the modules that prompts are made of.")
app.add_typer(schema_app, name="schema")

SchemaFile = Annotated[Path, typer.Argument(help="A schema in PML.", show_default=False)]
Model = Annotated[
    str, typer.Argument(help="A name from `ostinato models`, a Hugging Face folder, or a .gguf file.")
]
KvTokens = Annotated[
    int | None,
    typer.Option(min=1, help="Size of the KV pool in tokens. Default: a quarter of the free memory."),
]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16 or float32 (exact, slower).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command; what goes wrong is one line that says so, and one that says what to do."""
    try:
        app()
    except InvalidRequestError as error:
        _fail(str(error), status=2)
    except ModelNotFoundError as error:
        _fail(str(error), "`ostinato models` lists the models that can be pulled.")
    except OstinatoError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, hint: str | None = None, status: int = 1) -> NoReturn:
    err.print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
    if hint:
        err.print(f"[dim]hint:[/] {escape(hint)}", highlight=False, soft_wrap=True)
    sys.exit(status)


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


@app.command(epilog="Example: ostinato serve smollm2-135m --port 8000")
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
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="OSTINATO_API_KEY",
            show_default=False,
            help="A key that clients must send (repeat for more). The variable keeps it out of `ps`.",
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does."""
    # Ctrl-C and SIGTERM end the same way: uvicorn finishes what is in flight, and the engine is closed.
    signal.signal(signal.SIGTERM, _interrupt)
    if policy not in POLICIES:
        _fail(f"There is no policy '{policy}'.", f"Choose one of {', '.join(POLICIES)}.", status=2)
    schemas = [load_schema(path) for path in schema or ()]  # so that an error in them is known as soon
    listener = _bind(host, port)  # before the model loads: a port in use is known in no time
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        err.print("[yellow]warning:[/] no --api-key: whoever reaches this address can use the server.")
    if record is not None:
        try:
            record.touch()
        except OSError as error:
            _fail(f"Cannot write to {record}: {error.strerror}.", "Choose another file with --record.")
    try:
        with open_engine(model, kv_tokens, dtype, policy, record, predictor) as engine:
            import uvicorn

            from ostinato.server.app import create_app

            _register(engine, schemas, encode)
            web = create_app(engine, api_keys=tuple(api_key or ()))
            server = uvicorn.Server(uvicorn.Config(web, timeout_graceful_shutdown=10, server_header=False))
            url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
            err.print(f"Serving {escape(engine.model_name)} at {url} (Ctrl-C stops)", soft_wrap=True)
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        err.print("Stopped.")


def _register(engine: Engine, schemas: list[Schema], encode: bool) -> None:
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        for schema in schemas:
            task = bar.add_task(f"Encoding {escape(schema.name)}", total=None, visible=encode)
            layout = engine.register(
                schema,
                encode=encode,
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
        _fail("The prompt is not valid UTF-8.", status=2)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    with open_engine(model, kv_tokens, dtype) as engine:
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


@schema_app.command(epilog="Example: ostinato schema check travel.pml")
def check(file: SchemaFile) -> None:
    """Check a schema in PML; an error says the line, the column, and what to write instead."""
    schema = load_schema(file)
    modules = schema.measure.modules
    print(f"{file}: schema '{schema.name}' is sound ({modules:,} module{'s' if modules != 1 else ''}).")


@schema_app.command(epilog="Example: ostinato schema show travel.pml --model smollm2-135m")
def show(
    file: SchemaFile,
    model: Annotated[str, typer.Option(help="Whose tokenizer and sizes to use; its weights are not read.")],
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Of the KV.")] = "bfloat16",
    server: Annotated[
        str | None, typer.Option(help="Address of a server that has the schema: shows what is cached there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where everything in a schema stands: positions, tokens, bytes of KV, and what a server has cached."""
    from ostinato.models import catalogue
    from ostinato.prompt.layout import layout
    from ostinato.prompt.report import overview, tree, version

    schema = load_schema(file)
    with progress_bar(f"Pulling {model}") as progress:
        path = catalogue.resolve(model, progress=progress)
    config, tokenizer = _config_and_tokenizer(path)
    laid_out = layout(schema, tokenizer, max_positions=config.context_length)
    elements = 2 * len(config.layers) * config.kv_heads * config.head_dim
    token_bytes = elements * (2 if dtype == "bfloat16" else 4)
    found = None if server is None else _of_server(server, schema.name, version(schema))
    if as_json:
        shown = found["tree"] if found else tree(laid_out.root)
        print(json.dumps(overview(laid_out) | {"kv_bytes_per_token": token_bytes, "tree": shown}))
        return
    drawn = Tree(_label(laid_out.root, found and found["tree"], tokenizer, token_bytes))
    _grow(drawn, laid_out.root, found and found["tree"], tokenizer, token_bytes)
    Console().print(drawn, highlight=False)


def _of_server(server: str, name: str, version: str) -> dict[str, Any]:
    """What a server says of a schema, if it has this version of it."""
    import os
    from urllib.error import URLError
    from urllib.parse import quote
    from urllib.request import Request, urlopen

    url = f"{server.rstrip('/').removesuffix('/v1')}/v1/schemas/{quote(name, safe='')}"
    if not url.startswith(("http://", "https://")):
        _fail(f"'{server}' is no address of a server.", "Write http://127.0.0.1:8000", status=2)
    key = os.environ.get("OSTINATO_API_KEY")
    try:
        with urlopen(
            Request(url, headers={"Authorization": f"Bearer {key}"} if key else {}), timeout=10
        ) as reply:
            found: dict[str, Any] = json.load(reply)
    except (URLError, ValueError) as error:
        _fail(
            f"{url} cannot be read: {error}.",
            "Is the schema registered there? POST /v1/schemas registers it.",
        )
    if found["version"] != version:
        _fail(f"The server has another version of schema '{name}'.", f"PUT {url} replaces it.")
    return found


def _config_and_tokenizer(path: Path) -> tuple[ModelConfig, Tokenizer]:
    """What a model's files say of it, without its weights (and so without PyTorch)."""
    from ostinato.models.config_readers import config_from_gguf, config_from_hf
    from ostinato.models.gguf_file import GGUFFile
    from ostinato.models.tokenizer import Tokenizer

    if path.is_dir():
        tokenizer = Tokenizer.from_path(path)
        return config_from_hf(json.loads((path / "config.json").read_text("utf-8"))), tokenizer
    metadata = GGUFFile(path).metadata
    return config_from_gguf(metadata), Tokenizer.from_gguf_metadata(metadata)


def _grow(
    branch: Tree, node: Node, found: dict[str, Any] | None, tokenizer: Tokenizer, token_bytes: int
) -> None:
    for number, child in enumerate(node.children):
        same = found and found["children"][number]
        _grow(branch.add(_label(child, same, tokenizer, token_bytes)), child, same, tokenizer, token_bytes)


def _label(node: Node, found: dict[str, Any] | None, tokenizer: Tokenizer, token_bytes: int) -> str:
    """One line about a part of a schema; `found` is what a server says of it."""
    name = node.name
    if node.kind == "text":
        text = " ".join(tokenizer.decode([i for span in node.spans for i in span.token_ids]).split())
        name = f'"{text if len(text) <= 30 else text[:29] + "…"}"'
    flags = [] if node.cache else ["not cached"]
    flags += ["isolated"] if node.isolated else []
    flags += [f"scaffold {node.scaffold}"] if node.scaffold is not None else []
    flags += [f"scaffold {each.name}: {', '.join(each.modules)}" for each in node.scaffolds]
    label = f"[bold]{node.kind}[/] {escape(name)}" if name else f"[bold]{node.kind}[/]"
    if node.kind != "role":
        kept = f", {_size(node.tokens * token_bytes)} of KV" if node.tokens else ""
        cached = f", {found['cached_tokens']:,} cached" if found else ""
        label += f" [dim]at {node.start:,} to {node.end:,}: {node.tokens:,} tokens{kept}{cached}[/]"
    return label + (f" [yellow]{escape('; '.join(flags))}[/]" if flags else "")


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        _fail(f"Cannot listen on {host}:{port}: {error.strerror}.", "Choose another with --host or --port.")
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
            _fail(f"There is no folder {file.parent} to write {file.name} to.", status=2)
    if plot is not None:
        lab.pyplot()  # what is missing is said now, not after an hour
    try:
        reports = [lab.Report.from_json(json.loads(file.read_text())) for file in beside or ()]
    except (OSError, ValueError, TypeError, KeyError) as error:
        _fail(f"--beside takes files that `ostinato quality --json` wrote: {error}", status=2)
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
app.command(epilog=EXAMPLES)(replay)
lab_app = typer.Typer(no_args_is_help=True, help="Train and measure what the server uses.")
app.add_typer(lab_app, name="lab")
lab_app.command(
    epilog="Example: ostinato lab train-predictor smollm2-135m requests.jsonl --out sessions.predictor"
)(train_predictor)


if __name__ == "__main__":
    main()
