"""Where everything in a schema stands: its text as tokens at fixed positions.

Children stand one after another. Members of a union share their start, and the union is as long as its
longest member; a parameter takes all of its length. Text that is never without its neighbours (a module's
text and the chat template's text around it, say) is tokenised as the one text it forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

from ostinato.access.scope import Scope
from ostinato.errors import InvalidRequestError
from ostinato.models.tokenizer import Tokenizer
from ostinato.prompt.cache_control import NONE, CacheControl
from ostinato.prompt.chat import TurnTexts
from ostinato.prompt.schema import (
    Child,
    Module,
    Parameter,
    Role,
    Scaffold,
    Schema,
    SchemaError,
    Text,
    Union,
)
from ostinato.prompt.span import Span, SpanKind

NodeKind = Literal["schema", "module", "union", "parameter", "role", "text"]

MAX_TEXTS = 1_000
MAX_TURNS = 256


class Part(NamedTuple):
    """Text before it is tokenised. In the template's own text special tokens' strings are those tokens."""

    text: str
    kind: SpanKind
    control: CacheControl = NONE


@dataclass(frozen=True)
class Node:
    """A part of a laid out schema, at positions `start` to `end` (excluded).

    `spans` are the tokens of a text, or of what a parameter holds by default. A role is a mark of where a
    turn begins; its text is in the texts after it.
    """

    kind: NodeKind
    name: str
    path: str
    start: int
    end: int
    children: tuple[Node, ...] = ()
    spans: tuple[Span, ...] = ()
    cache: bool = True
    isolated: bool = False
    scaffold: str | None = None
    """Of a union: the member used when none is imported."""
    scaffolds: tuple[Scaffold, ...] = ()

    @property
    def length(self) -> int:
        """Positions it takes."""
        return self.end - self.start

    @cached_property
    def tokens(self) -> int:
        """Tokens of text in it, with those of all that is nested in it."""
        own = sum(len(span.token_ids) for span in self.spans) if self.kind == "text" else 0
        return own + sum(child.tokens for child in self.children)

    @cached_property
    def modules(self) -> dict[str, Node]:
        """The modules of this scope by name, members of unions too."""
        return {node.name: node for node in _scope(self) if node.kind == "module"}

    @cached_property
    def union_of(self) -> dict[str, Node]:
        """The union that a module of this scope is a member of, by the module's name."""
        return {
            member.name: node for node in self.children if node.kind == "union" for member in node.children
        }

    @cached_property
    def parameters(self) -> dict[str, Node]:
        """The parameters of this scope by name."""
        return {node.name: node for node in self.children if node.kind == "parameter"}


@dataclass(frozen=True)
class Layout:
    """A schema laid out for one model."""

    schema: Schema
    root: Node
    tokenizer: Tokenizer
    turns: TurnTexts
    scope: Scope | None = None
    """Who may reuse the states of its modules; None for whoever asks, for itself alone."""
    ttl: float | None = None

    @property
    def length(self) -> int:
        """Positions that the schema takes."""
        return self.root.end


def layout(schema: Schema, tokenizer: Tokenizer, *, max_positions: int | None = None) -> Layout:
    """Tokenise a schema and fix its positions.

    Args:
        schema: what to lay out.
        tokenizer: of the model; its chat template renders turns.
        max_positions: of the model's context; `SchemaError` names the module that passes it.
    """
    turns = TurnTexts(tokenizer)
    root = _Scope(tokenizer, turns, schema.name, "schema", "", 0, (), max_positions).laid_out(schema.children)
    return Layout(schema, root, tokenizer, turns)


def encode(tokenizer: Tokenizer, parts: Sequence[Part]) -> tuple[Span, ...]:
    """Tokens of adjacent texts, tokenised as the one text they form where they are of one scope."""
    encoded = tokenizer.encode_parts(
        [(part.text, part.kind == "template") for part in parts], breaks=_borders(parts)
    )
    return merged(
        Span(tuple(ids), part.kind, part.control.level, part.control.ttl)
        for ids, part in zip(encoded, parts, strict=True)
    )


def _borders(parts: Sequence[Part]) -> set[int]:
    """The parts before which another scope ends: no token may hold text of both."""
    levels = [part.control.level for part in parts]
    return {i for i in range(1, len(parts)) if levels[i] != levels[i - 1]}


def merged(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Adjacent spans of one kind and scope as one, empty ones left out."""
    made: list[Span] = []
    for span in spans:
        last = made[-1] if made else None
        if last and (last.kind, last.scope, last.ttl) == (span.kind, span.scope, span.ttl):
            made[-1] = replace(span, token_ids=last.token_ids + span.token_ids)
        elif span.token_ids:
            made.append(span)
    return tuple(made)


def without_bos(tokenizer: Tokenizer, text: str) -> str:
    """Text of the template without the BOS it may begin with, for all places but the first."""
    return text.removeprefix(tokenizer.bos_token or "") if tokenizer.adds_bos else text


def _scope(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.kind == "union":
            yield from child.children
        else:
            yield child


class _Scope:
    """Lays out the content of a schema or of a module."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        turns: TurnTexts,
        name: str,
        kind: Literal["schema", "module"],
        path: str,
        start: int,
        roles: tuple[str, ...],
        max_positions: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._turns = turns
        self._name = name
        self._kind: Literal["schema", "module"] = kind
        self._path = path
        self._start = self._at = start
        self._roles = roles
        self._max_positions = max_positions
        self._nodes: list[Node] = []
        self._scaffolds: list[Scaffold] = []
        self._parts: list[Part] = []
        # Every prompt begins with BOS, whether or not a text stands at the beginning.
        self._bos: tuple[int, ...] = ()
        if kind == "schema" and tokenizer.adds_bos and tokenizer.bos_token_id is not None:
            self._bos = (tokenizer.bos_token_id,)

    def laid_out(
        self, children: Sequence[Child], *, cache: bool = True, isolated: bool = False, where: str = ""
    ) -> Node:
        self._place(children, "text" if self._kind == "schema" else "document")
        self._finish_text()
        if self._max_positions is not None and self._at > self._max_positions:
            raise SchemaError(
                f"{self._kind.capitalize()} '{self._path or self._name}' ends at position {self._at:,}, past "
                f"the model's context of {self._max_positions:,} tokens. Shorten or split it.",
                where,
            )
        texts = sum(node.kind == "text" for node in self._nodes)
        if texts > MAX_TEXTS:
            raise SchemaError(
                f"{self._kind.capitalize()} '{self._path or self._name}' has {texts:,} separate texts of its own, "
                f"each of which sees all earlier ones; {MAX_TEXTS:,} is the limit. Move them into its modules.",
                where,
            )
        return Node(
            self._kind,
            self._name,
            self._path,
            self._start,
            self._at,
            tuple(self._nodes),
            cache=cache,
            isolated=isolated,
            scaffolds=tuple(self._scaffolds),
        )

    def _place(self, children: Sequence[Child], kind: SpanKind) -> None:
        for child in children:
            match child:
                case Text():
                    self._parts.append(Part(child.text, kind))
                case Role():
                    self._turn(child)
                case Parameter():
                    self._finish_text()
                    self._parameter(child)
                case Module():
                    self._finish_text()
                    self._add(self._module(child))
                case Union():
                    self._finish_text()
                    self._union(child)
                case Scaffold():
                    self._scaffolds.append(child)

    def _turn(self, turn: Role) -> None:
        if len(self._roles) == MAX_TURNS:
            raise SchemaError(
                f"There are more than {MAX_TURNS} turns up to here. Write a long conversation as turns of the "
                "prompt.",
                turn.where,
            )
        try:
            before, after = self._turns.around(self._roles, (turn.role,))
        except InvalidRequestError as error:
            raise SchemaError(str(error), turn.where) from error
        if self._bos and not self._parts and before.startswith(self._tokenizer.bos_token or ""):
            self._bos = ()  # the template gives it
        else:
            before = without_bos(self._tokenizer, before)
        self._nodes.append(Node("role", turn.role, self._path, self._at, self._at))
        self._roles = (*self._roles, turn.role)
        self._parts.append(Part(before, "template"))
        self._place(turn.children, turn.role)
        self._parts.append(Part(after, "template"))

    def _finish_text(self) -> None:
        size = sum(len(part.text.encode()) for part in self._parts)
        if self._max_positions is not None and size > 16 * self._max_positions:
            # Megabytes take seconds to tokenise; what cannot fit is refused without.
            least = size // self._tokenizer.longest_token
            if least > self._max_positions:
                raise SchemaError(
                    f"{self._kind.capitalize()} '{self._path or self._name}' has a text of {size:,} bytes, at least {least:,} tokens, and the model's "
                    f"context has {self._max_positions:,}. Shorten or split it."
                )
        spans = encode(self._tokenizer, self._parts) if self._parts else ()
        if self._bos:
            spans = merged((Span(self._bos, "template"), *spans))
            self._bos = ()
        self._parts.clear()
        if spans:
            length = sum(len(span.token_ids) for span in spans)
            self._add(Node("text", "", self._path, self._at, self._at + length, spans=spans))

    def _parameter(self, parameter: Parameter) -> None:
        name, length = parameter.name, parameter.length
        ids = tuple(self._tokenizer.encode(parameter.scaffold or "", add_bos=False))
        if len(ids) > length:
            raise SchemaError(
                f"The scaffold of parameter '{name}' takes {len(ids)} tokens, but its length is {length}. Shorten "
                f'it, or write length="{len(ids)}".',
                parameter.where,
            )
        spans = merged([Span(ids)])
        self._add(Node("parameter", name, self._inner(name), self._at, self._at + length, spans=spans))

    def _module(self, module: Module) -> Node:
        scope = _Scope(
            self._tokenizer,
            self._turns,
            module.name,
            "module",
            self._inner(module.name),
            self._at,
            self._roles,
            self._max_positions,
        )
        return scope.laid_out(
            module.children, cache=module.cache, isolated=module.isolated, where=module.where
        )

    def _union(self, union: Union) -> None:
        members = tuple(self._module(member) for member in union.children)
        end = max(member.end for member in members)
        self._add(Node("union", "", self._path, self._at, end, members, scaffold=union.scaffold))

    def _add(self, node: Node) -> None:
        self._nodes.append(node)
        self._at = node.end

    def _inner(self, name: str) -> str:
        return f"{self._path}/{name}" if self._path else name
