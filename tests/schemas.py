"""Random schemas and prompts that fit them, a tokenizer of bytes to lay them out with, and what chains see."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.layout import Node
from ostinato.prompt.resolve import Resolved
from ostinato.prompt.schema import (
    Child,
    Import,
    Item,
    Module,
    Parameter,
    Role,
    Scaffold,
    Schema,
    SchemaPrompt,
    Text,
    Turn,
    Union,
    scope,
    scope_modules,
)
from ostinato.prompt.span import Chain, View

TEXTS = st.text(alphabet="abc \n<&>]é", min_size=1, max_size=12)


def byte_tokenizer(*, adds_bos: bool = False, chat_template: str | None = None) -> Tokenizer:
    """A token for each byte, so that tokens and text are easy to compare."""
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*special, *alphabet])}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    return Tokenizer(
        backend, adds_bos=adds_bos, bos_token_id=0, eos_token_ids=(2,), chat_template=chat_template
    )


MODULES = 40
"""About so many names, no more modules are begun: now and then a tree would have thousands, which take minutes."""


class Names:
    """Numbers for names, each given once."""

    def __init__(self) -> None:
        self.given = 0

    def __next__(self) -> int:
        self.given += 1
        return self.given - 1


@st.composite
def children(draw: st.DrawFn, names: Names, depth: int, *, roles: bool) -> tuple[Child, ...]:
    """Content of a schema or a module. Names are unique in all of it, which is more than is asked for."""
    made: list[Child] = []
    kinds = ["text", "text", "parameter", "module", "module", "union", *(["role"] if roles else [])]
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=4)):
        if kind == "text":
            # Texts next to each other are one.
            if not made or not isinstance(made[-1], Text):
                made.append(Text(draw(TEXTS)))
        elif kind == "parameter":
            default = draw(st.none() | st.text(alphabet="xy", min_size=1, max_size=3))
            made.append(Parameter(f"p{next(names)}", draw(st.integers(3, 6)), default))
        elif kind == "role":
            content = draw(children(names, depth, roles=False))
            made.append(Role(draw(st.sampled_from(["system", "user", "assistant"])), content))
        elif names.given > MODULES:
            continue
        elif depth and kind == "module":
            made.append(draw(modules(names, depth, roles=roles)))
        elif depth:
            members = [draw(modules(names, depth, roles=roles)) for _ in range(draw(st.integers(1, 3)))]
            default = draw(st.none() | st.sampled_from([member.name for member in members]))
            made.append(Union(tuple(members), default))
    return tuple(made)


@st.composite
def modules(draw: st.DrawFn, names: Names, depth: int, *, roles: bool) -> Module:
    content = draw(children(names, depth - 1, roles=roles))
    cache, isolated = draw(st.sampled_from([(True, False)] * 4 + [(False, False), (True, True)]))
    return Module(f"m{next(names)}", content, cache, isolated)


@st.composite
def schemas(draw: st.DrawFn, *, scaffolds: bool = True, roles: bool = True) -> Schema:
    """A schema of any shape, up to four levels of modules."""
    content = draw(children(Names(), 4, roles=roles))
    paths = [path for path in _paths(content) if _importable(content, path)]
    if scaffolds and len(paths) > 1 and draw(st.booleans()):
        chosen = draw(st.lists(st.sampled_from(paths), min_size=2, max_size=4, unique=True))
        if _compatible(content, chosen):
            content = (*content, Scaffold("set", tuple(chosen)))
    return Schema("s", content)


@st.composite
def prompts(draw: st.DrawFn, schema: Schema, *, whole: bool = False) -> SchemaPrompt:
    """A prompt that imports some modules, or as many as it can, in any order, with texts between them."""
    items = [*draw(_items(schema.children, whole))]
    turns = draw(st.lists(st.sampled_from([Turn("user", "hi"), Turn("assistant", "yo")]), max_size=2))
    arguments = draw(_arguments(schema.children))
    items += [*turns, *([Text("?")] if draw(st.booleans()) else [])]
    return SchemaPrompt(schema.name, tuple(items or [Text("?")]), arguments)


@st.composite
def _items(draw: st.DrawFn, content: tuple[Child, ...], whole: bool) -> tuple[Item, ...]:
    made: list[Item] = []
    taken: set[int] = set()
    for module, union in draw(st.permutations(list(scope_modules(content)))):
        if id(union) in taken or not (whole or draw(st.booleans())):
            continue
        if union is not None:
            taken.add(id(union))
        made.append(
            Import(module.name, draw(_arguments(module.children)), draw(_items(module.children, whole)))
        )
        if draw(st.integers(0, 3)) == 0:
            made.append(Text(draw(st.text(alphabet="uvw", min_size=1, max_size=5))))
    return tuple(made)


@st.composite
def _arguments(draw: st.DrawFn, content: tuple[Child, ...]) -> tuple[tuple[str, str], ...]:
    parameters = [child for child in scope(content) if isinstance(child, Parameter)]
    given = [parameter for parameter in parameters if draw(st.booleans())]
    return tuple((each.name, draw(st.text(alphabet="jk", max_size=each.length))) for each in given)


def _paths(content: tuple[Child, ...], prefix: str = "") -> Iterator[str]:
    for module, _ in scope_modules(content):
        yield prefix + module.name
        yield from _paths(module.children, f"{prefix}{module.name}/")


def _importable(content: tuple[Child, ...], path: str) -> bool:
    return _compatible(content, [path])


def _compatible(content: tuple[Child, ...], paths: list[str]) -> bool:
    """Whether the modules can be imported together: no two of them in one union."""
    chosen: dict[tuple[str, int], str] = {}
    for path in paths:
        level, prefix = content, ""
        for name in path.split("/"):
            module, union = next(found for found in scope_modules(level) if found[0].name == name)
            if union is not None and chosen.setdefault((prefix, id(union)), name) != name:
                return False
            level, prefix = module.children, f"{prefix}{name}/"
    return True


def cells(chains: tuple[Chain, ...], view: View) -> dict[int, int]:
    """Tokens by position of what a view shows."""
    chain = chains[view.chain]
    numbered = list(enumerate(chain.token_ids, chain.start))
    return dict(numbered[view.start : view.end])


def in_sight(chains: tuple[Chain, ...], index: int) -> dict[int, int]:
    """Tokens by position of what a chain sees; no position may come twice."""
    seen: dict[int, int] = {}
    for view in chains[index].sees:
        assert view.chain < index
        new = cells(chains, view)
        assert new, "an empty view"
        assert seen.keys().isdisjoint(new)
        seen |= new
    return seen


def whole(resolved: Resolved) -> list[tuple[int, int]]:
    """What the reply sees: positions and tokens."""
    chains = resolved.prompt.chains
    last = in_sight(chains, len(chains) - 1) | cells(chains, View(len(chains) - 1))
    return sorted(last.items())


def nodes(node: Node) -> Iterator[Node]:
    yield node
    for child in node.children:
        yield from nodes(child)
