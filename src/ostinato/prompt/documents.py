"""Documents: modules without a schema, reused by content in any order and number.

The documents of a prompt become the modules of a schema made for it, so everything said of modules holds. But
each is encoded at one place, its home, right behind the text before the documents, and is moved from there to
where it stands. So its states do not depend on which documents stand beside it, or in what order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ostinato.access.scope import PUBLIC
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.cache_control import NONE, CacheControl
from ostinato.prompt.layout import layout
from ostinato.prompt.resolve import Owner, Resolved, ReuseMode, resolve
from ostinato.prompt.schema import (
    Child,
    Documents,
    Item,
    Module,
    Role,
    Schema,
    SchemaError,
    SchemaPrompt,
    Text,
    Turn,
    use,
)
from ostinato.prompt.span import Chain, Prompt


def has_documents(prompt: SchemaPrompt) -> bool:
    return any(isinstance(item, Documents) for item in prompt.items)


def resolve_documents(
    tokenizer: Tokenizer,
    prompt: SchemaPrompt,
    *,
    mode: ReuseMode = "modular",
    link_tokens: int = 16,
    max_positions: int | None = None,
) -> Resolved:
    """The chains of a prompt with `<documents>`.

    In a conversation the documents stand in the system turn, behind its text: what is asked about them comes
    after. Otherwise they stand where they are written.
    """
    if prompt.schema is not None:
        raise SchemaError(
            "A prompt has either a schema or documents. Make the documents modules.", prompt.where
        )
    at = next(i for i, item in enumerate(prompt.items) if isinstance(item, Documents))
    before, after = prompt.items[:at], [i for i in prompt.items[at + 1 :] if not isinstance(i, Documents)]
    given = [document for item in prompt.items if isinstance(item, Documents) for document in item.documents]
    names = [f"document-{number}" for number in range(1, len(given) + 1)]
    modules = tuple(
        Module(
            name,
            (Text(f"{document.title}\n{document.text}\n\n" if document.title else f"{document.text}\n\n"),),
        )
        for name, document in zip(names, given, strict=True)
    )
    front: tuple[Child, ...]
    control = NONE
    if any(isinstance(item, Turn) for item in prompt.items):
        system, control, before = _system_text(before)
        after = [*before, *after]
        front = (Role("system", (Text(system), *modules)),)
        # Without a system text all that stands before the documents is the template's.
        scope = control.level if system else PUBLIC
    else:
        front = (Text(_text(before)), *modules) if before else modules
        scope = None if before else PUBLIC
    owners: dict[str, Owner] = {"": (scope, control.ttl)}
    for name, document in zip(names, given, strict=True):
        owners[name] = document.scope or document.control.level, document.control.ttl
    schema = Schema("documents", front)
    laid_out = layout(schema, tokenizer, max_positions=max_positions)
    made = schema.prompt(*(use(name) for name in names)).then(*after)
    resolved = resolve(laid_out, made, mode=mode, link_tokens=link_tokens, owners=owners)
    return replace(resolved, prompt=Prompt(tuple(_at_home(resolved.prompt.chains, names))))


def _at_home(chains: Sequence[Chain], names: Sequence[str]) -> Iterator[Chain]:
    """The chains, those of documents with their home, which is where the first of them stands."""
    first = next((chain for chain in chains if chain.name in names), None)
    for chain in chains:
        # Other chains of a document (its first tokens computed anew, its very last one) see more than its states do.
        if first is None or chain.sees != first.sees:
            yield chain
        elif chain.name in names:
            yield replace(chain, home=first.start)
        else:
            yield replace(chain, behind=chain.start > first.start)


def _system_text(items: tuple[Item, ...]) -> tuple[str, CacheControl, tuple[Item, ...]]:
    """Text of a leading system turn, who may reuse it, and what follows it."""
    if items and isinstance(items[0], Turn) and items[0].role == "system":
        return items[0].text + "\n\n", items[0].control, items[1:]
    return "", NONE, items


def _text(items: tuple[Item, ...]) -> str:
    return "".join(item.text for item in items if isinstance(item, Text))
