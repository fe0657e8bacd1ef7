"""The scheduler: who computes how many tokens in the next step, and who gets which blocks.

Continuous batching: every step gives each decoding sequence its one token, and spends the rest of the token budget on
chunks of prefill, split between the oldest sequence and the shortest ones, so that a long prompt neither starves nor
blocks the others. A user's requests are admitted in the order of their arrival. Between users seats, blocks and steps
are shared (`shares.py`): nobody's requests, however many and long, hold up another's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ostinato.access.scope import Scope
from ostinato.cache.block import Block, Lineage
from ostinato.cache.index import Index
from ostinato.cache.plan import Plan, make_plan
from ostinato.engine.sequence import Sequence, SequenceChain
from ostinato.engine.shares import Holding, Shares, User, holdings_of


@dataclass(frozen=True)
class Work:
    """Up to `tokens` tokens of `sequence` to compute in this step, the next ones of its chains."""

    sequence: Sequence
    tokens: int

    @property
    def samples(self) -> bool:
        """True if the step computes the last known token, so that the next one can be sampled."""
        return sum(count for _, count in self.sequence.take(self.tokens)) == self.sequence.remaining


OVERTAKEN = 64
"""Requests of others that may be admitted before one that there is no room for yet."""


Move = Callable[[list[int], list[int], int], None]
"""Copies the KV of source slots to target slots, turned by that many positions."""

Admitted = Callable[[Sequence, Seq[SequenceChain], Seq[Plan]], None]
"""Told of each sequence when it is first admitted, before anything that its plans need is evicted."""


class Scheduler:
    """Owns the waiting and running sequences and their blocks."""

    def __init__(
        self,
        index: Index,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        move: Move,
        admitted: Admitted | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.index = index
        self._admitted = admitted
        self._clock = clock
        self._move = move
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.shares = Shares()
        self._steps = 0
        # Blocks a running sequence will have computed soon, and for whom alone, if so: whoever needs them waits for them.
        self._computing: dict[tuple[bytes, User], Sequence] = {}

    @property
    def block_size(self) -> int:
        return self.index.pool.block_size

    def add(self, sequence: Sequence) -> None:
        sequence.use = self.index.store.begin(
            sequence.arrived,
            sequence.own_keys(self.block_size),
            session=sequence.session,
            tokens=sequence.prompt_tokens,
            agentic=sequence.has_kind("tools", "tool"),
            begins=sequence.chains[0].kind_of(0, self.block_size),
            starts=sequence.starts(self.block_size),
            templated=sequence.has_modules or sequence.shared_tokens >= self.block_size,
            scope=sequence.last.scope.level,
        )
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Choose the next step's work; every sequence in it has blocks for the tokens it computes."""
        self.index.sweep(self._clock())
        self._admit()
        self._grow()
        queues = by_user(self.running)
        demands = {user: sum(s.remaining for s in own) for user, own in queues.items()}
        demands = {user: min(wanted, self.max_batch_tokens) for user, wanted in demands.items() if wanted}
        if not demands:
            return []
        chunks: dict[Sequence, int] = {}
        for user, share in self.shares.split(demands, self.max_batch_tokens).items():
            # Alone, whoever decodes a lot of replies still gets on with its next prompt.
            chunks |= _chunks(queues[user], share, self.block_size if len(demands) == 1 else 0)
        self._steps += 1
        work: list[Work] = []
        for sequence, tokens in chunks.items():
            sequence.stepped = self._steps
            work.append(Work(sequence, tokens))
            for chain, count in sequence.take(tokens):
                chain.written(chain.computed, count, self.block_size)
        # Those that look at the same KV stand side by side, so that it is read once for all of them.
        return sorted(work, key=lambda item: (item.sequence.remaining > 1, *_what_it_reads(item.sequence)))

    def computed(self, work: Seq[Work]) -> None:
        """The step's KV is written: make full blocks findable by others."""
        for item in work:
            for chain, count in list(item.sequence.take(item.tokens)):
                chain.computed += count
                self._publish(item.sequence, chain)
            self._move_chains(item.sequence)

    def finish(self, sequence: Sequence) -> None:
        """The request ended or was cancelled, waiting or running: its blocks are released."""
        if sequence in self.running:
            # In this order: who sees that nothing runs finds nothing held.
            self._release(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def forget(self, forgotten: Callable[[Lineage], bool]) -> list[Block]:
        """Take away what is `forgotten`. Requests that have to do with it go on, and nothing they compute is kept."""
        now = self._clock()
        self.index.sweep(now)  # what has expired is forgotten as such
        blocks = self.index.forget(forgotten, now)
        for sequence in (*self.waiting, *self.running):
            if forgotten(sequence.lineage) or _holds(sequence, blocks):
                self.keep_nothing(sequence)
        return blocks

    def unclaim(self, user: Scope, request: str) -> list[Block]:
        """Have a user's request hold nothing of shared scopes any more; see `Index.unclaim`."""
        blocks = self.index.unclaim(user, request, self._clock())
        gone = [block for block in blocks if block.key is None]
        for sequence in (*self.waiting, *self.running):
            if _holds(sequence, gone):
                self.keep_nothing(sequence)
        return blocks

    def keep_nothing(self, sequence: Sequence) -> None:
        """Nothing that the sequence computes from now on can be found."""
        sequence.kept = False
        for chain in sequence.chains:
            self._stop_computing(sequence, chain, chain.keys[chain.published :])

    def _admit(self) -> None:
        """Admit those who wait while there is room, first of the users who have least running for their part."""
        queues = {user: deque(own) for user, own in by_user(self.waiting).items()}
        blocked: list[Sequence] = []
        holdings = self._holdings()
        while queues:
            user = min(queues, key=lambda each: (holdings[each].seats_over, queues[each][0].id))
            sequence = queues[user].popleft()
            if not queues[user]:
                del queues[user]
            self._skip_sources(sequence)
            chains = [chain for chain in sequence.chains if not chain.skipped]
            if any(self._awaits_other(sequence, chain) for chain in chains):
                continue
            if len(self.running) >= self.max_sequences and not holdings[user].may_have_seat:
                return  # who comes next has as much running already
            plans = [self._plan(sequence, chain) for chain in chains]
            wanted = sum(plan.new_blocks for plan in plans)
            if self.running and not self._fits(plans) and not holdings[user].may_have_blocks(wanted):
                # In turn: what is large is not overtaken by its own user's small ones; nor for ever by others', but
                # while its user has more than its part already.
                blocked.append(sequence)
                queues.pop(user, None)
                continue
            deserving = [each for each in blocked if holdings[each.asker].blocks_over <= 1]
            if blocked and not (holdings[user].may_have_blocks(wanted) and _overtake(deserving)):
                queues.pop(user, None)
                continue
            while len(self.running) >= self.max_sequences or not self._fits(plans):
                seat = len(self.running) >= self.max_sequences
                victim = self._over_its_part(seat=seat)
                if victim is None:
                    break
                victim.overtaken += not seat
                self._preempt(victim)
                holdings = self._holdings()
                plans = [self._plan(sequence, chain) for chain in chains]
            if len(self.running) >= self.max_sequences:
                return
            if not self._fits(plans):
                if self.running:
                    blocked.append(sequence)
                    queues.pop(user, None)
                    continue
                # Alone, the request fits by the engine's own check; only its copy sources may be in the way.
                size = self.block_size
                plans = [
                    Plan(p.reused, None, 0, p.cached_tokens - p.copied_tokens, p.new_blocks) for p in plans
                ]
                assert self._fits(plans), (
                    f"{len(plans)} chains do not fit {self.index.pool.slots // size} blocks"
                )
            self._start(sequence, chains, plans)
            holdings = self._holdings()

    def _holdings(self) -> dict[User, Holding]:
        running, waiting = by_user(self.running), by_user(self.waiting)
        held = {
            user: (len(own), sum(len(chain.blocks) for s in own for chain in s.chains))
            for user, own in running.items()
        }
        return holdings_of(
            {user: held.get(user, (0, 0)) for user in (*running, *waiting)},
            self.max_sequences,
            self.index.pool.blocks,
        )

    def _over_its_part(self, *, seat: bool) -> Sequence | None:
        """The youngest request of the user that has most beyond its part of the seats, or of the blocks; none that has
        been overtaken for its size as often as may be."""
        holdings = self._holdings()
        users = [user for user, own in holdings.items() if (own.seats_over if seat else own.blocks_over) > 1]
        if not users:
            return None
        most = max(users, key=lambda each: holdings[each].seats_over if seat else holdings[each].blocks_over)
        own = (s for s in reversed(self.running) if s.asker == most)
        return next((s for s in own if seat or s.overtaken < OVERTAKEN), None)

    def _skip_sources(self, sequence: Sequence) -> None:
        """Where all of a moved chain is cached, nothing has to be computed at its home."""
        for chain in sequence.chains:
            if chain.source is not None:
                chain.source.skipped = self._plan(sequence, chain).cached_tokens == len(chain.token_ids)

    def _move_chains(self, sequence: Sequence) -> None:
        """Move what is written at its home to where it is used."""
        size = self.block_size
        for chain in sequence.chains:
            source = chain.source
            if source is None or not chain.remaining or source.remaining or source.skipped:
                continue
            count = len(chain.token_ids)
            targets = chain.slots(chain.computed, count, size)
            chain.written(chain.computed, count, size)
            self._move(source.slots(chain.computed, count, size), targets, chain.start - source.start)
            chain.computed = count
            self._publish(sequence, chain)

    def _plan(self, sequence: Sequence, chain: SequenceChain) -> Plan:
        # The logits of the very last token are needed, so it is always computed.
        limit = len(chain.token_ids) - (chain is sequence.last)
        keys = chain.chain(self.block_size)
        return make_plan(
            self.index,
            chain.root,
            keys,
            chain.token_ids,
            limit=limit,
            now=self._clock(),
            reader=sequence.asker,
        )

    def _fits(self, plans: list[Plan]) -> bool:
        """Whether there is room, with one block for each running sequence, or the next step would preempt."""
        idle = {block for plan in plans for block in plan.touched if block.users == 0}
        wanted = sum(plan.new_blocks for plan in plans) + len(self.running)
        return wanted <= self.index.available_blocks - len(idle)

    def _awaits_other(self, sequence: Sequence, chain: SequenceChain) -> bool:
        """True if the first block that it would not find is being computed by a running sequence, for this one too."""
        now, asker, known = self._clock(), sequence.asker, self.index.store.blocks
        for key in chain.chain(self.block_size):
            block = known.get(key)
            # What others have to themselves is no reason to wait, nor not to.
            if block is None or not block.readable(asker, now):
                return (key, _alone(sequence, chain)) in self._computing
        return False

    def _start(self, sequence: Sequence, chains: list[SequenceChain], plans: list[Plan]) -> None:
        now = sequence.use.time
        # All of them before the first allocation, which may evict.
        for chain, plan in zip(chains, plans, strict=True):
            end = 0
            for block in plan.reused:
                end += block.size
                self.index.acquire(block, sequence.use, now + chain.ttl(end))
                if chain.sender is not None:
                    block.claim(chain.sender, chain.claim(end, now, sequence.tag))
                elif chain.ttl(end):
                    block.claimed = block.guarded = False  # it is nobody's text
            if plan.copied is not None:
                # Of a shared block the rest is not this request's text: it lives no longer for it.
                ends = now + chain.ttl(end + plan.copied.size) if chain.sender is None else 0.0
                self.index.acquire(plan.copied, sequence.use, ends)
        if not sequence.admitted:
            self._miss(sequence, chains, plans)
            for chain, plan in zip(chains, plans, strict=True):
                # Of a moved chain, what need not be computed at its home counts too.
                at_home = 0 if chain.source is None else chain.source.cached
                chain.cached = max(plan.cached_tokens, at_home)
            if self._admitted is not None:
                self._admitted(sequence, chains, plans)
        for chain, plan in zip(chains, plans, strict=True):
            chain.lineage = _lineage(sequence, chain, plan)
            self._start_chain(sequence, chain, plan)
        sequence.admitted = True
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.id)
        for chain in chains if sequence.kept else ():
            for key in chain.keys[chain.published :]:
                self._computing.setdefault((key, _alone(sequence, chain)), sequence)
        self._move_chains(sequence)

    def _miss(self, sequence: Sequence, chains: list[SequenceChain], plans: list[Plan]) -> None:
        """Tell the policy what the request looked for in vain: once, however often it is preempted."""
        keys = [
            key for chain, plan in zip(chains, plans, strict=True) for key in chain.keys[len(plan.reused) :]
        ]
        # A block may be cached that is not reused: the prompt's very last token is always computed.
        for key in dict.fromkeys(key for key in keys if key not in self.index):
            self.index.store.policy.miss(key, sequence.use)

    def _start_chain(self, sequence: Sequence, chain: SequenceChain, plan: Plan) -> None:
        after = plan.reused[-1].number if plan.reused else None
        new = self.index.allocate(plan.new_blocks, after=after, now=self._clock())
        if plan.copied is not None:
            size = self.block_size
            self.index.pool.copy_slots(plan.copied.number * size, new[0].number * size, plan.copied_tokens)
            self.index.release([plan.copied], sequence.use)
            new[0].blank = False
        chain.blocks = [*plan.reused, *new]
        chain.forget_runs()
        chain.published = len(plan.reused)
        chain.computed = plan.cached_tokens

    def _grow(self) -> None:
        """Give every running sequence the block its next token needs, preempting the youngest if none is left."""
        for sequence in list(self.running):
            last = sequence.last
            while sequence in self.running and len(last.token_ids) > len(last.blocks) * self.block_size:
                if self.index.available_blocks:
                    last.blocks += self.index.allocate(1, after=last.blocks[-1].number, now=self._clock())
                else:
                    self._preempt(self._over_its_part(seat=False) or self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in order of arrival; what it computed stays cached while there is room."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.id)

    def _publish(self, sequence: Sequence, chain: SequenceChain) -> None:
        size = self.block_size
        done = chain.computed // size
        if chain.fixed and not chain.remaining:
            done = len(chain.blocks)
        if done == chain.published or not sequence.kept:
            return
        chain.chain(size)
        for i in range(chain.published, done):
            tokens = chain.token_ids[i * size : (i + 1) * size]
            self._describe(sequence, chain, i)
            block = self.index.publish(chain.blocks[i], chain.parent_key(i), tokens, sequence.use)
            if block is not chain.blocks[i]:
                chain.blocks[i] = block
                chain.forget_runs()
            self._stop_computing(sequence, chain, chain.keys[i : i + 1])
        chain.published = done

    def _release(self, sequence: Sequence) -> None:
        for chain in reversed(sequence.chains):
            self._release_chain(sequence, chain)

    def _release_chain(self, sequence: Sequence, chain: SequenceChain) -> None:
        size = self.block_size
        blocks: list[Block] = chain.blocks[: chain.published]
        rest = chain.blocks[chain.published :]
        tail = chain.token_ids[chain.published * size : chain.computed]
        if tail and sequence.kept:
            self._describe(sequence, chain, chain.published)
            parent = chain.parent_key(chain.published)
            whole = chain.fixed and chain.computed == len(chain.token_ids)
            if whole and not chain.scope.private:
                # All of it was found in a longer block of another's: it is here too, whatever becomes of that.
                kept = self.index.publish(rest.pop(0), parent, tail, sequence.use)
            else:
                kept = self.index.publish_tail(rest.pop(0), parent, tail, sequence.use, sequence.asker)
            if kept is not None:
                blocks.append(kept)
        self.index.release([*blocks, *rest], sequence.use)
        self._stop_computing(sequence, chain, chain.keys[chain.published :])
        chain.blocks = []
        chain.forget_runs()
        chain.published = chain.computed = 0

    def _describe(self, sequence: Sequence, chain: SequenceChain, number: int) -> None:
        chain.describe(number, self.block_size, sequence.use.time, sequence.tag)

    def _stop_computing(self, sequence: Sequence, chain: SequenceChain, keys: Iterable[bytes]) -> None:
        alone = _alone(sequence, chain)
        for key in keys:
            if self._computing.get((key, alone)) is sequence:
                del self._computing[key, alone]


def _alone(sequence: Sequence, chain: SequenceChain) -> User:
    """The user who alone finds at first what a sequence computes of a chain; None if others do too."""
    return sequence.asker if chain.guarded else None


def by_user(sequences: Iterable[Sequence]) -> dict[User, list[Sequence]]:
    """Sequences by whose they are, in their order."""
    queues: dict[User, list[Sequence]] = {}
    for sequence in sequences:
        queues.setdefault(sequence.asker, []).append(sequence)
    return queues


def _overtake(blocked: Seq[Sequence]) -> bool:
    """Whether those that there is no room for can be overtaken once more; then they are."""
    if any(each.overtaken >= OVERTAKEN for each in blocked):
        return False
    for each in blocked:
        each.overtaken += 1
    return True


def _chunks(sequences: Seq[Sequence], share: int, least: int) -> dict[Sequence, int]:
    """The tokens that a user's sequences compute of its share of a step.

    Each decoding one has its token, those first that have waited longest; at least half of the share is for prefill
    where there is any, `least` tokens at the least. That is split between the oldest and the shortest.
    """
    prefilling = [s for s in sequences if s.remaining > 1]
    decoding = sorted((s for s in sequences if s.remaining == 1), key=lambda s: (s.stepped, s.id))
    reserved = min(sum(s.remaining for s in prefilling), share // 2)
    chunks = dict.fromkeys(decoding[: share - reserved], 1)
    budget = max(share - len(chunks), least)
    if not prefilling or not budget:
        return chunks
    oldest = prefilling[0]
    chunks[oldest] = min(oldest.remaining, budget if len(prefilling) == 1 else max(budget // 2, least, 1))
    budget -= chunks[oldest]
    for sequence in sorted(prefilling[1:], key=lambda s: s.remaining):
        if budget <= 0:
            break
        chunks[sequence] = min(sequence.remaining, budget)
        budget -= chunks[sequence]
    chunks[oldest] += max(0, min(budget, oldest.remaining - chunks[oldest]))
    return chunks


def _lineage(sequence: Sequence, chain: SequenceChain, plan: Plan) -> Lineage:
    """What the chain's KV is computed from: its own text, what it sees, and what computed the cached beginning.

    Of one user's own text that is the requests too; shared text is computed from nothing that is a request's, and
    has claims of those who sent it.
    """
    seen = [sequence.chains[view.chain].lineage for view in chain.sees]
    source = [chain.source.lineage] if chain.source else []
    own = frozenset[Scope | str]((chain.scope,)).union(chain.registered, *seen, *source)
    if not chain.scope.private:
        return own
    found = [block.lineage for block in (*plan.reused[-1:], *((plan.copied,) if plan.copied else ()))]
    return own.union((sequence.tag,), *found)


def _holds(sequence: Sequence, blocks: Iterable[Block]) -> bool:
    """Whether a sequence reads one of some blocks."""
    some = set(blocks)
    return any(not some.isdisjoint(chain.blocks) for chain in sequence.chains)


def _what_it_reads(sequence: Sequence) -> tuple[int, int]:
    last = sequence.last
    return sequence.chains[0].blocks[0].number if sequence.chains[0].blocks else -1, last.start + len(
        last.token_ids
    )
