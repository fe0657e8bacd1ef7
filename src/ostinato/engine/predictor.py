"""The predictor: whether the session of a first request will come back, told from what the model made of its prompt.

A small network reads the serving model's final hidden state at the prompt's last token (SAECache, 2026). It learns
from what sessions then do, and says nothing until it does better than their mere average on examples that it has not
learned from. It sees hidden states, session ids and times; never text.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ostinato.cache.use import Use
from ostinato.errors import ModelFormatError, OstinatoError

log = logging.getLogger(__name__)

VERSION = 1
LAYERS = (256, 64, 1)
BATCH = 32
LEARNING_RATE, WEIGHT_DECAY, DROPOUT = 1e-3, 1.0, 0.5
CLIP = 4.0
"""Standardised inputs end there: hidden states have dimensions with rare values far outside."""
FORGETTING = 4096
"""Mean and variance of the inputs weigh about as many prompts as this."""

OPEN = 2048
"""First requests whose sessions are watched at once. While there are so many, new ones are not: dropping old ones
would drop just those that stay silent."""
GAPS = 512
ENOUGH_GAPS = 30
QUANTILE = 0.95
DEFAULT_HORIZON = 600.0
"""Seconds of silence after which a session counts as over, until `ENOUGH_GAPS` are known."""

ROUND = 32
"""New labels from one review to the next."""
ENOUGH_JUDGED = 16
SURE = 3.0
"""Standard errors by which the gain over the base rate must be above zero."""
WORTH = 0.05
"""Share of the base rate's loss that it must save."""

STEPS, MOST_STEPS = 2, 256
"""Steps of training for each label, and the most that are put off: one is done at the end of a request."""

FORMAT = "ostinato.predictor"
TRAIN_ANOTHER = (
    "Train one for this model with `ostinato lab train-predictor`, or name a file that does not exist yet: "
    "it is written from what the server learns."
)

Weights = dict[str, Tensor]


@dataclass(eq=False, slots=True)
class Example:
    """A session's first request. `returned` is None while nobody knows."""

    state: Tensor
    session: str
    time: float
    returned: bool | None = None


@dataclass(frozen=True)
class Judgement:
    """Predictions against what happened. Losses are in nats."""

    examples: int
    base_rate: float
    loss: float
    base_loss: float
    """Of the best constant, known in hindsight: their base rate."""
    error: float
    """Standard error of the gain."""

    @property
    def gain(self) -> float:
        return self.base_loss - self.loss

    @property
    def convincing(self) -> bool:
        """The gain is hardly luck, and more than a trifle."""
        return self.examples >= ENOUGH_JUDGED and self.gain > max(SURE * self.error, WORTH * self.base_loss)

    @property
    def disappointing(self) -> bool:
        return self.examples >= 2 * ENOUGH_JUDGED and self.gain <= 0


def judge(logits: Tensor, labels: Tensor) -> Judgement:
    """How good `logits` are for what happened, [examples] of 0 and 1."""
    rate = labels.mean()
    each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    base = F.binary_cross_entropy(rate.expand_as(labels), labels, reduction="none")
    count = len(labels)
    error = float((base - each).std()) / math.sqrt(count) if count > 1 else math.inf
    return Judgement(count, float(rate), float(each.mean()), float(base.mean()), error)


class Scale:
    """Running mean and variance of states."""

    def __init__(self, features: int) -> None:
        self.mean, self.square = torch.zeros(features), torch.zeros(features)
        self.count = 0

    def add(self, state: Tensor) -> None:
        self.count = min(self.count + 1, FORGETTING)
        difference = state - self.mean
        self.mean += difference / self.count
        self.square += (difference * (state - self.mean) - self.square) / self.count

    def __call__(self, states: Tensor) -> Tensor:
        return ((states - self.mean) * (self.square + 1e-6).rsqrt()).clamp_(-CLIP, CLIP)


class Network:
    """Three linear layers with ReLU between, and a calibration of their logit: slope and offset."""

    def __init__(self, features: int, generator: torch.Generator) -> None:
        self._generator = generator
        self.weights: Weights = {}
        for number, (wide, narrow) in enumerate(pairwise((features, *LAYERS)), start=1):
            # The first predictions are near even: the last layer begins small.
            spread = math.sqrt(2 / wide) * (0.1 if number == len(LAYERS) else 1)
            self.weights[f"layers.{number}.weight"] = (
                torch.randn(narrow, wide, generator=generator) * spread
            ).requires_grad_()
            self.weights[f"layers.{number}.bias"] = torch.zeros(narrow).requires_grad_()
        self._optimiser = torch.optim.AdamW(
            self.weights.values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, inputs: Tensor, labels: Tensor) -> None:
        """Learn from a batch of scaled inputs."""
        logits = _logits(self.weights, inputs, self._dropout)
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self._optimiser.step()

    def _dropout(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self._generator) >= DROPOUT) / (1 - DROPOUT)

    def load(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])


def _losses(weights: Weights, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(_logits(weights, inputs), labels, reduction="none")


def calibrated(weights: Weights, inputs: Tensor, labels: Tensor) -> Weights:
    """A copy of the weights, with logits that fit examples which were not learned from."""
    weights = {name: weight.detach().clone() for name, weight in weights.items()}
    slope, offset = calibration(_logits(weights, inputs), labels)
    last = f"layers.{len(LAYERS)}"
    for each in ("weight", "bias"):
        weights[f"{last}.{each}"] *= max(
            slope, 0.05
        )  # never quite flat: a later calibration may find more in it
    weights[f"{last}.bias"] += offset
    return weights


@contextmanager
def _one_thread() -> Generator[None]:
    """Products as small as these are done before a second thread has woken up."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits(weights: Weights, inputs: Tensor, dropout: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    x = inputs
    for number in range(1, len(LAYERS) + 1):
        x = F.linear(x, weights[f"layers.{number}.weight"], weights[f"layers.{number}.bias"])
        if number < len(LAYERS):
            x = x.relu_() if dropout is None else dropout(x.relu_())
    return x[..., 0]


def calibration(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Slope and offset that make logits fit labels best (Platt), with a pull to a flat line for when labels are few.

    A network that has learned its examples by heart is too sure of others: it gets a slope near zero.
    """
    middle, spread = float(logits.mean()), float(logits.std(correction=0)) + 1e-6
    x = torch.stack([(logits.double() - middle) / spread, torch.ones(len(logits), dtype=torch.double)], dim=1)
    y, pull = labels.double(), torch.tensor([1.0, 0.1], dtype=torch.double)
    fitted = torch.zeros(2, dtype=torch.double)
    for _ in range(20):  # Newton's method
        p = torch.sigmoid(x @ fitted)
        gradient = x.T @ (p - y) + pull * fitted
        curvature = (x * (p * (1 - p))[:, None]).T @ x + pull.diag()
        step = torch.linalg.solve(curvature, gradient).clamp_(-1, 1)
        fitted = fitted - step
        if float(step.abs().max()) < 1e-4:
            break
    slope = max(0.0, float(fitted[0])) / spread
    return slope, float(fitted[1]) - slope * middle


class Predictor:
    """Watches first requests, learns whether their sessions come back, and foretells it of new ones.

    All methods are called on the engine's thread, and none of them fails: at its first error it switches itself off.
    """

    def __init__(self, *, fingerprint: str, model: str, features: int, seed: int = 0) -> None:
        self.fingerprint, self.model, self.features = fingerprint, model, features
        self.trained = False
        """It does better than the base rate, so it predicts."""
        self.labels = 0
        """Sessions learned from, those of the file it was loaded from included."""
        self.judgement: Judgement | None = None
        """The latest, of what it predicts with now."""
        self.off = False
        self.horizon = DEFAULT_HORIZON
        """Seconds of silence after which a session counts as over."""
        self.path: Path | None = None
        self.scale = Scale(features)
        self._generator = torch.Generator().manual_seed(seed)
        self._learner = Network(features, self._generator)
        self._live: Weights = {
            name: weight.detach().clone() for name, weight in self._learner.weights.items()
        }
        """What predictions are made with: the learner's latest weights that did better than those before."""
        self._open: deque[Example] = deque()
        self._opened: dict[str, Example] = {}
        self._silent: OrderedDict[str, Example] = OrderedDict()
        """Sessions counted as over, in case they come back after all."""
        self._gaps: deque[float] = deque(maxlen=GAPS)
        # Of four labels two are learned from, one calibrates, and one judges. Those two lists hold the last 512
        # sessions, so that a change in what people do shows.
        self._learned: deque[Example] = deque(maxlen=1792)
        self._calibrating: deque[Example] = deque(maxlen=128)
        self._judging: deque[Example] = deque(maxlen=128)
        self._slices = (self._learned, self._judging, self._learned, self._calibrating)
        self._new = 0
        self._steps_due = 0
        self._learns = False

    # -- what the engine tells ----------------------------------------------------------------------------

    def arrive(self, use: Use) -> None:
        """A request comes in."""
        with self._guard():
            if use.turn > 1:
                self._came_back(use)
            self._settle(use.time)

    def prefilled(self, use: Use, hidden: Callable[[], Tensor]) -> Use:
        """A prompt was computed. Returns its use, with a prediction if it is a first request's and there is one.

        `hidden` gives the final hidden state of the prompt's last token, [features] float32.
        """
        if use.turn > 1 or self.off:
            return use
        with self._guard():
            state = hidden()
            if state.isfinite().all():
                self.scale.add(state)
                self._watch(Example(state, use.session, use.time))
                return replace(use, returns=self.predict(state))
        return use

    def learn(self) -> None:
        """One step of training, or every `ROUND` labels a review, if anything new is known; call it at a request's end.

        A step takes 1.5 ms of one core for a model of 576 features, 5 ms for one of 4,096, and a review three times
        that: a small part of the same model's step of decode on a CPU, twice a session. A thread of its own would
        contend with the model for the same cores, and leave to chance when what is learned.
        """
        with self._guard(), _one_thread():
            if self._new >= ROUND:
                self._new = 0
                self._review()
            elif self._steps_due and len(self._learned) >= BATCH:
                self._steps_due -= 1
                self._step()

    def predict(self, state: Tensor) -> float | None:
        """The probability that the session whose first prompt ends in `state` comes back; None if not trained."""
        if not self.trained or self.off:
            return None
        return float(self.logits(state).sigmoid())

    def logits(self, states: Tensor) -> Tensor:
        """What is predicted with now, whether or not it is good enough."""
        with torch.no_grad():
            return _logits(self._live, self.scale(states))

    @contextmanager
    def _guard(self) -> Generator[None]:
        """The first error is logged, and the last: from then on nothing is watched, learned or foretold."""
        try:
            yield
        except Exception:
            if not self.off:
                log.exception(
                    "the session predictor failed and is off from now on; requests go on without it"
                )
            self.off = True

    # -- what sessions did --------------------------------------------------------------------------------

    def _watch(self, example: Example) -> None:
        if len(self._open) < OPEN:
            self._open.append(example)
            self._opened[example.session] = example

    def _came_back(self, use: Use) -> None:
        example = self._opened.pop(use.session, None) or self._silent.pop(use.session, None)
        if example is None:
            return
        example.returned = True
        self._add_gap(use.time - example.time)

    def _add_gap(self, gap: float) -> None:
        self._gaps.append(gap)
        if len(self._gaps) >= ENOUGH_GAPS:
            self.horizon = sorted(self._gaps)[int(QUANTILE * len(self._gaps))]

    def _settle(self, now: float) -> None:
        """Learn of sessions in the order in which they began.

        A return is known at once, a silence only after the horizon: in any other order the latest labels would all
        be returns, and the base rate too high.
        """
        while self._open and (self._open[0].returned or now - self._open[0].time > self.horizon):
            example = self._open.popleft()
            if not example.returned:
                example.returned = False
                if self._opened.get(example.session) is example:
                    del self._opened[example.session]
                self._silent[example.session] = example
                if len(self._silent) > OPEN:
                    self._silent.popitem(last=False)
            self._slices[self.labels % len(self._slices)].append(example)
            self.labels += 1
            self._learns = True
            self._new += 1
            self._steps_due = min(self._steps_due + STEPS, MOST_STEPS)

    # -- learning -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        picked = torch.randint(len(self._learned), (BATCH,), generator=self._generator).tolist()
        self._learner.step(*self._batch([self._learned[i] for i in picked]))

    def _review(self) -> None:
        """Predict with what was learned since the last review if it is better, and with nothing if it is no good."""
        if min(len(self._calibrating), len(self._judging)) < ENOUGH_JUDGED:
            return  # 64 labels at first, and after loading a file
        self._adopt(*self._batch(self._calibrating))
        inputs, labels = self._batch(self._judging)
        self._judge(inputs, labels)

    def _batch(self, examples: Iterable[Example]) -> tuple[Tensor, Tensor]:
        examples = list(examples)
        labels = torch.tensor([float(bool(example.returned)) for example in examples])
        return self.scale(torch.stack([example.state for example in examples])), labels

    def _adopt(self, inputs: Tensor, labels: Tensor) -> None:
        """Take over the learner's weights if they do clearly better than those before; both are calibrated here."""
        before, after = (
            calibrated(weights, inputs, labels) for weights in (self._live, self._learner.weights)
        )
        gains = _losses(before, inputs, labels) - _losses(after, inputs, labels)
        # Less than a standard error may be chance, which would wear a good network out step by step.
        self._live = after if float(gains.mean()) > float(gains.std()) / math.sqrt(len(gains)) else before

    def _judge(self, inputs: Tensor, labels: Tensor) -> None:
        with torch.no_grad():
            self.judgement = judge(_logits(self._live, inputs), labels)
        self.trained = not self.judgement.disappointing if self.trained else self.judgement.convincing

    def fit(
        self,
        learned: tuple[Tensor, Tensor],
        calibrating: tuple[Tensor, Tensor],
        judging: tuple[Tensor, Tensor],
        *,
        epochs: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Learn from examples at hand: three sets of states and labels, as online."""
        states, labels = learned
        for state in states:
            self.scale.add(state)
        inputs, calibrating = self.scale(states), (self.scale(calibrating[0]), calibrating[1])
        for epoch in range(1, epochs + 1):
            for picked in torch.randperm(len(labels), generator=self._generator).split(BATCH):
                self._learner.step(inputs[picked], labels[picked])
            self._adopt(*calibrating)
            if progress is not None:
                progress(epoch, epochs)
        self.labels += len(labels) + len(calibrating[1]) + len(judging[1])
        self._judge(self.scale(judging[0]), judging[1])

    # -- files --------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: Path, *, fingerprint: str, model: str, features: int) -> Predictor:
        """The predictor in the file, or an untrained one that will be saved there once it has learned something.

        Raises:
            ModelFormatError: the file is no predictor, or one for another model.
        """
        predictor = cls(fingerprint=fingerprint, model=model, features=features)
        predictor.path = path
        if path.exists():
            predictor._load(path)
        elif not path.absolute().parent.is_dir():
            raise OstinatoError(f"There is no folder {path.parent} to keep the predictor {path.name} in.")
        return predictor

    def close(self) -> None:
        """Save what was learned since the file was opened. A failure is logged."""
        if self.path is None or not self._learns or self.off:
            return
        try:
            self.save(self.path)
        except OSError as error:
            log.error("the session predictor could not be saved: %s", error)

    def save(self, path: Path) -> None:
        """Write the file whole or not at all. Examples are not in it: states tell of the prompts they come from."""
        tensors = dict(self._live) | {
            "scale.mean": self.scale.mean,
            "scale.square": self.scale.square,
            "gaps": torch.tensor(list(self._gaps), dtype=torch.float64),
        }
        about = {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "model": self.model,
            "features": self.features,
            "labels": self.labels,
            "prompts": self.scale.count,
            "trained": self.trained,
            "judgement": None if self.judgement is None else asdict(self.judgement),
        }
        data = save(tensors, {FORMAT: json.dumps(about)})
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})[FORMAT])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if about["version"] != VERSION:
                raise ModelFormatError(
                    f"{path} is a session predictor of version {about['version']}; this Ostinato reads {VERSION}. "
                    f"{TRAIN_ANOTHER}"
                )
            if about["fingerprint"] != self.fingerprint or about["features"] != self.features:
                raise ModelFormatError(
                    f"{path} predicts from the hidden states of {about['model']} (fingerprint "
                    f"{about['fingerprint'][:12]}), and this is {self.model} ({self.fingerprint[:12]}): another model, "
                    f"or the same with another dtype or block size. {TRAIN_ANOTHER}"
                )
            self._live = {name: tensors[name] for name in self._live}
            self._learner.load(self._live)
            self.scale.mean, self.scale.square = tensors["scale.mean"], tensors["scale.square"]
            self.scale.count = about["prompts"]
            self.labels, self.trained = about["labels"], about["trained"]
            for gap in tensors["gaps"].tolist():
                self._add_gap(gap)
            if about["judgement"] is not None:
                self.judgement = Judgement(**about["judgement"])
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ModelFormatError(
                f"{path} is no session predictor, or a damaged one ({error}). {TRAIN_ANOTHER}"
            ) from error
