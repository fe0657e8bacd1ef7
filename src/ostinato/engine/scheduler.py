"""The scheduler: who computes how many tokens in the next step, and who gets which blocks.

Continuous batching: every step first gives each decoding sequence its one token, then spends the rest of
the token budget on chunks of prefill. Arrival order decides admission; a step's prefill budget is split
between the oldest sequence and the shortest ones, so a long prompt neither starves nor blocks the others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ostinato.cache.block import Block
from ostinato.cache.index import Index
from ostinato.cache.plan import Plan, make_plan
from ostinato.engine.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """`tokens` tokens of `sequence` to compute in this step, from `sequence.computed` on."""

    sequence: Sequence
    tokens: int

    @property
    def samples(self) -> bool:
        """True if the step computes the last known token, so that the next one can be sampled."""
        return self.tokens == self.sequence.remaining


class Scheduler:
    """Owns the waiting and running sequences and their blocks."""

    def __init__(self, index: Index, *, max_batch_tokens: int, max_sequences: int) -> None:
        self.index = index
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        # Blocks a running sequence will have computed soon: whoever needs them waits for them.
        self._computing: dict[bytes, Sequence] = {}

    @property
    def block_size(self) -> int:
        return self.index.pool.block_size

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def schedule(self) -> list[Work]:
        """Choose the next step's work; every sequence in it has blocks for the tokens it computes."""
        self._admit()
        self._grow()
        decoding = [s for s in self.running if s.remaining == 1]
        prefilling = [s for s in self.running if s.remaining > 1]
        work = [Work(s, 1) for s in decoding]
        budget = max(self.max_batch_tokens - len(decoding), self.block_size)
        if prefilling:
            oldest = prefilling[0]
            share = budget if len(prefilling) == 1 else max(budget // 2, self.block_size)
            chunks = {oldest: min(oldest.remaining, share)}
            budget -= chunks[oldest]
            for sequence in sorted(prefilling[1:], key=lambda s: s.remaining):
                if budget <= 0:
                    break
                chunks[sequence] = min(sequence.remaining, budget)
                budget -= chunks[sequence]
            chunks[oldest] += max(0, min(budget, oldest.remaining - chunks[oldest]))
            work += [Work(s, n) for s, n in chunks.items()]
        return work

    def computed(self, work: Seq[Work]) -> None:
        """The step's KV is written: make full blocks findable by others."""
        for item in work:
            item.sequence.computed += item.tokens
            self._publish(item.sequence)

    def finish(self, sequence: Sequence) -> None:
        """The request ended or was cancelled, waiting or running: its blocks are released."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _admit(self) -> None:
        for sequence in list(self.waiting):
            if len(self.running) >= self.max_sequences:
                return
            keys = sequence.chain(self.block_size)
            if self._awaits_other(keys):
                continue
            plan = make_plan(self.index, sequence.root, keys, sequence.token_ids)
            # One block of headroom for each running sequence, or the next step would preempt.
            headroom = len(self.running)
            if plan.new_blocks + headroom > self.index.available_blocks - plan.idle_blocks:
                if self.running:
                    return  # in turn: a large request is not overtaken for ever by small ones
                # Alone, the request fits by the engine's own check; only its copy source may be in the way.
                plan = Plan(plan.reused, None, 0, len(plan.reused) * self.block_size, plan.new_blocks)
            self._start(sequence, plan)

    def _awaits_other(self, keys: list[bytes]) -> bool:
        """True if the first block that is not cached is being computed by a running sequence."""
        missing = next((key for key in keys if key not in self.index), None)
        return missing is not None and missing in self._computing

    def _start(self, sequence: Sequence, plan: Plan) -> None:
        for block in plan.reused:
            self.index.acquire(block)
        if plan.copied is not None:
            self.index.acquire(plan.copied)
        after = plan.reused[-1].number if plan.reused else None
        new = self.index.allocate(plan.new_blocks, after=after)
        if plan.copied is not None:
            size = self.block_size
            self.index.pool.copy_slots(plan.copied.number * size, new[0].number * size, plan.copied_tokens)
            self.index.release([plan.copied])
        sequence.blocks = [*plan.reused, *new]
        sequence.forget_runs()
        sequence.published = len(plan.reused)
        sequence.computed = plan.cached_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = plan.cached_tokens
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=lambda s: s.id)
        for key in sequence.keys[sequence.published :]:
            self._computing.setdefault(key, sequence)

    def _grow(self) -> None:
        """Give every running sequence the block its next token needs, preempting the youngest if none is left."""
        for sequence in list(self.running):
            while (
                sequence in self.running and len(sequence.token_ids) > len(sequence.blocks) * self.block_size
            ):
                if self.index.available_blocks:
                    sequence.blocks += self.index.allocate(1, after=sequence.blocks[-1].number)
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, in order of arrival; what it computed stays cached while there is room."""
        self.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.append(sequence)
        self.waiting.sort(key=lambda s: s.id)

    def _publish(self, sequence: Sequence) -> None:
        size = self.block_size
        full = sequence.computed // size
        if full == sequence.published:
            return
        sequence.chain(size)
        for i in range(sequence.published, full):
            tokens = sequence.token_ids[i * size : (i + 1) * size]
            block = self.index.publish(sequence.blocks[i], sequence.parent_key(i), tokens)
            if block is not sequence.blocks[i]:
                sequence.blocks[i] = block
                sequence.forget_runs()
            self._stop_computing(sequence, sequence.keys[i])
        sequence.published = full

    def _release(self, sequence: Sequence) -> None:
        size = self.block_size
        blocks: list[Block] = sequence.blocks[: sequence.published]
        rest = sequence.blocks[sequence.published :]
        tail = sequence.token_ids[sequence.published * size : sequence.computed]
        if tail:
            kept = self.index.publish_tail(rest.pop(0), sequence.parent_key(sequence.published), tail)
            if kept is not None:
                blocks.append(kept)
        self.index.release([*blocks, *rest])
        for key in sequence.keys[sequence.published :]:
            self._stop_computing(sequence, key)
        sequence.blocks = []
        sequence.forget_runs()
        sequence.published = sequence.computed = 0

    def _stop_computing(self, sequence: Sequence, key: bytes) -> None:
        if self._computing.get(key) is sequence:
            del self._computing[key]
