"""Advice: what would make the next request like one that missed cheaper. It tells kinds and counts, never text."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from ostinato.cache.use import INSTRUCTIONS, TokenType
from ostinato.engine.change import changing

LOOKED_AT = 4096
"""Tokens of either sequence in which stretches that are the same are looked for."""
WORTH = 64
"""With fewer tokens to gain there is no advice that tells of them."""
SMALL = 32
"""A change of up to so many tokens is told as one thing that changed."""

_SLACK = 4
"""Tokens that may be others where a text is cut."""
_GRAIN = 8
"""Any stretch of so many tokens is found, wherever it stands in both sequences."""
_TRIED = 4
"""Places tried where a piece stands several times."""


@dataclass(frozen=True)
class After:
    """What of two sequences is the same behind the place where they part."""

    unchanged: int = 0
    """Tokens of the longest stretch that is the same in both."""
    mine: int = 0
    """Tokens of the new sequence before that stretch: what changed, or all of it."""
    cached: int = 0
    """Tokens of the earlier sequence before that stretch."""
    reordered: int = 0
    """Tokens of pieces that both have, in another order."""
    whole: bool = False
    """Whether all of both was compared and enough of the earlier one is known: there is nothing else to gain."""


@dataclass(frozen=True)
class Divergence:
    """A prompt that goes on in another way than what is cached."""

    kind: TokenType
    at: int
    """Number of the prompt's first token that differs."""
    tokens: int
    """How many had to be computed."""
    before: str = ""
    """The text before that token,"""
    mine: str = ""
    """how the prompt goes on,"""
    cached: str = ""
    """and how what is cached goes on, where that is the asker's own."""
    after: After | None = None
    """What is the same further on, where what is cached is the asker's own."""


@dataclass(frozen=True)
class Loss:
    """Tokens that were there once, or are there for others, and had to be computed."""

    reason: Literal["evicted", "expired", "scope", "caching off"]
    tokens: int = 0
    slots: int = 0
    """Of the whole cache."""
    scope: str = ""
    """The asker's other scope in which the text is cached."""


def advise(miss: Divergence | Loss) -> str | None:
    """One line on what would make the next request like this cheaper, if anything would."""
    return _on_loss(miss) if isinstance(miss, Loss) else _on_divergence(miss)


def _on_loss(loss: Loss) -> str:
    match loss.reason:
        case "evicted":
            return (
                f"{loss.tokens:,} tokens were evicted before they were asked for again: more --kv-tokens than "
                f"{loss.slots:,} would keep them longer."
            )
        case "expired":
            return f"{loss.tokens:,} tokens had expired: ask for a longer ttl if they are used again later."
        case "scope":
            return f"The same text is cached in scope {loss.scope}: name that scope in its cache_control to share it."
        case "caching off":
            return "This request asks for its text not to be kept (ttl 0)."


_FIXED: frozenset[TokenType] = INSTRUCTIONS.union(("document",))
"""What is meant to be the same in many requests."""

_NAMES: dict[TokenType, tuple[str, str]] = {
    "system": ("system prompt", "differs"),
    "tools": ("tool definitions", "differ"),
    "user": ("user message", "differs"),
    "assistant": ("assistant message", "differs"),
    "tool": ("tool output", "differs"),
    "decode": ("answer", "differs"),
}


def _on_divergence(miss: Divergence) -> str | None:
    of, differs = _NAMES.get(miss.kind, (miss.kind, "differs"))
    after = miss.after or After()
    unchanged, reordered = min(after.unchanged, miss.tokens), min(after.reordered, miss.tokens)
    if reordered >= WORTH and max(after.mine, after.cached) > SMALL:
        return (
            f"From token {miss.at} on, in the {of}, {reordered:,} tokens are the same as last time but in another "
            f"order, which costs {miss.tokens:,}: keep them in one order (sort them), or register them as modules or "
            "documents, which are found in any order."
        )
    proved = unchanged >= WORTH
    if not proved and (after.whole or miss.kind not in _FIXED.union(("text",))):
        return None  # a new question, and nothing behind it that was there before: that is how prompts are
    change = changing(miss.before, miss.mine, miss.cached)
    if proved and change and max(after.mine, after.cached) <= SMALL:
        return (
            f"The {change} at token {miss.at}, in the {of}, changes from request to request; the {unchanged:,} "
            "tokens behind it were the same as last time: move it behind them."
        )
    if proved and after.mine <= _SLACK and after.cached > SMALL:
        return (
            f"{after.cached:,} tokens are left out at token {miss.at}, in the {of}; the {unchanged:,} tokens behind them "
            "are the same as last time: leave out from the end, or seldom and much at once."
        )
    if proved:
        return (
            f"The {of} {differs} from token {miss.at} on, but the {unchanged:,} tokens from {miss.at + after.mine} on "
            "were the same as last time: put what stays the same first, and what changes behind it."
        )
    if change:
        return (
            f"The {change} at token {miss.at}, in the {of}, changes from request to request, which costs "
            f"{miss.tokens:,} tokens: move it behind everything that stays the same."
        )
    if miss.kind == "text":
        return None
    return (
        f"The {of} {differs} from token {miss.at} on, which costs {miss.tokens:,} tokens: keep "
        f"{'them' if differs == 'differ' else 'it'} the same in every request, and move what changes to the end of the "
        "prompt."
    )


def around(
    decode: Callable[[list[int]], str], before: Seq[int], mine: Seq[int], cached: Seq[int] = ()
) -> tuple[str, str, str]:
    """The texts before and behind the place where two sequences part, cut between whole characters."""
    start = decode(list(before)).rstrip("\ufffd")
    own, other = (decode([*before, *tokens]) if tokens else "" for tokens in (mine, cached))
    return start, own[len(start) :], other[len(start) :]


def after_change(cached: Seq[int], mine: Seq[int]) -> After:
    """Compare what follows the token where an earlier sequence of the asker's and a new one part.

    Pieces of the earlier one are looked up by their first tokens, so that the work grows with the length of both
    whatever they hold; a text that repeats itself may have a longer stretch in common than the one found.
    """
    known, new = array("q", cached), array("q", mine)
    whole = max(len(known), len(new)) <= LOOKED_AT and (len(known) >= WORTH or len(new) < WORTH)
    theirs, own = known[:LOOKED_AT], new[:LOOKED_AT]
    if min(len(theirs), len(own)) < WORTH:
        return After(0, len(new), len(known), 0, whole)
    pieces = _pieces(theirs, own)
    size, at, to = max(
        ((size + _common(known, to + size, new, at + size), at, to) for at, to, size in pieces),
        key=lambda piece: piece[0],
        default=(0, len(new), len(known)),
    )
    reordered = _reordered(pieces)
    if not reordered:
        first = [piece for piece in pieces if piece[0] < at and piece[1] < to]
        reordered = at if min(at, to) > SMALL and _shuffled(theirs[:to], own[:at], first) else 0
    if not reordered and size < WORTH:
        reordered = len(own) if _shuffled(theirs, own, pieces) else 0
    return After(size, at, to, reordered, whole)


def _pieces(theirs: array[int], own: array[int]) -> list[tuple[int, int, int]]:
    """What two sequences have in common: where in the new one, where in the earlier one, how long. Each part of
    either is used once."""
    unit, width = theirs.itemsize, theirs.itemsize * _GRAIN
    known, new = theirs.tobytes(), own.tobytes()
    places: dict[bytes, list[int]] = {}
    for to in range(len(theirs) - _GRAIN + 1):
        places.setdefault(known[to * unit : to * unit + width], []).append(to)
    pieces: list[tuple[int, int, int]] = []
    used = bytearray(len(theirs))
    at = expected = 0
    while at <= len(own) - _GRAIN:
        found = places.get(new[at * unit : at * unit + width], ())
        # Where it stands several times, in order is likelier than in another.
        first = bisect_left(found, expected)
        to = size = 0
        for place in (*found[first : first + _TRIED], *found[: min(first, _TRIED)]):
            common = 0 if used[place] else _common(theirs, place, own, at)
            if common > size:
                to, size = place, common
        if not size:
            at += 1
            continue
        taken = used.find(1, to, to + size)
        size = size if taken < 0 else taken - to
        used[to : to + size] = b"\1" * size
        pieces.append((at, to, size))
        at, expected = at + size, to + size
    return pieces


def _common(theirs: array[int], to: int, own: array[int], at: int) -> int:
    """How many tokens are the same from there on."""
    size, step = 0, 2 * _GRAIN
    end = min(len(theirs) - to, len(own) - at)
    while size < end:
        step = min(step, end - size)
        if theirs[to + size : to + size + step] == own[at + size : at + size + step]:
            size, step = size + step, 2 * step
        elif step > 1:
            step //= 2
        else:
            break
    return size


def _reordered(pieces: list[tuple[int, int, int]]) -> int:
    """Tokens of the pieces that stand before one that they stood behind, or behind one that they stood before."""
    pieces = [piece for piece in pieces if piece[2] >= 2 * _GRAIN]
    # A short piece that went far is no other order of all that it passed: what has to move counts.
    if sum(size for *_, size in pieces) - _most_in_order(pieces) < WORTH // 2:
        return 0
    last = [-1, *accumulate((to for _, to, _ in pieces), max)]
    first = [*accumulate((to for _, to, _ in reversed(pieces)), min)][::-1]
    return sum(
        size
        for (_, to, size), before, behind in zip(pieces, last, first, strict=False)
        if before > to or behind < to
    )


def _most_in_order(pieces: list[tuple[int, int, int]]) -> int:
    """Tokens of the heaviest selection of pieces that stand in the same order in both."""
    ranks = {to: rank for rank, to in enumerate(sorted(to for _, to, _ in pieces), 1)}
    heaviest = [0] * (len(pieces) + 1)  # a Fenwick tree of maxima over the places in the earlier sequence
    for _, to, size in pieces:
        total, rank = size, ranks[to]
        while rank:
            total, rank = max(total, size + heaviest[rank]), rank & (rank - 1)
        rank = ranks[to]
        while rank <= len(pieces):
            heaviest[rank], rank = max(heaviest[rank], total), rank + (rank & -rank)
    return max(heaviest)


def _shuffled(theirs: array[int], own: array[int], pieces: list[tuple[int, int, int]]) -> bool:
    """Whether two stretches are made of the same short pieces in another order: keys of JSON objects, say."""
    longest = max(len(theirs), len(own))
    if _most_in_order(pieces) > 0.7 * longest or (Counter(theirs) & Counter(own)).total() < 0.95 * longest:
        return False
    known, new = (Counter(pairwise(tokens)) for tokens in (theirs, own))
    return (known & new).total() >= 0.6 * longest
