"""The runner: computes one step of work with the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import partial

import torch
from torch import Tensor

from ostinato.cache.pool import Pool, Run
from ostinato.engine.attention import AttentionBatch, attend
from ostinato.engine.scheduler import Work
from ostinato.models.decoder import Decoder


class Runner:
    """Lays a step's tokens out as one batch, whoever they belong to."""

    def __init__(self, decoder: Decoder, pool: Pool) -> None:
        self.decoder = decoder
        self.pool = pool
        self._states = torch.empty(0)
        """What the last step's sampling sequences left behind the last layer."""

    def run(self, work: Seq[Work]) -> Tensor:
        """Write the KV of all tokens of `work`; return logits [sampling sequences, vocab], in order."""
        size = self.pool.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        rows: list[int] = []
        runs: list[tuple[Run, ...]] = []
        for item in work:
            sequence = item.sequence
            for chain, count in sequence.take(item.tokens):
                first, end = chain.computed, chain.computed + count
                tokens += chain.token_ids[first:end]
                positions += range(chain.start + first, chain.start + end)
                slots += chain.slots(first, end, size)
                starts.append(len(tokens))
                runs.append(sequence.runs(chain, end, size))
            if item.samples:
                rows.append(len(tokens) - 1)
        device = self.decoder.backend.device
        batch = AttentionBatch(
            starts=tuple(starts),
            positions=torch.tensor(positions, dtype=torch.int32, device=device),
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            runs=tuple(runs),
        )
        self._states = self.decoder.states(
            torch.tensor(tokens, device=device),
            partial(attend, self.pool, batch, self.decoder.backend.kernels),
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
        return self.decoder.logits(self._states)

    def hidden(self, row: int) -> Tensor:
        """The final hidden state of the last step's sampling sequence number `row`, [hidden] float32 on the CPU.

        The head norms its input on the way in, so nothing keeps the normed states: this one row is normed for whoever
        asks, and all others cost nothing.
        """
        return self.decoder.final_norm(self._states[row : row + 1])[0].float().cpu().clone()
