"""From a schema's layout and a prompt that imports from it to chains: who stands where and sees whom.

A module's text is encoded with nothing in sight but the text that is never absent when it is present, so
that its states are the same in every prompt. What belongs to one prompt alone (arguments, texts, turns,
modules that are not cached) sees everything before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ostinato.access.scope import Level, Scope
from ostinato.errors import InvalidRequestError
from ostinato.prompt.imports import Selection, select
from ostinato.prompt.layout import Layout, Node, Part, encode, merged, without_bos
from ostinato.prompt.schema import Import, Item, SchemaError, SchemaPrompt, Text, Turn
from ostinato.prompt.span import Chain, Prompt, Span, View, plain

ReuseMode = Literal["exact", "modular", "linked"]
PieceKind = Literal["schema", "module", "argument", "text"]
Place = Literal["fixed", "gap", "end"]
Owner = tuple[Level | Scope | None, float | None]
"""Who may reuse a text, and for how long; None for what the whole request has."""


@dataclass(frozen=True)
class Placement:
    """Where a part of the prompt stands: what the report tells.

    `place` is "fixed" for what the schema places; a text of the prompt stands in the "gap" that it was
    written in, or at the "end" where that was too small. In mode `exact` positions are those of `modular`
    with the gaps closed, so only the order of placements counts.
    """

    kind: PieceKind
    name: str
    start: int
    end: int
    place: Place
    cached: bool


@dataclass(frozen=True)
class Resolved:
    """A prompt as the engine takes it, and where its parts stand."""

    prompt: Prompt
    placements: tuple[Placement, ...]


def resolve(
    layout: Layout,
    prompt: SchemaPrompt,
    *,
    mode: ReuseMode = "modular",
    link_tokens: int = 16,
    owners: Mapping[str, Owner] | None = None,
) -> Resolved:
    """The chains of a prompt.

    Args:
        layout: of the prompt's schema.
        prompt: what to import, with arguments, texts and turns.
        mode: "exact" is one chain of all the text; "modular" has a chain for each text of a module, and
            "linked" computes the first tokens of each module anew with everything before them in sight.
        link_tokens: how many those are.
        owners: of the texts of modules, by their paths; the schema's own has "". The layout's own by default.
    """
    if link_tokens < 1:
        raise SchemaError(f"link_tokens must be 1 or more, not {link_tokens}.")
    pieces = _Pieces(layout, select(layout, prompt), owners or {})
    pieces.add_texts(prompt)
    ordered = sorted(pieces.all, key=lambda piece: piece.start)
    if not ordered:
        raise SchemaError("The prompt is empty: it imports nothing and says nothing.", prompt.where)
    placements = tuple(piece.placement() for piece in ordered)
    if mode == "exact":
        return Resolved(plain(*merged(span for piece in ordered for span in piece.spans)), placements)
    return Resolved(Prompt(_chains(ordered, link_tokens if mode == "linked" else 0)), placements)


@dataclass(eq=False)
class _Piece:
    """Tokens that stand together."""

    kind: PieceKind
    name: str
    start: int
    spans: tuple[Span, ...]
    sees: tuple[_Piece, ...] | None = None
    """What its states were computed with; None for all that precedes."""
    place: Place = "fixed"
    linked: bool = False
    """Whether its first tokens are recomputed in mode `linked`."""

    @property
    def length(self) -> int:
        return sum(len(span.token_ids) for span in self.spans)

    @property
    def end(self) -> int:
        return self.start + self.length

    def placement(self) -> Placement:
        return Placement(self.kind, self.name, self.start, self.end, self.place, self.sees is not None)


@dataclass
class _Unit:
    """Texts and turns of the prompt that no import separates, and where the imports before them end."""

    items: list[Text | Turn]
    cursor: int

    @property
    def has_turn(self) -> bool:
        return any(isinstance(item, Turn) for item in self.items)


class _Pieces:
    """Collects the pieces of a prompt, in the order of positions but for the prompt's own texts."""

    def __init__(self, layout: Layout, selection: Selection, owners: Mapping[str, Owner]) -> None:
        self._layout = layout
        self._owners = owners
        self._tokenizer = layout.tokenizer
        self._selection = selection
        self._roles: list[str] = []
        self._groups: dict[str, list[_Piece]] = {}
        """Earlier pieces of the scaffold that a module is encoded in, by the module's path."""
        self._ends: dict[str, int] = {}
        """Where what is present of a module ends."""
        self._taken: list[tuple[int, int]] = []
        self._last_gap_end = 0
        self.all: list[_Piece] = []
        self._walk(layout.root, ())

    def _walk(self, node: Node, seen: tuple[_Piece, ...]) -> int:
        """Add what is present of a module that sees `seen`; return where it ends."""
        self._find_scaffolds(node)
        if node.isolated:
            seen = ()
        end = node.start
        first = True
        for child in node.children:
            match child.kind:
                case "text":
                    piece = self._text(node, child, seen, first)
                    if node.cache:
                        # A module that is not cached is seen by none that is: its states are new each time.
                        seen = (*seen, piece)
                    first = False
                    end = piece.end
                case "parameter":
                    self._argument(node, child)
                    end = child.end
                case "module" | "union":
                    for member in (child,) if child.kind == "module" else child.children:
                        if member.path in self._selection:
                            end = self._walk(member, seen)
                case _:
                    self._roles.append(child.name)
        self._ends[node.path] = end
        return end

    def _find_scaffolds(self, node: Node) -> None:
        prefix = f"{node.path}/" if node.path else ""
        for scaffold in node.scaffolds:
            paths = [prefix + path for path in scaffold.modules]
            if all(path in self._selection and path not in self._groups for path in paths):
                group: list[_Piece] = []
                self._groups |= dict.fromkeys(paths, group)

    def _text(self, module: Node, text: Node, seen: tuple[_Piece, ...], first: bool) -> _Piece:
        kind: PieceKind = "module" if module.kind == "module" else "schema"
        piece = _Piece(kind, module.path, text.start, self._owned(module, text.spans))
        self._taken.append((text.start, text.end))
        self.all.append(piece)
        if module.cache:
            group = self._groups.get(module.path)
            piece.sees = seen
            if group is not None:
                piece.sees = tuple(sorted({*seen, *group}, key=lambda other: other.start))
                group.append(piece)
            piece.linked = first and kind == "module"
        return piece

    def _argument(self, module: Node, parameter: Node) -> None:
        text = self._selection.arguments[module.path].get(parameter.name)
        self._taken.append((parameter.start, parameter.end))
        spans = self._owned(module, parameter.spans)
        if text is not None:
            ids = tuple(self._tokenizer.encode(text, add_bos=False))
            if len(ids) > parameter.length:
                owner = f"module '{module.path}'" if module.path else f"schema '{module.name}'"
                raise SchemaError(
                    f"The argument '{parameter.name}' of {owner} takes {len(ids)} tokens, more than the "
                    f"{parameter.length} of its parameter. Shorten it, or raise the parameter's length.",
                    self._selection.where.get(module.path, ""),
                )
            spans = merged([Span(ids)])
        if spans:
            self.all.append(_Piece("argument", parameter.path, parameter.start, spans))

    def _owned(self, module: Node, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The schema's own text with its scope and time to live, whatever mode and place it is computed in."""
        scope, ttl = self._owners.get(module.path, (self._layout.scope, self._layout.ttl))
        return tuple(replace(span, scope=scope, ttl=ttl) for span in spans)

    def add_texts(self, prompt: SchemaPrompt) -> None:
        """Place the texts and turns of the prompt, and the beginning of the reply if it is a chat."""
        self._taken.sort()
        root = self._layout.root
        units = self._units(root, prompt.items, [_Unit([], _lead_end(root))])
        for unit in units:
            parts = self._rendered(unit.items)
            replies = unit is units[-1] and unit.has_turn
            if replies:
                parts.append(self._reply())
            self._place(unit, encode(self._tokenizer, parts))
        if self._roles and not (units and units[-1].has_turn):
            reply = _Unit([Turn("assistant", "")], 0)
            self._place(reply, encode(self._tokenizer, [self._reply()]))

    def _units(self, scope: Node, items: Sequence[Item], units: list[_Unit]) -> list[_Unit]:
        for item in items:
            if isinstance(item, Text | Turn):
                units[-1].items.append(item)
            elif isinstance(item, Import):
                module = scope.modules[item.name]
                units.append(_Unit([], max(units[-1].cursor, _lead_end(module))))
                self._units(module, item.items, units)
                units.append(_Unit([], max(units[-1].cursor, self._ends[module.path])))
        return [unit for unit in units if unit.items] if scope is self._layout.root else units

    def _rendered(self, items: Sequence[Text | Turn]) -> list[Part]:
        parts: list[Part] = []
        at = 0
        while at < len(items):
            item = items[at]
            if isinstance(item, Text):
                parts.append(Part(item.text, "text"))
                at += 1
                continue
            run: list[Turn] = []
            while at < len(items) and isinstance(turn := items[at], Turn):
                run.append(turn)
                at += 1
            roles = [turn.role for turn in run]
            try:
                before, *after = self._layout.turns.around(self._roles, roles)
            except InvalidRequestError as error:
                raise SchemaError(str(error), run[0].where) from error
            parts.append(Part(without_bos(self._tokenizer, before), "template"))
            for turn, text in zip(run, after, strict=True):
                parts.append(Part(turn.text, turn.role, turn.control))
                parts.append(Part(text, "template"))
            self._roles += roles
        return parts

    def _reply(self) -> Part:
        return Part(without_bos(self._tokenizer, self._layout.turns.reply(self._roles)), "template")

    def _place(self, unit: _Unit, spans: tuple[Span, ...]) -> None:
        length = sum(len(span.token_ids) for span in spans)
        if not length:
            return
        place: Place = "end"
        start = self._taken[-1][1] if self._taken else 0
        # Texts that share a gap stand there in their order.
        cursor = max(unit.cursor, self._last_gap_end)
        index = bisect.bisect_left(self._taken, (cursor, 0))
        if not unit.has_turn and index < len(self._taken) and cursor + length <= self._taken[index][0]:
            place, start = "gap", cursor
            self._last_gap_end = cursor + length
        bisect.insort(self._taken, (start, start + length))
        self.all.append(_Piece("text", _shown(unit.items), start, spans, place=place))


def _lead_end(node: Node) -> int:
    """Where the text ends that a module, or the schema, begins with."""
    first = next((child for child in node.children if child.kind != "role"), None)
    return first.end if first is not None and first.kind == "text" else node.start


def _shown(items: Sequence[Text | Turn]) -> str:
    """The beginning of a text, as a report shows it."""
    text = " ".join(" ".join(item.text for item in items).split())
    return text if len(text) <= 40 else text[:39] + "…"


def _chains(pieces: Sequence[_Piece], link_tokens: int) -> tuple[Chain, ...]:
    """Pieces in order of position as chains, the last of which sees everything before it."""
    pieces = _joined(pieces)
    seen = {id(other) for piece in pieces for other in piece.sees or ()}
    chains: list[Chain] = []
    number: dict[int, int] = {}
    # Pieces mostly see the same as their neighbours.
    views: dict[int, tuple[View, ...]] = {}
    everything: list[View] = []
    for piece in pieces:
        before = tuple(everything)
        last = piece is pieces[-1]
        if piece.sees is None:
            sees = before
        else:
            sees = views.get(id(piece.sees))
            if sees is None:
                sees = views[id(piece.sees)] = tuple(View(number[id(other)]) for other in piece.sees)
        name = piece.name if piece.kind == "module" else ""
        length, index = piece.length, len(chains)
        links = 0 if sees == before or not piece.linked else min(link_tokens, length)
        replaced = links == length and id(piece) not in seen
        # What is computed for this prompt alone: nothing, the first tokens, the very last one, or all.
        last_alone = last and sees != before and links < length
        if not replaced and not (last_alone and length == 1):
            number[id(piece)] = index
            chains.append(Chain(piece.spans, piece.start, sees, name=name))
        if last_alone and length == 1:
            links, last_alone = 1, False
        if links:
            everything.append(View(len(chains)))
            chains.append(Chain(_cut(piece.spans, 0, links), piece.start, before, name=name))
        end = length - 1 if last_alone else None
        if links < (length if end is None else end):
            everything.append(View(index, links, end))
        if last_alone:
            spans = _cut(piece.spans, length - 1, length)
            chains.append(Chain(spans, piece.end - 1, tuple(everything), name=name))
    return tuple(chains)


def _joined(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The pieces, with texts of the prompt that follow each other as one."""
    joined: list[_Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.kind == piece.kind == "text" and last.end == piece.start:
            joined[-1] = _Piece("text", last.name, last.start, merged((*last.spans, *piece.spans)))
        else:
            joined.append(piece)
    return joined


def _cut(spans: Sequence[Span], start: int, end: int) -> tuple[Span, ...]:
    """Tokens number `start` to `end` (excluded)."""
    made: list[Span] = []
    at = 0
    for span in spans:
        inside = span.token_ids[max(0, start - at) : max(0, end - at)]
        if inside:
            made.append(replace(span, token_ids=inside))
        at += len(span.token_ids)
    return tuple(made)
