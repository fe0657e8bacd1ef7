"""Which parts of a schema a prompt has: its imports, checked, and the members that unions have by default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ostinato.prompt.layout import Layout, Node
from ostinato.prompt.schema import Documents, Import, Item, SchemaError, SchemaPrompt, Turn, known


@dataclass
class Selection:
    """Parts of a schema by their path; the schema itself is the empty path."""

    arguments: dict[str, Mapping[str, str]] = field(default_factory=dict[str, "Mapping[str, str]"])
    """Of each present module, in the order of import."""
    where: dict[str, str] = field(default_factory=dict[str, str])
    """Where the prompt imports it, if it does."""

    def __contains__(self, path: str) -> bool:
        return path in self.arguments


def select(layout: Layout, prompt: SchemaPrompt) -> Selection:
    """The parts of the schema that are present; `SchemaError` names an import that cannot be."""
    unneeded = prompt.schema is None and not layout.schema.children
    if prompt.schema != layout.schema.name and not unneeded:
        raise SchemaError(
            f"The prompt is for the schema '{prompt.schema}', not for '{layout.schema.name}'.", prompt.where
        )
    selection = Selection()
    selection.arguments[""] = _arguments(layout.root, prompt.arguments, prompt.where)
    selection.where[""] = prompt.where
    _select(layout.root, prompt.items, selection)
    return selection


def _select(scope: Node, items: tuple[Item, ...], selection: Selection) -> None:
    chosen: dict[int, str] = {}
    for item in items:
        if isinstance(item, Turn) and scope.kind == "module":
            raise SchemaError(
                f"A turn stands inside the import of '{scope.path}'. Move it after it.", item.where
            )
        if isinstance(item, Documents):
            raise SchemaError(
                "<documents> do not go together with a schema. Leave out the prompt's schema, or make them modules.",
                item.where,
            )
        if not isinstance(item, Import):
            continue
        module = _module(scope, item)
        if module.path in selection:
            raise SchemaError(
                f"Module '{module.path}' is imported twice. Take one of the imports out.", item.where
            )
        union = scope.union_of.get(item.name)
        if union is not None:
            other = chosen.setdefault(id(union), item.name)
            if other != item.name:
                raise SchemaError(
                    f"Modules '{other}' and '{item.name}' are members of one union, of which a prompt imports one "
                    "at most. Take one of them out.",
                    item.where,
                )
        selection.arguments[module.path] = _arguments(module, item.arguments, item.where)
        selection.where[module.path] = item.where
        _select(module, item.items, selection)
    for node in scope.children:
        if node.kind == "union" and node.scaffold is not None and id(node) not in chosen:
            default = next(member for member in node.children if member.name == node.scaffold)
            selection.arguments[default.path] = {}
            _select(default, (), selection)


def _module(scope: Node, item: Import) -> Node:
    module = scope.modules.get(item.name)
    if module is not None:
        return module
    owner = f"Module '{scope.path}'" if scope.kind == "module" else f"Schema '{scope.name}'"
    elsewhere = _find(scope, item.name)
    if elsewhere is not None:
        parents = elsewhere.path.removeprefix(scope.path).strip("/").split("/")[:-1]
        nested = "".join(f"<{name}>" for name in parents) + f"<{item.name}/>"
        nested += "".join(f"</{name}>" for name in reversed(parents))
        raise SchemaError(
            f"{owner} has '{item.name}' only inside '{'/'.join(parents)}'. Write {nested}.", item.where
        )
    raise SchemaError(f"{owner} has no module '{item.name}'. {known(item.name, scope.modules)}", item.where)


def _find(scope: Node, name: str) -> Node | None:
    """The first module of a name at any depth."""
    for module in scope.modules.values():
        found = module if module.name == name else _find(module, name)
        if found is not None:
            return found
    return None


def _arguments(module: Node, arguments: tuple[tuple[str, str], ...], where: str) -> Mapping[str, str]:
    given: dict[str, str] = {}
    owner = f"Module '{module.path}'" if module.kind == "module" else f"Schema '{module.name}'"
    for name, value in arguments:
        if name not in module.parameters:
            raise SchemaError(f"{owner} has no parameter '{name}'. {known(name, module.parameters)}", where)
        if name in given:
            raise SchemaError(f"{owner} is given the argument '{name}' twice. Take one of them out.", where)
        given[name] = value
    return given
