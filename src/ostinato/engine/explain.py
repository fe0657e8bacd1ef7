"""Explanations: what of a prompt was found cached, why the rest was not, and what would help."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Literal

from ostinato.access.scope import Scope
from ostinato.cache.block import NEVER, Block, Lineage
from ostinato.cache.index import Index, readable
from ostinato.cache.keys import block_key
from ostinato.cache.plan import Plan
from ostinato.cache.use import TokenType
from ostinato.engine.sequence import Sequence, SequenceChain
from ostinato.models.tokenizer import Tokenizer

MissReason = Literal["never seen", "diverged", "evicted", "expired", "scope", "not released", "caching off"]

KEPT = 10_000
"""Explanations of so many requests can be asked for."""
SHOWN = 12
"""Tokens shown on either side of where two texts part."""

AROUND = 40
"""Tokens on either side in which a date or an identifier is looked for."""

_VOLATILE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d|\d{1,2}:\d\d|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\b20\d\d\b"
    r"|\b(?:January|February|March|April|May|June|July|August|September|October|November|December|"
    r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day)\b)"
    r"|(?P<id>\b[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{12,}\b|\d{6,})",
)


@dataclass(frozen=True)
class Miss:
    """Why the tokens from number `at` of the prompt on had to be computed."""

    reason: MissReason
    at: int
    earlier: bool = False
    """Whether the reason lies before these tokens: what they follow was not found."""
    seconds_ago: float | None = None
    """How long before this request the block was lost."""
    policy: str = ""
    """Which evicted it."""
    scope: str = ""
    """Where else it is cached, among the scopes of whoever asks."""
    yours: str = ""
    """How the prompt goes on."""
    cached: str = ""
    """How what is cached goes on, where that is the asker's own."""
    changing: str = ""
    """What the prompt has there that is likely to change with every request."""


@dataclass(frozen=True)
class SpanReport:
    """A span of a prompt and what was found of it. Token numbers count the prompt's tokens in order."""

    start: int
    tokens: int
    kind: TokenType
    scope: str
    hit_tokens: int
    tier: str | None
    miss: Miss | None = None


@dataclass(frozen=True)
class Explanation:
    """What became of a request's prompt in the cache."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[SpanReport, ...]
    advice: str | None
    asker: Scope | None = field(repr=False, default=None)
    lineage: Lineage = field(repr=False, default=frozenset())
    """What must not be forgotten for it to stay."""


class Explainer:
    """Explains requests as they are admitted, and keeps the latest explanations. Read from any thread."""

    def __init__(
        self,
        index: Index,
        tokenizer: Tokenizer,
        policy: str,
        root: Callable[[tuple[str, int, bytes], Scope], bytes],
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._policy = policy
        self._root = root
        self._kept: OrderedDict[str, Explanation] = OrderedDict()

    def admitted(self, sequence: Sequence, chains: Seq[SequenceChain], plans: Seq[Plan]) -> None:
        """Note why what is not in the plans of a request's chains is not."""
        if sequence.choice:
            return  # of several answers to one request, the first is explained: the others find what it has computed
        misses: dict[SequenceChain, Miss] = {}
        for chain, plan in zip(chains, plans, strict=True):
            found = self._miss(sequence, chain, plan, misses)
            if found is not None:
                misses[chain] = found
        spans = tuple(_spans(sequence, misses))
        self._kept[sequence.request_id] = Explanation(
            sequence.request_id,
            sequence.prompt_tokens,
            sequence.cached_tokens,
            spans,
            _advice(spans, self._index.pool.slots),
            sequence.asker,
            frozenset[Scope | str]((sequence.tag, *((sequence.asker,) if sequence.asker else ()))).union(
                *((chain.scope, *chain.registered) for chain in sequence.chains)
            ),
        )
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    def get(self, request_id: str, asker: Scope | None) -> Explanation | None:
        """The explanation of a request, to whom it was for."""
        found = self._kept.get(request_id)
        return found if found is not None and found.asker == asker else None

    def forget(self, forgotten: Callable[[Lineage], bool]) -> None:
        """Drop the explanations that show text of what is forgotten."""
        for request_id, explanation in list(self._kept.items()):
            if forgotten(explanation.lineage):
                del self._kept[request_id]

    def _miss(
        self, sequence: Sequence, chain: SequenceChain, plan: Plan, misses: dict[SequenceChain, Miss]
    ) -> Miss | None:
        at, count = plan.cached_tokens, len(chain.token_ids)
        if at >= count - (chain is sequence.last):
            return None
        for view in chain.sees:
            before = misses.get(sequence.chains[view.chain])
            if before is not None:
                return replace(before, earlier=True)
        now = sequence.use.time
        # What may stay for a time only is quoted nowhere.
        lasting = chain.ttl(len(chain.token_ids)) == NEVER
        yours = self._text(chain.token_ids[at : at + SHOWN]) if lasting else ""
        miss = Miss("never seen", at, yours=yours)
        parent = chain.parent_key(len(plan.reused))
        keys = chain.chain(self._index.pool.block_size)
        key = keys[len(plan.reused)] if len(plan.reused) < len(keys) else b""
        block = self._index.store.blocks.get(key)
        if chain.ttl(at + 1) == 0:
            return replace(miss, reason="caching off")
        if block is not None and block.expires <= now:
            return replace(miss, reason="expired", seconds_ago=now - block.expires)
        if block is not None and not readable(block, now, sequence.asker):
            return replace(miss, reason="not released")
        if key in self._index.lost:
            how, when = self._index.lost[key]
            policy = self._policy if how == "evicted" else ""
            return replace(miss, reason=how, seconds_ago=max(0.0, now - when), policy=policy)
        other = self._other_way(parent, plan, sequence.asker, now)
        if at and other is not None:
            known = other.token_ids[plan.copied_tokens :][:SHOWN]
            own = (
                other.scope.level in ("user", "session")
                and not other.scope.resource
                and other.expires == NEVER
            )
            before, after = chain.token_ids[max(0, at - AROUND) : at], chain.token_ids[at : at + AROUND]
            changing = _changing(self._text(before), self._text(after))
            return replace(
                miss, reason="diverged", cached=self._text(known) if own else "", changing=changing
            )
        elsewhere = None if at else self._elsewhere(sequence, chain)
        return miss if elsewhere is None else replace(miss, reason="scope", scope=str(elsewhere))

    def _other_way(self, parent: bytes, plan: Plan, asker: Scope | None, now: float) -> Block | None:
        """A cached block that goes on in another way where the plan's cached beginning ends."""
        if plan.copied is not None:
            return plan.copied if plan.copied.size > plan.copied_tokens else None
        return next((b for b in self._index.children(parent) if readable(b, now, asker)), None)

    def _elsewhere(self, sequence: Sequence, chain: SequenceChain) -> Scope | None:
        """Another scope of the asker in which the beginning of the chain is cached."""
        size, asker = self._index.pool.block_size, sequence.asker
        if asker is None or chain.scope.resource or chain.registered or len(chain.token_ids) < size:
            return None
        for scope in (Scope("public"), Scope("org", asker.org), asker):
            first = block_key(self._root(chain.origin, scope), chain.token_ids[:size])
            if scope != chain.scope and first in self._index:
                return scope
        return None

    def _text(self, token_ids: list[int] | tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=False)


def _spans(sequence: Sequence, misses: dict[SequenceChain, Miss]) -> list[SpanReport]:
    reports: list[SpanReport] = []
    total = 0
    for chain, start, end in sequence.seen():
        miss = misses.get(chain)
        at = start
        for span_end, kind in chain.kinds:
            stop = min(span_end, end)
            if stop <= at:
                continue
            hit = max(0, min(chain.cached, stop) - at)
            why = None
            if miss is not None and hit < stop - at:
                number = total + at - start
                here = not miss.earlier and at <= miss.at < stop
                why = replace(miss, at=number + miss.at - at if here else number, earlier=not here)
                if not here:
                    why = replace(why, yours="", cached="", changing="")
            reports.append(
                SpanReport(
                    total + at - start, stop - at, kind, str(chain.scope), hit, "memory" if hit else None, why
                )
            )
            at = stop
        total += end - start
    return reports


def _advice(spans: tuple[SpanReport, ...], slots: int) -> str | None:
    """One line on what would make the next request like this cheaper, if anything would."""
    lost = [span for span in spans if span.miss is not None]
    behind = sum(span.tokens - span.hit_tokens for span in lost)
    for span in lost:
        miss = span.miss
        if miss is None or miss.earlier:
            continue
        match miss.reason:
            case "diverged" if span.kind in ("system", "tools", "template", "document", "text"):
                return _on_change(span, miss, behind)
            case "evicted":
                return (
                    f"{behind:,} tokens were evicted before they were asked for again: more --kv-tokens than "
                    f"{slots:,} would keep them longer."
                )
            case "expired":
                return f"{behind:,} tokens had expired: ask for a longer ttl if they are used again later."
            case "scope":
                return f"The same text is cached in scope {miss.scope}: name that scope in its cache_control to share it."
            case "not released":
                return "Somebody else computed this first; from the next request on it is shared."
            case "caching off":
                return "This request asks for its text not to be kept (ttl 0)."
            case _:
                continue
    return None


def _changing(before: str, after: str) -> str:
    """What stands around a place in a text, if it is of a kind that changes all the time."""
    line = before.rpartition("\n")[2] + after.partition("\n")[0]
    at = len(before.rpartition("\n")[2])
    for found in _VOLATILE.finditer(line):
        if found.start() <= at <= found.end():
            return "date or time" if found["time"] else "identifier"
    return ""


def _on_change(span: SpanReport, miss: Miss, behind: int) -> str:
    of = {"system": "system prompt", "tools": "tool definitions"}.get(span.kind, span.kind)
    if miss.changing:
        return (
            f"The {miss.changing} at token {miss.at}, in the {of}, changes from request to request, which costs "
            f"{behind:,} tokens: move it behind everything that stays the same."
        )
    return (
        f"The {of} differs from token {miss.at} on, which costs {behind:,} tokens: keep it the same in every "
        "request, and move what changes to the end of the prompt."
    )
