"""Schemas and their prompts as JSON.

Text is a string; everything else is an object with a `type`:

    {"name": "travel", "children": [
        "You plan trips. ",
        {"type": "module", "name": "city", "children": ["The city is ",
            {"type": "parameter", "name": "name", "length": 8}]}]}

    {"schema": "travel", "items": [
        {"type": "import", "name": "city", "arguments": {"name": "Rome"}},
        {"type": "turn", "role": "user", "text": "What shall I see?"}]}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from ostinato.prompt.schema import (
    MAX_DEPTH,
    Child,
    Document,
    Documents,
    Import,
    Item,
    Module,
    Parameter,
    Role,
    Scaffold,
    Schema,
    SchemaError,
    SchemaPrompt,
    Text,
    Turn,
    Union,
    known,
)


def dump_schema(schema: Schema) -> dict[str, Any]:
    """See `Schema.to_json`."""
    return {"name": schema.name, "children": [_dump(child) for child in schema.children]}


def dump_prompt(prompt: SchemaPrompt) -> dict[str, Any]:
    """See `SchemaPrompt.to_json`."""
    value: dict[str, Any] = {"schema": prompt.schema, "items": [_dump_item(item) for item in prompt.items]}
    if prompt.arguments:
        value["arguments"] = dict(prompt.arguments)
    return value


def load_schema(value: object) -> Schema:
    """See `Schema.from_json`."""
    fields = _Fields(value, "schema")
    return Schema(fields.text("name"), _children(fields, 0), where=fields.done())


def load_prompt(value: object) -> SchemaPrompt:
    """See `SchemaPrompt.from_json`."""
    fields = _Fields(value, "prompt")
    schema = fields.optional_text("schema")
    items = tuple(_load_item(item, where, 0) for item, where in fields.entries("items"))
    return SchemaPrompt(schema, items, fields.arguments(), where=fields.done())


def _dump(child: Child) -> str | dict[str, Any]:
    match child:
        case Text():
            return child.text
        case Module():
            value: dict[str, Any] = {"type": "module", "name": child.name}
            if not child.cache:
                value["cache"] = False
            if child.isolated:
                value["isolated"] = True
            value["children"] = [_dump(inner) for inner in child.children]
            return value
        case Union():
            scaffold = {} if child.scaffold is None else {"scaffold": child.scaffold}
            return {"type": "union", **scaffold, "children": [_dump(inner) for inner in child.children]}
        case Parameter():
            scaffold = {} if child.scaffold is None else {"scaffold": child.scaffold}
            return {"type": "parameter", "name": child.name, "length": child.length, **scaffold}
        case Scaffold():
            return {"type": "scaffold", "name": child.name, "modules": list(child.modules)}
        case Role():
            return {"type": child.role, "children": [_dump(inner) for inner in child.children]}


def _dump_item(item: Item) -> str | dict[str, Any]:
    match item:
        case Text():
            return item.text
        case Turn():
            return {"type": "turn", "role": item.role, "text": item.text}
        case Documents():
            documents = [{"title": each.title, "text": each.text} for each in item.documents]
            return {"type": "documents", "documents": documents}
        case Import():
            value: dict[str, Any] = {"type": "import", "name": item.name}
            if item.arguments:
                value["arguments"] = dict(item.arguments)
            if item.items:
                value["items"] = [_dump_item(inner) for inner in item.items]
            return value


def _children(fields: _Fields, depth: int) -> tuple[Child, ...]:
    return tuple(_load(child, where, depth + 1) for child, where in fields.entries("children"))


def _load(value: object, where: str, depth: int) -> Child:
    if isinstance(value, str):
        return Text(value)
    _check_depth(depth, where)
    fields = _Fields(value, where)
    kind = fields.text("type")
    match kind:
        case "module":
            return Module(
                fields.text("name"),
                _children(fields, depth),
                cache=fields.flag("cache", True),
                isolated=fields.flag("isolated", False),
                where=fields.done(),
            )
        case "union":
            children = _children(fields, depth)
            # Whether they are modules is for the union to say.
            return Union(
                cast("tuple[Module, ...]", children), fields.optional_text("scaffold"), where=fields.done()
            )
        case "parameter":
            length = fields.get("length")
            return Parameter(
                fields.text("name"),
                cast("int", length),
                fields.optional_text("scaffold"),
                where=fields.done(),
            )
        case "scaffold":
            names = tuple(_text(name, at) for name, at in fields.entries("modules"))
            return Scaffold(fields.text("name"), names, where=fields.done())
        case "system" | "user" | "assistant":
            return Role(kind, _children(fields, depth), where=fields.done())
        case _:
            kinds = ("module", "union", "parameter", "scaffold", "system", "user", "assistant")
            raise SchemaError(f"type '{kind}' is unknown. {known(kind, kinds)}", where)


def _load_item(value: object, where: str, depth: int) -> Item:
    if isinstance(value, str):
        return Text(value)
    _check_depth(depth, where)
    fields = _Fields(value, where)
    kind = fields.text("type")
    match kind:
        case "import":
            items = tuple(_load_item(item, at, depth + 1) for item, at in fields.entries("items"))
            return Import(fields.text("name"), fields.arguments(), items, where=fields.done())
        case "turn":
            role = fields.text("role")
            return Turn(cast("Any", role), fields.text("text"), where=fields.done())
        case "documents":
            documents: list[Document] = []
            for entry, at in fields.entries("documents"):
                inner = _Fields(entry, at)
                documents.append(Document(inner.text("text"), inner.optional_text("title") or ""))
                inner.done()
            return Documents(tuple(documents), where=fields.done())
        case _:
            raise SchemaError(
                f"type '{kind}' is unknown. {known(kind, ('import', 'turn', 'documents'))}", where
            )


def _check_depth(depth: int, where: str) -> None:
    if depth > MAX_DEPTH:
        raise SchemaError(
            f"This is nested more than {MAX_DEPTH} deep. Move inner modules further out.", where
        )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise SchemaError("This must be a string.", where)
    return value


class _Fields:
    """The entries of a JSON object, each taken once; `done` names one that nobody took."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise SchemaError('This must be a string or an object such as {"type": "module", …}.', where)
        self._left = dict(cast("Mapping[str, object]", value))
        self._taken: list[str] = []
        self._where = where

    def get(self, name: str) -> object:
        self._taken.append(name)
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        value = self.get(name)
        if not isinstance(value, str):
            raise SchemaError(f"'{name}' must be a string.", self._where)
        return value

    def optional_text(self, name: str) -> str | None:
        return self.text(name) if self._left.get(name) is not None else cast("None", self.get(name))

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise SchemaError(f"'{name}' must be true or false.", self._where)
        return value

    def entries(self, name: str) -> Iterator[tuple[object, str]]:
        value = self.get(name)
        if value is None:
            return
        if not isinstance(value, list):
            raise SchemaError(f"'{name}' must be a list.", self._where)
        for index, entry in enumerate(cast("list[object]", value)):
            yield entry, f"{self._where}.{name}[{index}]"

    def arguments(self) -> tuple[tuple[str, str], ...]:
        value = self.get("arguments")
        if value is None:
            return ()
        if not isinstance(value, Mapping):
            raise SchemaError("'arguments' must be an object of strings.", self._where)
        pairs = cast("Mapping[str, object]", value).items()
        return tuple((name, _text(text, f"{self._where}.arguments.{name}")) for name, text in pairs)

    def done(self) -> str:
        """Where this is, once all has been taken."""
        if self._left:
            name = next(iter(self._left))
            raise SchemaError(f"'{name}' is unknown here. {known(name, self._taken)}", self._where)
        return self._where
