"""Training and judging the session predictor on sessions of logs, with the states that the engine computes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ostinato.cache.use import Use
from ostinato.engine.engine import Engine
from ostinato.engine.predictor import Judgement, Predictor
from ostinato.engine.request import SamplingParams
from ostinato.errors import OstinatoError, PromptTooLongError
from ostinato.lab.predictor_logs import Session

LEAST = 64
BINS = 5

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Examples:
    """Final hidden states of first prompts, [sessions, features], and whether the sessions came back (1 or 0)."""

    states: Tensor
    labels: Tensor
    groups: tuple[str, ...]
    left_out: int = 0
    """Sessions whose prompt is too long for the model."""


@dataclass(frozen=True)
class Bin:
    """Held-out sessions with similar predictions."""

    predicted: float
    returned: float
    examples: int


@dataclass(frozen=True)
class Report:
    """What training found, on sessions that were not learned from."""

    examples: int
    left_out: int
    held_out: Judgement
    auc: float | None
    """How often a session that came back was given more than one that did not; None if all did the same."""
    predicted: float
    """Mean prediction, to compare with the base rate."""
    calibration: tuple[Bin, ...]
    trained: bool

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return asdict(self)


class _Collector(Predictor):
    """Keeps the state of every prompt, and learns nothing itself."""

    def __init__(self, features: int) -> None:
        super().__init__(fingerprint="", model="", features=features)
        self.state: Tensor | None = None

    def arrive(self, use: Use) -> None:
        pass

    def prefilled(self, use: Use, hidden: Callable[[], Tensor]) -> Use:
        self.state = hidden()
        return use


def read(engine: Engine, sessions: Sequence[Session], progress: Progress | None = None) -> Examples:
    """Have the model read each session's first prompt."""
    states: list[Tensor] = []
    kept: list[Session] = []
    before, collector = engine.predictor, _Collector(engine.config.hidden_size)
    engine.predictor = collector
    try:
        for number, session in enumerate(sessions, start=1):
            try:
                engine.generate(
                    session.messages, SamplingParams(max_tokens=1, temperature=0), session=f"{number}"
                )
            except PromptTooLongError:
                continue
            finally:
                if progress is not None:
                    progress(number, len(sessions))
            assert collector.state is not None
            states.append(collector.state)
            kept.append(session)
    finally:
        engine.predictor = before
    return Examples(
        torch.stack(states) if states else torch.empty(0, engine.config.hidden_size),
        torch.tensor([float(session.returned) for session in kept]),
        tuple(session.group for session in kept),
        len(sessions) - len(kept),
    )


def train(
    examples: Examples,
    *,
    fingerprint: str,
    model: str,
    epochs: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Predictor, Report]:
    """A predictor from half of the groups; a quarter calibrates it, and a quarter judges it."""
    count = len(examples.groups)
    if count < LEAST:
        raise OstinatoError(
            f"{count} sessions are too few to learn from and to judge by: give {LEAST} or more."
        )
    groups = sorted(set(examples.groups))
    random.Random(seed).shuffle(groups)
    place = {group: number % 4 for number, group in enumerate(groups)}
    parts: list[tuple[Tensor, Tensor]] = []
    for places in ((0, 1), (2,), (3,)):
        rows = [i for i, group in enumerate(examples.groups) if place[group] in places]
        parts.append((examples.states[rows], examples.labels[rows]))
    if any(not len(labels) for _, labels in parts):
        raise OstinatoError(f"All sessions begin with one of {len(groups)} prompts: give more varied ones.")
    features = examples.states.shape[1]
    predictor = Predictor(fingerprint=fingerprint, model=model, features=features, seed=seed)
    predictor.fit(*parts, epochs=epochs, progress=progress)
    assert predictor.judgement is not None
    states, labels = parts[2]
    predicted = predictor.logits(states).sigmoid()
    return predictor, Report(
        count,
        examples.left_out,
        predictor.judgement,
        auc(predicted, labels),
        float(predicted.mean()),
        tuple(_bins(predicted, labels)),
        predictor.trained,
    )


def auc(predicted: Tensor, labels: Tensor) -> float | None:
    """Area under the ROC curve; ties count half."""
    positive, negative = predicted[labels > 0.5], predicted[labels < 0.5]
    if not len(positive) or not len(negative):
        return None
    above = (positive[:, None] > negative).double() + 0.5 * (positive[:, None] == negative).double()
    return float(above.mean())


def _bins(predicted: Tensor, labels: Tensor) -> list[Bin]:
    """Fifths of the sessions, by what was predicted of them."""
    order = predicted.argsort()
    return [
        Bin(float(predicted[part].mean()), float(labels[part].mean()), len(part))
        for part in order.tensor_split(BINS)
        if len(part)
    ]
