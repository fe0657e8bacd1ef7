"""A sequence: one request's chains of tokens, their blocks in the pool, and how far it has come."""

from __future__ import annotations

import hmac
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ostinato.access.scope import PUBLIC, Level, Scope
from ostinato.cache.block import NEVER, Block, Claim, Lineage
from ostinato.cache.keys import chain_keys, encode_fields, root_key
from ostinato.cache.pool import Run
from ostinato.cache.use import INSTRUCTIONS, NOBODY, TokenType, Use
from ostinato.engine.grammar import Matcher
from ostinato.engine.request import SamplingParams
from ostinato.prompt.span import Chain, Prompt, View

SHARED: frozenset[TokenType] = frozenset((*INSTRUCTIONS, "document"))
"""What is not of one conversation alone."""


@dataclass(eq=False)
class SequenceChain:
    """One chain of a sequence. The KV of its first `computed` tokens is written.

    A `fixed` chain never grows, so its last block can be shared although it is not full. A chain with a
    `source` is not computed: its KV is moved from there, where the same tokens stand at another position.
    """

    token_ids: list[int]
    start: int
    root: bytes
    sees: tuple[View, ...]
    fixed: bool
    source: SequenceChain | None = None
    computed: int = 0
    skipped: bool = False
    """True for a source that is not needed: all of what would be moved from it is cached."""
    cached: int = 0
    """Tokens found cached when the sequence was first admitted."""
    blocks: list[Block] = field(default_factory=list[Block])
    published: int = 0
    """How many of `blocks` can be looked up by others."""
    keys: list[bytes] = field(default_factory=list[bytes])
    kinds: tuple[tuple[int, TokenType], ...] = ()
    """Where each span ends, in tokens, and what it is; what comes behind them was generated."""
    scope: Scope = PUBLIC
    registered: frozenset[Scope] = frozenset()
    """The scopes of documents and schemas with text in it, beside its own."""
    secret: bytes = b""
    """The scopes', when the root was made."""
    ttls: tuple[tuple[int, float | None], ...] = ()
    """Where each span ends, and how long its KV may stay after its latest use; the last holds for all behind it."""
    continues: bool = False
    """Whether it only goes on where the chain before it ends, in another scope."""
    sender: Scope | None = None
    """Of a shared scope: the user who has sent its text, and so has a claim on what it computes."""
    guarded: bool = False
    """Whether a user finds what it computes only by a claim of its own, or by those of two others."""
    lineage: Lineage = frozenset()
    """What its KV is computed from, known once it is admitted."""
    origin: tuple[str, int, bytes] = ("prefix", 0, b"")
    """Kind, start and context of the root."""
    _runs: list[Run] = field(default_factory=list[Run])
    _runs_blocks: int = 0

    @property
    def remaining(self) -> int:
        return 0 if self.skipped else len(self.token_ids) - self.computed

    def chain(self, block_size: int) -> list[bytes]:
        """Keys of every block that can be shared: the full ones, and the last of a fixed chain."""
        parent = self.keys[-1] if self.keys else self.root
        rest = self.token_ids[len(self.keys) * block_size :]
        self.keys += chain_keys(parent, rest, block_size, partial=self.fixed)
        return self.keys

    def parent_key(self, block: int) -> bytes:
        """Key of what block number `block` of this chain continues."""
        return self.keys[block - 1] if block else self.root

    def key_of(self, end: int, block_size: int) -> bytes:
        """Identity of the states of the first `end` tokens."""
        if end == len(self.token_ids) and self.fixed:
            return self.chain(block_size)[-1]
        return [self.root, *chain_keys(self.root, self.token_ids[:end], block_size, partial=True)][-1]

    def runs(self, block_size: int) -> list[Run]:
        """The blocks of this chain as runs. Lengths count whole blocks, written or not."""
        for i in range(self._runs_blocks, len(self.blocks)):
            slot = self.blocks[i].number * block_size
            last = self._runs[-1] if self._runs else None
            if last is not None and last.slot + last.length == slot:
                self._runs[-1] = Run(last.slot, last.length + block_size, last.position)
            else:
                self._runs.append(Run(slot, block_size, self.start + i * block_size))
        self._runs_blocks = len(self.blocks)
        return self._runs

    def runs_of(self, start: int, end: int, block_size: int) -> Iterator[Run]:
        """Runs of tokens number `start` to `end` (excluded)."""
        first, last = self.start + start, self.start + end
        for run in self.runs(block_size):
            skipped = max(0, first - run.position)
            length = min(run.position + run.length, last) - run.position - skipped
            if length > 0:
                yield run if length == run.length else Run(run.slot + skipped, length, run.position + skipped)

    def count_kinds(self, start: int, end: int) -> Counter[TokenType]:
        """How many of tokens number `start` to `end` (excluded) are of which kind."""
        counts = Counter[TokenType]()
        at = start
        for span_end, kind in self.kinds[bisect_right(self.kinds, start, key=lambda span: span[0]) :]:
            if at >= end:
                break
            counts[kind] += min(span_end, end) - at
            at = span_end
        if at < end:
            counts["decode"] += end - at
        return counts

    def kind_of(self, block: int, block_size: int) -> TokenType:
        """What most tokens of block number `block` are, the later kind if two are even.

        A template's markers say nothing about who will ask for a block that holds anything else.
        """
        start = block * block_size
        counts = self.count_kinds(start, min(start + block_size, len(self.token_ids)))
        if len(counts) > 1:
            del counts["template"]
        return max(reversed(counts), key=counts.__getitem__)

    def describe(self, block: int, block_size: int, now: float, tag: str) -> None:
        """Note in block number `block` where it stands, what it holds, and that the request `tag` has computed it."""
        described = self.blocks[block]
        described.kind, described.depth = self.kind_of(block, block_size), block
        described.offset = self.start + block * block_size
        described.scope, described.lineage = self.scope, self.lineage
        end = min((block + 1) * block_size, len(self.token_ids))
        described.expires = now + self.ttl(end)
        described.claimed = self.claimed
        described.guarded = self.guarded
        if self.sender is not None:
            described.claim(self.sender, self.claim(end, now, tag))

    @property
    def claimed(self) -> bool:
        """Whether what it computes goes with the last claim on it. What is registered goes with its registration."""
        return self.sender is not None and not self.scope.resource

    def claim(self, end: int, now: float, tag: str) -> Claim:
        """The claim of a request on KV that the token before number `end` is the last of."""
        return Claim({tag: now + self.ttl(end)})

    def ttl(self, end: int) -> float:
        """How long KV may stay that the token before number `end` is the last of."""
        for span_end, ttl in self.ttls:
            if end <= span_end or span_end == self.ttls[-1][0]:
                return NEVER if ttl is None else ttl
        return NEVER

    def written(self, start: int, count: int, block_size: int) -> None:
        """Note that the KV of tokens number `start` on is being written: there is something to erase from now on."""
        for block in self.blocks[start // block_size : -(-(start + count) // block_size)]:
            block.blank = False

    def forget_runs(self) -> None:
        """Call after replacing or dropping blocks."""
        self._runs, self._runs_blocks = [], 0

    def slots(self, start: int, end: int, block_size: int) -> list[int]:
        """Pool slots of token numbers `start` to `end` (excluded)."""
        blocks = self.blocks
        return [blocks[i // block_size].number * block_size + i % block_size for i in range(start, end)]


@dataclass(eq=False)
class Sequence:
    """State of one request inside the engine; only the engine's thread touches it once submitted.

    The last chain ends the prompt, and the generated tokens continue it.
    """

    id: int
    chains: list[SequenceChain]
    params: SamplingParams
    max_tokens: int
    arrived: float = 0.0
    """When the request came in, before it was tokenised (time.perf_counter)."""
    prompt_tokens: int = 0
    """Tokens that the reply sees: what the last chain sees of the others, and its own."""
    admitted: bool = False
    session: str = ""
    """The conversation or agent run that this belongs to; empty if the client named none."""
    request_id: str = ""
    asker: Scope | None = None
    """The user whose request it is."""
    choice: int = 0
    """Number among the answers to the request."""
    tag: str = ""
    """The request's in the lineage of what it computes."""
    epoch: int = 0
    """How much had been forgotten when the first of its text was read."""
    publishes: frozenset[Level] = frozenset()
    """The levels of scopes that the user may publish in."""
    stepped: int = 0
    """Number of the latest step that it had a part in."""
    overtaken: int = 0
    """How many requests of others were admitted while there was no room for it."""
    kept: bool = True
    """False once something in it is forgotten: nothing that it computes is kept."""
    use: Use = NOBODY
    """Set when the sequence is handed to the scheduler."""
    matcher: Matcher | None = None
    """How far the reply has come in its grammar, if it has one. A preemption does not change it."""
    _last_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self._last_prompt_tokens = len(self.last.token_ids)
        self.prompt_tokens = self._last_prompt_tokens + sum(
            self._end(view) - view.start for view in self.last.sees
        )

    @property
    def last(self) -> SequenceChain:
        return self.chains[-1]

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return sum(chain.remaining for chain in self.chains)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose prefill was skipped: set at first admission, never raised by preemption."""
        seen = (min(self.chains[v.chain].cached, self._end(v)) - v.start for v in self.last.sees)
        return self.last.cached + sum(max(0, tokens) for tokens in seen)

    @property
    def token_ids(self) -> list[int]:
        """All tokens, prompt and generated."""
        return [token for chain in self.chains for token in chain.token_ids]

    @property
    def generated_ids(self) -> list[int]:
        return self.last.token_ids[self._last_prompt_tokens :]

    @property
    def generated(self) -> int:
        return len(self.last.token_ids) - self._last_prompt_tokens

    @property
    def prompt_kinds(self) -> Counter[TokenType]:
        """`prompt_tokens` by kind."""
        return sum((chain.count_kinds(start, end) for chain, start, end in self.seen()), Counter[TokenType]())

    @property
    def cached_kinds(self) -> Counter[TokenType]:
        """`cached_tokens` by kind: what they are in this prompt, whatever computed them."""
        found = (chain.count_kinds(start, min(chain.cached, end)) for chain, start, end in self.seen())
        return sum(found, Counter[TokenType]())

    @property
    def line(self) -> list[SequenceChain]:
        """The last chain and those before it that it only continues, in order: one line of text cut by scopes."""
        first = len(self.chains) - 1
        while self.chains[first].continues:
            first -= 1
        return self.chains[first:]

    @property
    def shared_tokens(self) -> int:
        """How many tokens the last line of text begins with that are not of one conversation alone."""
        return self._leading(SHARED)

    def _leading(self, kinds: frozenset[TokenType]) -> int:
        """How many tokens of these kinds the last line of text begins with."""
        before = 0
        for chain in self.line:
            at = 0
            for end, kind in chain.kinds:
                if kind not in kinds:
                    return before + at
                at = end
            before += at
        return before

    @property
    def has_modules(self) -> bool:
        return len(self.line) < len(self.chains)

    def starts(self, block_size: int) -> bytes:
        """Key of the last full block of the instructions that it begins with; empty without one."""
        if self.has_modules:
            return next(reversed(self.chains[0].chain(block_size)), b"")
        key, leading = b"", self._leading(INSTRUCTIONS)
        for chain in self.line:
            full = min(leading, len(chain.token_ids)) // block_size
            if full:
                key = chain.chain(block_size)[full - 1]
            leading -= min(leading, len(chain.token_ids))
        return key

    def own_keys(self, block_size: int) -> list[bytes]:
        """Keys of the last line's blocks, without those it begins with that are not of one conversation alone."""
        keys: list[bytes] = []
        shared = self.shared_tokens
        for chain in self.line:
            count = len(chain.token_ids)
            if shared < count:
                keys += chain.chain(block_size)[shared // block_size :]
            shared = max(0, shared - count)
        return keys

    @property
    def lineage(self) -> Lineage:
        """All that it has to do with: if any of that is forgotten, nothing of it is kept."""
        return frozenset[Scope | str]((self.tag,)).union(
            *({chain.scope, *chain.registered, *chain.lineage} for chain in self.chains)
        )

    def has_kind(self, *kinds: TokenType) -> bool:
        return any(kind in kinds for chain in self.chains for _, kind in chain.kinds)

    def take(self, tokens: int) -> Iterator[tuple[SequenceChain, int]]:
        """The next tokens to compute, at most `tokens`, chain by chain: what is seen comes before who sees it."""
        for chain in self.chains:
            if chain.source is not None and chain.remaining:
                return  # moved once its source is written; what comes behind may look at it
            count = min(chain.remaining, tokens)
            if count:
                yield chain, count
                tokens -= count

    def runs(self, chain: SequenceChain, end: int, block_size: int) -> tuple[Run, ...]:
        """All KV that the first `end` tokens of `chain` may look at, their own included."""
        seen = [
            run
            for view in chain.sees
            for run in self.chains[view.chain].runs_of(view.start, self._end(view), block_size)
        ]
        return (*seen, *chain.runs_of(0, end, block_size))

    def seen(self) -> Iterator[tuple[SequenceChain, int, int]]:
        """The prompt's tokens that the reply sees: from which to which of which chain."""
        for view in self.last.sees:
            yield self.chains[view.chain], view.start, self._end(view)
        yield self.last, 0, self._last_prompt_tokens

    def _end(self, view: View) -> int:
        return len(self.chains[view.chain].token_ids) if view.end is None else view.end


def sequence_chains(
    prompt: Prompt, fingerprint: bytes, block_size: int, secret: Callable[[Scope], bytes] = lambda _: b""
) -> list[SequenceChain]:
    """The chains of a prompt with their roots: the hash of position and everything in sight, under the scope's secret.

    A chain that is moved from its home becomes two. Neighbours that are moved have all their homes first, so
    that they are computed in one step.
    """
    chains: list[SequenceChain] = []
    moved: list[tuple[int, SequenceChain]] = []
    place: dict[int, int] = {}

    def origin(kind: str, start: int, seen: list[tuple[SequenceChain, View]]) -> tuple[str, int, bytes]:
        context: list[bytes] = []
        for chain, view in seen:
            end = len(chain.token_ids) if view.end is None else view.end
            context += [chain.key_of(end, block_size), view.start.to_bytes(8, "little")]
        return kind, start, encode_fields(context)

    def made(
        chain: Chain, of: tuple[str, int, bytes], sees: tuple[View, ...] = (), *, fixed: bool
    ) -> SequenceChain:
        scope = chain.scope or PUBLIC
        known = secret_of(scope, chain.registered, secret)
        start = of[1]
        made = SequenceChain(list(chain.token_ids), start, root_of(fingerprint, of, known), sees, fixed)
        made.scope, made.secret, made.origin, made.continues = scope, known, of, chain.continues
        made.registered = chain.registered
        made.kinds, made.ttls = _kinds(chain), _ttls(chain)
        return made

    def settle() -> None:
        for number, chain in moved:
            place[number] = len(chains)
            chains.append(chain)
        moved.clear()

    for number, chain in enumerate(prompt.chains):
        home = chain.start if chain.home is None else chain.home
        if home == chain.start or any(view.chain not in place for view in chain.sees):
            settle()
        sees = tuple(View(place[view.chain], view.start, view.end) for view in chain.sees)
        kind = "module" if sees or home else "prefix"
        fixed = number < len(prompt.chains) - 1
        at_home = made(
            chain, origin(kind, home, [(chains[view.chain], view) for view in sees]), sees, fixed=fixed
        )
        place.setdefault(number, len(chains))
        chains.append(at_home)
        if home != chain.start:
            del place[number]
            moving = made(chain, origin("moved", chain.start, [(at_home, View(0))]), fixed=fixed)
            moving.token_ids, moving.source = at_home.token_ids, at_home
            moved.append((number, moving))
    return chains


def secret_of(scope: Scope, registered: frozenset[Scope], secret: Callable[[Scope], bytes]) -> bytes:
    """The secret that a chain is keyed under: its scope's, and those of the documents and schemas with text in it,
    so that it is lost with any of them."""
    if not registered:
        return secret(scope)
    others = sorted(registered, key=Scope.encoded)
    return hmac.digest(secret(scope), encode_fields(secret(each) for each in others), "sha256")


def request_tag(asker: Scope, request_id: str) -> str:
    """A request's name that no other user's request can have, whatever ids they choose."""
    return f"{asker.encoded().hex()} {request_id}"


def root_of(fingerprint: bytes, origin: tuple[str, int, bytes], secret: bytes) -> bytes:
    kind, start, context = origin
    return root_key(fingerprint, kind=kind, start=start, context=context, secret=secret)


def _ttls(chain: Chain) -> tuple[tuple[int, float | None], ...]:
    """Where the spans of a chain end, and their times to live; nothing where all may stay for ever."""
    ends = itertools.accumulate(len(span.token_ids) for span in chain.spans)
    ttls = tuple((end, span.ttl) for end, span in zip(ends, chain.spans, strict=True))
    return ttls if any(ttl is not None for _, ttl in ttls) else ()


def _kinds(chain: Chain) -> tuple[tuple[int, TokenType], ...]:
    """Where the spans of a chain end, and what they are: what a module holds is a document unless it says more."""
    kinds: list[tuple[int, TokenType]] = []
    end = 0
    for span in chain.spans:
        end += len(span.token_ids)
        if span.token_ids:
            kinds.append((end, "document" if chain.name and span.kind == "text" else span.kind))
    return tuple(kinds)
