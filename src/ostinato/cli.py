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
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ostinato import __version__
from ostinato.errors import InvalidRequestError, ModelNotFoundError, OstinatoError
from ostinato.terminal import err, open_engine, progress_bar

if TYPE_CHECKING:
    from ostinato.engine.request import Chunk

app = typer.Typer(
    name="ostinato",
    help="An LLM server that computes the repeating parts of prompts once.",
    epilog="Start with: ostinato pull smollm2-135m, then ostinato generate smollm2-135m 'Hello!'",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

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
    listener = _bind(host, port)  # before the model loads: a port in use is known in no time
    if host not in ("127.0.0.1", "::1", "localhost") and not api_key:
        err.print("[yellow]warning:[/] no --api-key: whoever reaches this address can use the server.")
    try:
        with open_engine(model, kv_tokens, dtype) as engine:
            import uvicorn

            from ostinato.server.app import create_app

            web = create_app(engine, api_keys=tuple(api_key or ()))
            server = uvicorn.Server(uvicorn.Config(web, timeout_graceful_shutdown=10, server_header=False))
            url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}/v1"
            err.print(f"Serving {escape(engine.model_name)} at {url} (Ctrl-C stops)", soft_wrap=True)
            server.run(sockets=[listener])
    except KeyboardInterrupt:
        err.print("Stopped.")


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


if __name__ == "__main__":
    main()
