"""The commands that look at schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from ostinato.prompt.pml import load_schema
from ostinato.remote import Remote
from ostinato.terminal import AsJson, fail, progress_bar

if TYPE_CHECKING:
    from ostinato.models.config import ModelConfig
    from ostinato.models.tokenizer import Tokenizer
    from ostinato.prompt.layout import Node

schema_app = typer.Typer(no_args_is_help=True, help="Look at schemas, the modules that prompts are made of.")

SchemaFile = Annotated[Path, typer.Argument(help="A schema in PML.", show_default=False)]


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
    found = Remote(server).get("/v1/schemas/", name, hint="POST /v1/schemas registers a schema.")
    if found["version"] != version:
        fail(f"The server has another version of schema '{name}'.", f"PUT /v1/schemas/{name} replaces it.")
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
