"""The registry: schemas by name, laid out for one model."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

from ostinato.access.scope import Scope
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.documents import has_documents, resolve_documents
from ostinato.prompt.layout import Layout, layout
from ostinato.prompt.pml import load_schema, parse_schema
from ostinato.prompt.resolve import Resolved, ReuseMode, resolve
from ostinato.prompt.schema import Module, Schema, SchemaError, SchemaPrompt, Union, known, use


class Registry:
    """Safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._max_positions = max_positions
        self._layouts: dict[str, Layout] = {}
        self._lock = threading.Lock()
        self._bare = layout(Schema("none"), tokenizer)

    def lay_out(self, schema: Schema | str | Path, scope: Scope | None = None) -> Layout:
        """The layout of a schema given as PML text, as a path to a PML file, or typed. Nothing is kept.

        Raises:
            SchemaError: it is malformed.
        """
        if isinstance(schema, Path):
            schema = load_schema(schema)
        elif isinstance(schema, str):
            schema = parse_schema(schema) if "<" in schema else load_schema(Path(schema))
        return replace(layout(schema, self._tokenizer, max_positions=self._max_positions), scope=scope)

    def register(self, laid_out: Layout) -> Layout | None:
        """Keep a schema under its name. Returns the one of that name that it replaces, if there was one."""
        with self._lock:
            replaced = self._layouts.get(laid_out.schema.name)
            self._layouts[laid_out.schema.name] = laid_out
            return replaced

    def get(self, name: str) -> Layout:
        """The layout of a schema; SchemaError if there is none of that name."""
        with self._lock:
            if name not in self._layouts:
                raise SchemaError(f"There is no schema {name!r}. {known(name, self._layouts)}")
            return self._layouts[name]

    def remove(self, name: str) -> Layout:
        """Forget a schema, which is returned; SchemaError if there is none of that name."""
        found = self.get(name)
        with self._lock:
            self._layouts.pop(name, None)
        return found

    def names(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(sorted(self._layouts))

    def resolve(
        self, prompt: SchemaPrompt, mode: ReuseMode, link_tokens: int, over: Layout | None = None
    ) -> Resolved:
        """The chains of a prompt over `over`, or else over the schema of the name it gives, or over none."""
        if has_documents(prompt):
            return resolve_documents(
                self._tokenizer, prompt, mode=mode, link_tokens=link_tokens, max_positions=self._max_positions
            )
        if over is None:
            over = self._bare if prompt.schema is None else self.get(prompt.schema)
        else:
            prompt = replace(prompt, schema=over.schema.name)  # it may be named by its id
        return resolve(over, prompt, mode=mode, link_tokens=link_tokens)


def module_prompts(schema: Schema) -> list[SchemaPrompt]:
    """Prompts that between them import every cached module of `schema`."""
    prompts: list[SchemaPrompt] = []

    def visit(children: tuple[object, ...], outer: tuple[str, ...]) -> None:
        for child in children:
            if isinstance(child, Module):
                path = (*outer, child.name)
                if child.cache:
                    item = use(path[-1])
                    for name in reversed(path[:-1]):
                        item = use(name, item)
                    prompts.append(schema.prompt(item))
                visit(child.children, path)
            elif isinstance(child, Union):
                visit(child.children, outer)
            elif hasattr(child, "children"):
                visit(child.children, outer)  # pyright: ignore[reportAttributeAccessIssue]

    visit(schema.children, ())
    return prompts or [schema.prompt()]
