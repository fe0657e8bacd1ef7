"""A laid out schema as people and programs look at it, and the chains whose cached states it is asked about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ostinato.prompt.layout import Layout, Node
from ostinato.prompt.schema import Schema
from ostinato.prompt.span import Chain, Prompt, View

Json = dict[str, Any]


def version(schema: Schema) -> str:
    """What a schema says, as a short hash: the same text has the same version wherever it is registered."""
    return hashlib.sha256(json.dumps(schema.to_json()).encode()).hexdigest()[:16]


def overview(layout: Layout) -> Json:
    """A schema without its parts."""
    return {
        "name": layout.schema.name,
        "version": version(layout.schema),
        "positions": layout.length,
        "tokens": layout.root.tokens,
        "modules": layout.schema.measure.modules,
    }


def tree(node: Node, cached: Mapping[int, int] | None = None) -> Json:
    """A part of a schema with all that is in it, and how many tokens of its text are cached.

    `cached` has those by the id of each text's node; without it nothing is said about them.
    """
    value: Json = {"kind": node.kind, "name": node.name, "start": node.start, "end": node.end}
    value["tokens"] = node.tokens
    children = [tree(child, cached) for child in node.children]
    if cached is not None:
        value["cached_tokens"] = cached.get(id(node), 0) + sum(child["cached_tokens"] for child in children)
    if node.kind == "module" and not node.cache:
        value["cache"] = False
    if node.isolated:
        value["isolated"] = True
    if node.scaffold is not None:
        value["scaffold"] = node.scaffold
    if node.scaffolds:
        value["scaffolds"] = [{"name": each.name, "modules": list(each.modules)} for each in node.scaffolds]
    return value | {"children": children} if children else value


def cacheable(layout: Layout) -> tuple[list[Node], Prompt]:
    """The texts of a schema whose states are kept, and the chain of each.

    That is the chain that prompts have of it which do not import a whole scaffold it is in. Members of a union
    stand side by side here, so the chains are none that an engine could run.
    """
    texts: list[Node] = []
    chains: list[Chain] = []

    def walk(module: Node, sees: tuple[View, ...]) -> None:
        if module.isolated:
            sees = ()
        for child in module.children:
            if child.kind == "text" and module.cache:
                texts.append(child)
                chains.append(
                    Chain(child.spans, child.start, sees, module.path, scope=layout.scope, ttl=layout.ttl)
                )
                sees = (*sees, View(len(chains) - 1))
            elif child.kind in ("module", "union"):
                for member in (child,) if child.kind == "module" else child.children:
                    walk(member, sees)

    walk(layout.root, ())
    return texts, Prompt(tuple(chains))
