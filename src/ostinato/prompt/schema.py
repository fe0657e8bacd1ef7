"""Schemas: the modules a prompt may be put together from, and the prompts that import them.

A `Schema` fixes where every module stands. A `SchemaPrompt` says which of them one request imports, with
which arguments, and what text of its own it adds. Both are plain values: positions and tokens come with
`layout` and `resolve`. PML is one way to write them, Python and JSON are others.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from ostinato.access.scope import Scope
from ostinato.errors import InvalidRequestError
from ostinato.prompt.cache_control import NONE, CacheControl

RoleName = Literal["system", "user", "assistant"]

MAX_MODULES = 10_000
MAX_DEPTH = 64
MAX_SCAFFOLD = 1_000
MAX_PARAMETER_TOKENS = 1_000_000

ROLES: tuple[str, ...] = get_args(RoleName)
_RESERVED = frozenset((*ROLES, "prompt", "documents", "document"))
_NAME = re.compile(r"[^\W\d][\w.\-]*")


class SchemaError(InvalidRequestError):
    """A schema, or a prompt that uses one, is wrong; `where` is the place it was written at, if known."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


@dataclass(frozen=True)
class Text:
    """Text, taken as it stands."""

    text: str


@dataclass(frozen=True)
class Parameter:
    """`length` positions for text that the prompt gives; `scaffold` stands there when it gives none."""

    name: str
    length: int
    scaffold: str | None = None
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("parameter", self.name, self.where)
        if isinstance(self.length, bool) or not isinstance(self.length, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SchemaError(
                f"Parameter '{self.name}': length must be a whole number of tokens.", self.where
            )
        if not 1 <= self.length <= MAX_PARAMETER_TOKENS:
            raise SchemaError(
                f"Parameter '{self.name}' has length {self.length}; give the most tokens an argument may take, "
                f"1 to {MAX_PARAMETER_TOKENS:,}.",
                self.where,
            )


@dataclass(frozen=True)
class Scaffold:
    """Modules that are encoded together and used so when all of them are imported.

    `modules` are names in the scope that the scaffold stands in, or paths such as "city/paris".
    """

    name: str
    modules: tuple[str, ...]
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("scaffold", self.name, self.where)
        if len(set(self.modules)) != len(self.modules) or len(self.modules) < 2:
            raise SchemaError(
                f"Scaffold '{self.name}' must name two or more different modules, such as "
                'modules="first second".',
                self.where,
            )
        if len(self.modules) > MAX_SCAFFOLD:
            raise SchemaError(
                f"Scaffold '{self.name}' names {len(self.modules):,} modules, of which each sees all earlier "
                f"ones; {MAX_SCAFFOLD:,} is the limit. Name fewer.",
                self.where,
            )


@dataclass(frozen=True)
class _Measure:
    """What a subtree holds, kept so that limits cost nothing however deep the tree."""

    depth: int = 0
    modules: int = 0
    has_role: bool = False


@dataclass(frozen=True)
class _Container:
    """What has children; measures them once."""

    measure: _Measure = field(init=False, compare=False, repr=False)

    def _measured(self, children: Sequence[Child], where: str) -> None:
        depth = modules = 0
        has_role = isinstance(self, Role)
        for child in children:
            if isinstance(child, _Container):
                depth = max(depth, child.measure.depth)
                modules += child.measure.modules
                has_role = has_role or child.measure.has_role
            elif not isinstance(child, Text | Parameter | Scaffold):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SchemaError(
                    f"A schema is made of Text, Module, Union, Parameter, Scaffold and Role, not of {child!r}; "
                    "wrap a string in Text(...).",
                    where,
                )
        modules += isinstance(self, Module)
        # The schema itself stands at no depth.
        depth += not isinstance(self, Schema)
        if depth > MAX_DEPTH:
            raise SchemaError(
                f"The schema is nested more than {MAX_DEPTH} deep. Move inner modules further out.", where
            )
        if modules > MAX_MODULES:
            raise SchemaError(
                f"The schema has more than {MAX_MODULES:,} modules. Split it into several schemas.", where
            )
        object.__setattr__(self, "measure", _Measure(depth, modules, has_role))


@dataclass(frozen=True)
class Module(_Container):
    """Text that a prompt may import.

    Args:
        name: unique among the modules of the same parent.
        children: text, parameters, and nested modules that may be imported with it.
        cache: keep its attention states; otherwise they are computed anew, with all that precedes in sight.
        isolated: its states see nothing but the module itself.
    """

    name: str
    children: tuple[Child, ...] = ()
    cache: bool = True
    isolated: bool = False
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("module", self.name, self.where)
        if self.name in _RESERVED:
            raise SchemaError(
                f"A module cannot be called '{self.name}', which is a tag of prompts. Choose another name.",
                self.where,
            )
        self._measured(self.children, self.where)
        _check_scope(f"Module '{self.name}'", self.children)


@dataclass(frozen=True)
class Union(_Container):
    """Modules of which a prompt imports one at most; `scaffold` names the one used when it imports none.

    They share their start; the union is as long as its longest member.
    """

    children: tuple[Module, ...]
    scaffold: str | None = None
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for child in self.children:
            if not isinstance(child, Module):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise SchemaError("A union holds modules only. Put the rest into its modules.", self.where)
        if not self.children:
            raise SchemaError("A union needs a module at least. Add one, or remove the union.", self.where)
        self._measured(self.children, self.where)
        names = [module.name for module in self.children]
        if self.scaffold is not None and self.scaffold not in names:
            raise SchemaError(
                f"The union's scaffold '{self.scaffold}' is none of its modules. {known(self.scaffold, names)}",
                self.where,
            )


@dataclass(frozen=True)
class Role(_Container):
    """Content of one chat turn, which the model's chat template surrounds with its own text."""

    role: RoleName
    children: tuple[Child, ...] = ()
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SchemaError(f"Role '{self.role}' is unknown. {known(self.role, ROLES)}", self.where)
        for child in self.children:
            if isinstance(child, _Container) and child.measure.has_role:
                raise SchemaError(
                    f"Inside <{self.role}> there is another turn, and turns do not nest. Close <{self.role}> "
                    "before the next turn.",
                    self.where,
                )
        self._measured(self.children, self.where)


Child: TypeAlias = Text | Module | Union | Parameter | Scaffold | Role


@dataclass(frozen=True)
class Schema(_Container):
    """A named set of modules at fixed places; text outside of modules is present in every prompt.

    Parameters outside of modules are arguments of the prompt itself.
    """

    name: str
    children: tuple[Child, ...] = ()
    where: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        _check_name("schema", self.name, self.where)
        self._measured(self.children, self.where)
        _check_scope(f"Schema '{self.name}'", self.children)
        for child in scope(self.children):
            if isinstance(child, Parameter) and child.name == "schema":
                raise SchemaError(
                    "A parameter outside of modules cannot be called 'schema', which is what <prompt schema> "
                    "says. Choose another name.",
                    child.where,
                )

    def prompt(self, *items: Item | str, **arguments: object) -> SchemaPrompt:
        """A prompt of this schema: imports (see `use`), texts, turns; arguments of the schema's parameters."""
        return SchemaPrompt(self.name, _items(items), _arguments(arguments))

    def to_json(self) -> dict[str, Any]:
        """The schema in JSON's types."""
        from ostinato.prompt import schema_json

        return schema_json.dump_schema(self)

    @staticmethod
    def from_json(value: object) -> Schema:
        """The schema that `to_json` gave; `SchemaError` says where `value` is none."""
        from ostinato.prompt import schema_json

        return schema_json.load_schema(value)


@dataclass(frozen=True)
class Import:
    """A module that a prompt imports, with arguments, and what it imports (or says) inside of it."""

    name: str
    arguments: tuple[tuple[str, str], ...] = ()
    items: tuple[Item, ...] = ()
    where: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class Turn:
    """A chat turn of the prompt itself; it stands after all that is imported."""

    role: RoleName
    text: str
    where: str = field(default="", compare=False, repr=False)
    control: CacheControl = NONE

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SchemaError(f"Role '{self.role}' is unknown. {known(self.role, ROLES)}", self.where)


@dataclass(frozen=True)
class Document:
    """A text that is a module of its own, keyed by its content."""

    text: str
    title: str = ""
    control: CacheControl = NONE
    scope: Scope | None = None
    """Of a registered document: its own."""
    file_id: str = ""
    """Of a registered document whose text is yet to be looked up."""


@dataclass(frozen=True)
class Documents:
    """Documents in the order in which they are to stand."""

    documents: tuple[Document, ...]
    where: str = field(default="", compare=False, repr=False)


Item: TypeAlias = Text | Import | Turn | Documents


@dataclass(frozen=True)
class SchemaPrompt:
    """What one request asks: the imports, texts and turns in the order they were written."""

    schema: str | None
    """Name of the schema; None for a prompt without one (documents, texts and turns)."""
    items: tuple[Item, ...] = ()
    arguments: tuple[tuple[str, str], ...] = ()
    """For the schema's own parameters."""
    where: str = field(default="", compare=False, repr=False)

    def then(self, *items: Item | str) -> SchemaPrompt:
        """The prompt with more at its end: the next turns of a conversation, say."""
        return replace(self, items=self.items + _items(items))

    def to_json(self) -> dict[str, Any]:
        """The prompt in JSON's types."""
        from ostinato.prompt import schema_json

        return schema_json.dump_prompt(self)

    @staticmethod
    def from_json(value: object) -> SchemaPrompt:
        """The prompt that `to_json` gave; `SchemaError` says where `value` is none."""
        from ostinato.prompt import schema_json

        return schema_json.load_prompt(value)


def use(name: str, *items: Item | str, **arguments: object) -> Import:
    """An import for `Schema.prompt`: `use("city", use("paris"), days=3)`."""
    return Import(name, _arguments(arguments), _items(items))


def user(text: str) -> Turn:
    """A user's turn for `Schema.prompt`."""
    return Turn("user", text)


def assistant(text: str) -> Turn:
    """An assistant's turn for `Schema.prompt`."""
    return Turn("assistant", text)


def scope(children: Iterable[Child]) -> Iterator[Child]:
    """What belongs to one scope: `children`, and those of roles among them (roles have no names)."""
    for child in children:
        yield child
        if isinstance(child, Role):
            yield from scope(child.children)


def scope_modules(children: Iterable[Child]) -> Iterator[tuple[Module, Union | None]]:
    """The modules that can be imported by name in a scope, and the union each is a member of."""
    for child in scope(children):
        if isinstance(child, Module):
            yield child, None
        elif isinstance(child, Union):
            for member in child.children:
                yield member, child


def known(name: str, names: Iterable[str]) -> str:
    """What there is instead of `name`: the nearest name, or all of them."""
    names = list(names)
    if near := difflib.get_close_matches(name, names[:1000], n=1):
        return f"Did you mean '{near[0]}'?"
    if not names:
        return "There is none."
    more = f" and {len(names) - 12:,} more" if len(names) > 12 else ""
    return f"There is {', '.join(names[:12])}{more}."


def _items(items: Iterable[Item | str]) -> tuple[Item, ...]:
    made = tuple(Text(item) if isinstance(item, str) else item for item in items)
    for item in made:
        if not isinstance(item, Text | Import | Turn | Documents):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise SchemaError(
                f"A prompt is made of strings, use(...), user(...) and the like, not of {item!r}."
            )
    return made


def _arguments(arguments: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in arguments.items())


def _check_name(kind: str, name: object, where: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = f"'{name}'" if name else "an empty name"
        raise SchemaError(
            f"{shown} cannot name a {kind}. A name starts with a letter or '_' and goes on with letters, digits, "
            "'_', '-' and '.'.",
            where,
        )


def _check_scope(owner: str, children: tuple[Child, ...]) -> None:
    """Names are unique within a scope, and scaffolds name modules that can be imported together."""
    modules: dict[str, tuple[Module, Union | None]] = {}
    parameters: set[str] = set()
    scaffolds: set[str] = set()
    for module, union in scope_modules(children):
        _check_unique(owner, "module", module.name, module.where, modules)
        modules[module.name] = module, union
    for child in scope(children):
        if isinstance(child, Parameter):
            _check_unique(owner, "parameter", child.name, child.where, parameters)
            parameters.add(child.name)
        elif isinstance(child, Scaffold):
            _check_unique(owner, "scaffold", child.name, child.where, scaffolds)
            scaffolds.add(child.name)
            _check_scaffold(child, modules)


def _check_unique(owner: str, kind: str, name: str, where: str, names: Container[str]) -> None:
    if name in names:
        raise SchemaError(f"{owner} has two {kind}s '{name}'. Rename one of them.", where)


def _check_scaffold(scaffold: Scaffold, here: Mapping[str, tuple[Module, Union | None]]) -> None:
    chosen: dict[tuple[str, int], tuple[str, str]] = {}
    for path in scaffold.modules:
        found, prefix = here, ""
        for name in path.split("/"):
            if name not in found:
                raise SchemaError(
                    f"Scaffold '{scaffold.name}' names the module '{path}', which is not here. "
                    f"{known(name, found)}",
                    scaffold.where,
                )
            module, union = found[name]
            if union is not None:
                other, its_path = chosen.setdefault((prefix, id(union)), (name, path))
                if other != name:
                    raise SchemaError(
                        f"Scaffold '{scaffold.name}' names '{its_path}' and '{path}', of which a prompt can "
                        f"import one only: '{other}' and '{name}' are members of one union. Take one of them out.",
                        scaffold.where,
                    )
            found = {member.name: (member, its) for member, its in scope_modules(module.children)}
            prefix += name + "/"
