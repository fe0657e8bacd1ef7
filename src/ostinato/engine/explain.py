"""Explanations: what of a prompt was found cached, why the rest was not, and what would help."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from ostinato.access.scope import Scope
from ostinato.cache.block import NEVER, Block, Lineage
from ostinato.cache.index import Index
from ostinato.cache.keys import block_key
from ostinato.cache.owned import Owned
from ostinato.cache.plan import Plan
from ostinato.cache.use import TokenType
from ostinato.engine.advice import LOOKED_AT, After, Divergence, Loss, advise, after_change, around
from ostinato.engine.sequence import Sequence, SequenceChain
from ostinato.models.tokenizer import Tokenizer

MissReason = Literal["never seen", "diverged", "evicted", "expired", "scope", "caching off"]

KEPT = 10_000
"""Explanations of so many requests can be asked for; of each user's, its share."""
SPANS = 256
"""Spans of a prompt that are told apart; what comes behind them is told as one."""
SHOWN = 12
"""Tokens shown on either side of where two texts part."""

AROUND = 40
"""Tokens on either side in which a date or an identifier is looked for."""


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
class _Other:
    """What advice on a divergence is drawn from: the text before it, and either text behind it."""

    texts: tuple[str, str, str]
    after: After | None
    """How the asker's own earlier text goes on, compared; None where the other is not its own."""


@dataclass(frozen=True)
class Explanation:
    """What became of a request's prompt in the cache."""

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    spans: tuple[SpanReport, ...]
    advice: str | None
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
        self._kept: Owned[Scope | None, str, Explanation] = Owned(KEPT)
        self._lock = threading.Lock()
        self.missed = Counter[str]()
        """Prompt tokens that had to be computed, by why."""

    def admitted(self, sequence: Sequence, chains: Seq[SequenceChain], plans: Seq[Plan]) -> None:
        """Note why what is not in the plans of a request's chains is not."""
        if sequence.choice:
            return  # of several answers to one request, the first is explained: the others find what it has computed
        misses: dict[SequenceChain, Miss] = {}
        others: dict[SequenceChain, _Other] = {}
        for chain, plan in zip(chains, plans, strict=True):
            found = self._miss(sequence, chain, plan, misses, others)
            if found is not None:
                misses[chain] = found
        spans = _spans(sequence, misses)
        missed = Counter[str]()
        for span, _ in spans:
            if span.miss is not None:
                missed[span.miss.reason] += span.tokens - span.hit_tokens
        self.missed = self.missed + missed  # a new one: other threads read it
        told = Explanation(
            sequence.request_id,
            sequence.prompt_tokens,
            sequence.cached_tokens,
            tuple(_bounded([span for span, _ in spans])),
            _advice(spans, others, self._index.pool.slots),
            frozenset[Scope | str]((sequence.tag, *((sequence.asker,) if sequence.asker else ()))).union(
                *((chain.scope, *chain.registered) for chain in sequence.chains)
            ),
        )
        with self._lock:
            self._kept.put(sequence.asker, sequence.request_id, told)

    def get(self, request_id: str, asker: Scope | None) -> Explanation | None:
        """The explanation of a request, to whom it was for."""
        with self._lock:
            return self._kept.get(asker, request_id)

    def forget(self, forgotten: Callable[[Lineage], bool]) -> None:
        """Drop the explanations that show text of what is forgotten."""
        with self._lock:
            self._kept.forget(lambda _, told: forgotten(told.lineage))

    def _miss(
        self,
        sequence: Sequence,
        chain: SequenceChain,
        plan: Plan,
        misses: dict[SequenceChain, Miss],
        others: dict[SequenceChain, _Other],
    ) -> Miss | None:
        """Why a chain is not all in its plan; None if it is. What it diverges from is put into `others`."""
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
        expired = None if block is None else _expired(block, sequence.asker, now)
        if expired is not None:
            return replace(miss, reason="expired", seconds_ago=now - expired)
        loss = None if sequence.asker is None else self._index.lost.get(sequence.asker, key)
        if loss is not None:
            policy = self._policy if loss.how == "evicted" else ""
            return replace(miss, reason=loss.how, seconds_ago=max(0.0, now - loss.when), policy=policy)
        elsewhere = None if at else self._elsewhere(sequence, chain, now)
        if elsewhere is not None:
            return replace(miss, reason="scope", scope=str(elsewhere))
        other = self._other_way(parent, plan, sequence.asker, now)
        if other is not None and (at or chain is not sequence.chains[0]):
            own = _quotable(other, sequence.asker, now)
            mine = chain.token_ids[at:]
            theirs = self._going_on(other, plan.copied_tokens, sequence.asker, now) if own else []
            texts = around(
                self._text, chain.token_ids[max(0, at - AROUND) : at], mine[:AROUND], theirs[:AROUND]
            )
            others[chain] = _Other(texts, after_change(theirs, mine) if own else None)
            return replace(miss, reason="diverged", cached=self._text(theirs[:SHOWN]))
        return miss

    def _going_on(self, block: Block, start: int, asker: Scope | None, now: float) -> list[int]:
        """How an earlier text of the asker's own goes on from token `start` of a block, as far as that is looked at."""
        tokens = list(block.token_ids[start:])
        following: Block | None = block
        while following is not None and following.key is not None and len(tokens) <= LOOKED_AT:
            own = (each for each in self._index.children(following.key) if _quotable(each, asker, now))
            following = max(own, key=_latest, default=None)
            tokens += following.token_ids if following is not None else ()
        return tokens

    def _other_way(self, parent: bytes, plan: Plan, asker: Scope | None, now: float) -> Block | None:
        """A block that the asker may read and that goes on in another way where the plan's cached beginning ends: one
        of its own, rather, and the latest used."""
        start = plan.copied_tokens
        shared = () if plan.copied is None else plan.copied.token_ids[:start]
        found = (b for b in self._index.children(parent) if b.size > start and b.token_ids[:start] == shared)
        return max(
            (block for block in found if block.readable(asker, now)),
            key=lambda block: (block.sent_by(asker, now), *_latest(block)),
            default=None,
        )

    def _elsewhere(self, sequence: Sequence, chain: SequenceChain, now: float) -> Scope | None:
        """Another scope, of those that the asker may name, in which it would find the beginning of the chain."""
        size, asker = self._index.pool.block_size, sequence.asker
        if asker is None or chain.scope.resource or chain.registered or len(chain.token_ids) < size:
            return None
        beneath = partial(Scope.beneath, end_user=chain.scope.end_user, salt=chain.scope.salt)
        named = [Scope("public"), Scope("org", asker.org)]
        may = [beneath(scope) for scope in named if scope.level in sequence.publishes]
        for scope in (*may, beneath(asker)):
            if scope == chain.scope:
                continue
            first = block_key(self._root(chain.origin, scope), chain.token_ids[:size])
            block = self._index.store.blocks.get(first)
            if block is not None and block.readable(asker, now):
                return scope
        return None

    def _text(self, token_ids: list[int] | tuple[int, ...]) -> str:
        return self._tokenizer.decode(token_ids, skip_special=False)


def _expired(block: Block, asker: Scope | None, now: float) -> float | None:
    """When what the asker has sent of a block's text expired for it; None if it did not, or was not sent by it."""
    if block.scope.private:
        return block.expires if block.expires <= now else None
    claim = None if asker is None else block.claims.get(asker)
    return claim.expires if claim is not None and claim.expires <= now else None


def _quotable(block: Block, asker: Scope | None, now: float) -> bool:
    """Whether a block's text is the asker's own, sent to stay."""
    if asker is None or not block.sent_by(asker, now):
        return False
    return (block.expires if block.scope.private else block.claims[asker].expires) == NEVER


def _latest(block: Block) -> tuple[float, tuple[int, ...]]:
    """What orders blocks by their latest use, as far as any reader may know of it: what each has to itself at first
    is in an order that tells of no use."""
    return 0.0 if block.guarded else block.use.time, block.token_ids


def _spans(sequence: Sequence, misses: dict[SequenceChain, Miss]) -> list[tuple[SpanReport, SequenceChain]]:
    """The spans of a prompt, each with its chain."""
    reports: list[tuple[SpanReport, SequenceChain]] = []
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
                    why = replace(why, yours="", cached="")
            tier = "memory" if hit else None
            report = SpanReport(total + at - start, stop - at, kind, str(chain.scope), hit, tier, why)
            reports.append((report, chain))
            at = stop
        total += end - start
    return reports


def _bounded(reports: list[SpanReport]) -> list[SpanReport]:
    """The same, with all spans beyond so many as one."""
    if len(reports) <= SPANS:
        return reports
    rest = reports[SPANS - 1 :]
    last = replace(
        rest[0],
        tokens=sum(each.tokens for each in rest),
        hit_tokens=sum(each.hit_tokens for each in rest),
        tier=next((each.tier for each in rest if each.tier), None),
        miss=next((each.miss for each in rest if each.miss), None),
    )
    return [*reports[: SPANS - 1], last]


def _advice(
    spans: Seq[tuple[SpanReport, SequenceChain]], others: dict[SequenceChain, _Other], slots: int
) -> str | None:
    """One line on what would make the next request like this cheaper, if anything would."""
    lost = [(span, chain, span.miss) for span, chain in spans if span.miss is not None]
    behind = sum(span.tokens - span.hit_tokens for span, _, _ in lost)
    for span, chain, miss in lost:
        told = None
        other = others.get(chain)
        if miss.earlier:
            continue
        if miss.reason == "diverged" and other is not None:
            told = advise(Divergence(span.kind, miss.at, behind, *other.texts, other.after))
        elif miss.reason not in ("diverged", "never seen"):
            told = advise(Loss(miss.reason, behind, slots, miss.scope))
        if told is not None:
            return told
    return None
