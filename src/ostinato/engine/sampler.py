"""The sampler: from logits to the next token of each sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ostinato.engine.grammar import GrammarError
from ostinato.engine.request import SamplingParams
from ostinato.engine.sequence import Sequence


@dataclass(frozen=True)
class Sampled:
    """A chosen token; with log-probabilities if the request wants them: its own, then the best k's."""

    token_id: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    ends: bool = False
    """The reply's grammar ends with it."""
    error: GrammarError | None = None
    """Why no token could be chosen."""


class Sampler:
    """Picks tokens. One random stream a request, so that neither the batch nor a preemption changes it."""

    def __init__(self) -> None:
        self._streams: dict[int, random.Random] = {}

    def forget(self, sequence: Sequence) -> None:
        """The request ended."""
        self._streams.pop(sequence.id, None)

    def sample(self, logits: Tensor, sequences: Seq[Sequence]) -> list[Sampled]:
        """Choose one token for each row of `logits`, [sequences, vocab] float32."""
        # One argmax for the whole batch: most rows are greedy, and the others need it not at all.
        best = _argmax(logits)
        return [self._try(logits[i], best[i], sequence) for i, sequence in enumerate(sequences)]

    def _try(self, logits: Tensor, best: int, sequence: Sequence) -> Sampled:
        matcher = sequence.matcher
        if matcher is None:
            return self._one(logits, best, sequence, None)
        try:
            sampled = self._one(logits, best, sequence, matcher.mask())
        except GrammarError as error:
            return Sampled(best, error=error)
        matcher.take(sampled.token_id)
        return replace(sampled, ends=matcher.ended)

    def _one(
        self, logits: Tensor, best: int, sequence: Sequence, allowed: NDArray[np.bool_] | None
    ) -> Sampled:
        params = sequence.params
        adjusted = _penalised(logits, sequence)
        greedy = params.temperature == 0.0
        kept: Tensor | None = None
        if allowed is not None and not (greedy and adjusted is logits and allowed[best : best + 1].any()):
            # Nothing is computed of tokens that the grammar forbids: mostly it leaves a few.
            kept = _kept(allowed, logits)
            adjusted = adjusted[kept]
        if greedy:
            at = best if adjusted is logits else int(adjusted.argmax())
        else:
            stream = self._streams.get(sequence.id)
            if stream is None:
                stream = self._streams[sequence.id] = random.Random(params.seed)
            at = _draw(adjusted, params, stream.random())
        token = at if kept is None else int(kept[at])
        if params.logprobs is None:
            return Sampled(token)
        # Of the model itself, before penalties and temperature, as the OpenAI API reports them.
        logprobs = logits.log_softmax(dim=-1)
        values, ids = logprobs.topk(params.logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return Sampled(token, float(logprobs[token]), top)


def _argmax(logits: Tensor) -> list[int]:
    # NumPy's argmax is vectorised: ten times as fast as PyTorch's on a CPU.
    best: list[int] = (
        logits.numpy().argmax(-1).tolist() if logits.device.type == "cpu" else logits.argmax(-1).tolist()
    )
    return best


def _penalised(logits: Tensor, sequence: Sequence) -> Tensor:
    """Logits after penalties and bias: `logits` itself if none apply."""
    params = sequence.params
    plain = params.presence_penalty == 0 and params.frequency_penalty == 0 and params.repetition_penalty == 1
    if plain and not params.logit_bias:
        return logits
    logits = logits.clone()
    if params.repetition_penalty != 1:
        seen = torch.tensor(sequence.token_ids, device=logits.device).unique()
        values = logits[seen]
        logits[seen] = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    generated = sequence.generated_ids
    if generated and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(generated, device=logits.device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=logits.device)
        logits[biased] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
    return logits


def _kept(allowed: NDArray[np.bool_], logits: Tensor) -> Tensor:
    """The ids of the tokens that are allowed."""
    return torch.from_numpy(np.flatnonzero(allowed[: len(logits)])).to(logits.device)


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """Sample by inverting the cumulative distribution at `uniform` in [0, 1).

    Filters in vLLM's order: temperature, top-k, top-p, min-p.
    """
    scaled = logits.double() / max(params.temperature, 1e-5)
    if params.top_k or params.top_p < 1.0:
        probs, ids = _nucleus(scaled, params.top_k, params.top_p)
    else:
        probs, ids = scaled.softmax(dim=-1), None
    if params.min_p > 0.0:
        probs = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    cumulative = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    # Rounding may leave the last steps of the sum flat: step back to a token that can be drawn.
    index = min(index, int(probs.nonzero()[-1]))
    return index if ids is None else int(ids[index])


def _nucleus(scaled: Tensor, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Probabilities (not renormalised) and ids of the tokens that top-k and top-p leave, best first."""
    count = min(top_k or 256, scaled.shape[-1])
    while True:
        values, ids = scaled.topk(count)
        # top-p applies to what top-k left, renormalised.
        probs = torch.exp(values - (values if top_k else scaled).logsumexp(-1))
        kept = int((probs.cumsum(-1) - probs < top_p).sum())
        # Sorting the whole vocabulary costs more than all else here, and the nucleus is nearly always small.
        if kept < count or top_k or count == scaled.shape[-1]:
            return probs[:kept], ids[:kept]
        count = scaled.shape[-1]
