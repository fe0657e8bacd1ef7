"""Quality: how far answers on reused modules are from those of full attention.

Every question is asked in several modes over the same passages. The model reads a reference answer after each
prompt, and its distributions are compared token by token with those it has after the whole prompt was computed
at once. Prompts are made and computed by the code that serves requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ostinato.cache.index import Index
from ostinato.cache.policy.lru import LRU
from ostinato.cache.pool import Pool
from ostinato.engine.attention import AttentionBatch, attend, move
from ostinato.engine.device import choose_device, choose_dtype
from ostinato.engine.request import SamplingParams
from ostinato.engine.runner import Runner
from ostinato.engine.scheduler import Scheduler, Work
from ostinato.engine.sequence import Sequence as EngineSequence
from ostinato.engine.sequence import sequence_chains
from ostinato.errors import InvalidRequestError, OstinatoError
from ostinato.lab.needles import needle_questions
from ostinato.lab.qmsum import qmsum_questions
from ostinato.lab.question import Question
from ostinato.lab.rouge import rouge_l
from ostinato.models.catalogue import resolve
from ostinato.models.decoder import Decoder
from ostinato.models.linear import Backend
from ostinato.models.tokenizer import Tokenizer
from ostinato.models.weights import load_model_files
from ostinato.native import kernels
from ostinato.prompt.registry import Registry
from ostinato.prompt.schema import Document, Documents, Item, SchemaPrompt, Text, Turn
from ostinato.prompt.span import Prompt

FULL, AGAIN, ISOLATED, MODULAR, NONE = "full", "full (again)", "isolated", "modular", "none"
LINKS = {"linked 16": 16, "linked 32": 32}
MODES = (FULL, AGAIN, ISOLATED, MODULAR, *LINKS, NONE)
"""`full (again)` is the reference computed in other steps: what rounding alone makes of it."""

INSTRUCTION = "Answer the question from the following passages. Be brief and precise."
STEP_TOKENS, OTHER_STEP_TOKENS = 512, 176
BLOCK_SIZE = 16
RESAMPLES = 2_000

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Measure:
    """One question in one mode.

    `kl` (from full attention, in nats) and `agreement` (of the likeliest token with that of full attention)
    are means over the tokens of the reference answer. `score` is ROUGE-L of the model's own answer, or
    for a needle 1 if the answer holds it; None where nothing was generated. `recomputed` is the share of
    the passages' tokens that this prompt has to compute although all its modules are cached.
    """

    data: str
    question: str
    mode: str
    kl: float
    agreement: float
    score: float | None
    recomputed: float
    reply: str | None


@dataclass(frozen=True)
class Row:
    """The means of one mode over the questions of one data set, with 95 % bootstrap intervals."""

    data: str
    mode: str
    questions: int
    kl: float
    kl_interval: tuple[float, float]
    agreement: float
    score: float | None
    recomputed: float
    of_isolated: float
    """KL as a share of that of `isolated`."""
    of_isolated_interval: tuple[float, float]


@dataclass(frozen=True)
class Report:
    """All that was measured with one model."""

    model: str
    dtype: str
    passage_tokens: float
    """Of a prompt, on average."""
    rows: tuple[Row, ...]
    measures: tuple[Measure, ...]

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Report:
        """The report that `to_json` gave."""
        measures = tuple(Measure(**each) for each in value["measures"])
        return Report(
            value["model"], value["dtype"], value["passage_tokens"], tuple(summarise(measures)), measures
        )


class Reader:
    """A model that reads prompts of chains, one step after the other in the caller's own thread."""

    def __init__(
        self, model: str, *, dtype: str = "auto", kv_tokens: int, progress: Progress | None = None
    ) -> None:
        path = resolve(model, progress=progress)
        device = choose_device("auto")
        kind = choose_dtype(dtype, device)
        self.dtype = str(kind).removeprefix("torch.")
        config, weights = load_model_files(path, progress=progress)
        self.tokenizer = Tokenizer.from_path(path)
        blocks = -(-kv_tokens // BLOCK_SIZE)
        self.max_positions = min(config.context_length, blocks * BLOCK_SIZE)
        self.schemas = Registry(self.tokenizer, self.max_positions)
        compiled = kernels.load() if device.type == "cpu" else None
        self._decoder = Decoder(
            config, weights, Backend(kind, device, compiled, STEP_TOKENS), max_positions=self.max_positions
        )
        self._pool = Pool(
            layers=len(config.layers),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            blocks=blocks,
            block_size=BLOCK_SIZE,
            dtype=kind,
            device=device,
        )
        self._index = Index(self._pool, LRU())
        layers = [layer.attention for layer in self._decoder.layers]
        self._scheduler = Scheduler(
            self._index,
            max_batch_tokens=STEP_TOKENS,
            max_sequences=2 * len(MODES),
            move=partial(move, self._pool, layers, compiled),
        )
        self._runner = Runner(self._decoder, self._pool)
        self._stop = frozenset(config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        self._read = 0

    def forget(self) -> None:
        """Empty the cache."""
        self._index.clear()

    def logits(self, prompt: Prompt, answer: Sequence[int], *, step_tokens: int = STEP_TOKENS) -> Tensor:
        """The logits that foretell each token of `answer` after `prompt`, [tokens, vocab]."""
        self._scheduler.max_batch_tokens = step_tokens
        sequence = self._add(prompt, len(answer))
        while True:
            work = self._scheduler.schedule()
            rows = [self._runner.run(work)]
            self._scheduler.computed(work)
            if rows[0].shape[0]:
                break
        sequence.last.token_ids += answer[:-1]
        while sequence.remaining:
            work = self._scheduler.schedule()
            rows.append(self._all_logits(work[0]))
            self._scheduler.computed(work)
        self._scheduler.finish(sequence)
        return torch.cat(rows)

    def replies(self, prompts: Sequence[Prompt], max_tokens: int) -> list[str]:
        """What the model answers to each prompt, taking the likeliest token each time."""
        self._scheduler.max_batch_tokens = STEP_TOKENS
        sequences = [self._add(prompt, max_tokens) for prompt in prompts]
        running = set(sequences)
        while running:
            work = self._scheduler.schedule()
            logits = self._runner.run(work)
            sampling = [item.sequence for item in work if item.samples]
            self._scheduler.computed(work)
            for sequence, token in zip(sampling, logits.argmax(-1).tolist(), strict=True):
                sequence.last.token_ids.append(token)
                if token in self._stop or sequence.generated == max_tokens:
                    self._scheduler.finish(sequence)
                    running.remove(sequence)
        return [self.tokenizer.decode(sequence.generated_ids) for sequence in sequences]

    def _add(self, prompt: Prompt, max_tokens: int) -> EngineSequence:
        chains = sequence_chains(prompt, b"quality", BLOCK_SIZE)
        # The pool is as large as the context, or the context as small as the pool; homes need room as well.
        needed = sum(len(chain.token_ids) + BLOCK_SIZE for chain in chains) + max_tokens
        end = chains[-1].start + len(chains[-1].token_ids) + max_tokens
        if needed > self._pool.slots or end > self.max_positions:
            raise InvalidRequestError(
                f"A prompt needs {max(needed, end)} tokens of room; this model has {self.max_positions} positions. "
                "Ask for fewer with --max-tokens."
            )
        self._read += 1
        sequence = EngineSequence(self._read, chains, SamplingParams(temperature=0.0), max_tokens)
        self._scheduler.add(sequence)
        return sequence

    def _all_logits(self, work: Work) -> Tensor:
        """Compute tokens of a last chain as the runner does, with the logits of every one of them."""
        chain, first = work.sequence.last, work.sequence.last.computed
        end = first + work.tokens
        device = self._decoder.backend.device
        batch = AttentionBatch(
            starts=(0, work.tokens),
            positions=torch.arange(chain.start + first, chain.start + end, dtype=torch.int32, device=device),
            slots=torch.tensor(chain.slots(first, end, BLOCK_SIZE), dtype=torch.int32, device=device),
            runs=(work.sequence.runs(chain, end, BLOCK_SIZE),),
        )
        return self._decoder.forward(
            torch.tensor(chain.token_ids[first:end], device=device),
            partial(attend, self._pool, batch, self._decoder.backend.kernels),
            torch.arange(work.tokens, device=device),
        )


def load_questions(
    path: Path, tokenizer: Tokenizer, *, questions: int, max_tokens: int, seed: int = 0
) -> list[Question]:
    """Questions from a QMSum file (.jsonl), or needle tests over a folder of .txt files."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_bos=False))

    if not path.exists():
        raise OstinatoError(f"There is no {path}. Give a QMSum .jsonl file, or a folder of .txt files.")
    make = needle_questions if path.is_dir() else qmsum_questions
    made = make(path, count, questions=questions, max_tokens=max_tokens, seed=seed)
    if any(not question.passages for question in made):
        raise InvalidRequestError(f"No passage of {path} fits {max_tokens} tokens.")
    if not made:
        raise OstinatoError(f"{path} holds no questions.")
    return made


def prompts_of(reader: Reader, question: Question) -> dict[str, Prompt]:
    """The question's prompt in every mode; all have the same tokens at the same positions, but `none`."""
    documents = Documents(tuple(Document(passage) for passage in question.passages))
    front: Item
    if reader.tokenizer.chat_template is None:  # a base model: it continues text, and knows no turns
        front = Text(f"{INSTRUCTION}\n\n")
        last = Text(f"Question: {question.text}\nAnswer:")
    else:
        front, last = Turn("system", INSTRUCTION), Turn("user", question.text)
    asked, bare = SchemaPrompt(None, (front, documents, last)), SchemaPrompt(None, (front, last))
    resolved = partial(reader.schemas.resolve, asked)
    full, modular = resolved("exact", 1).prompt, resolved("modular", 1).prompt
    alone = tuple(chain if chain.home is None else replace(chain, sees=()) for chain in modular.chains)
    return {
        FULL: full,
        AGAIN: full,
        ISOLATED: Prompt(alone),
        MODULAR: modular,
        **{mode: resolved("linked", links).prompt for mode, links in LINKS.items()},
        NONE: reader.schemas.resolve(bare, "exact", 1).prompt,
    }


def recomputed_share(prompt: Prompt, modular: Prompt) -> float:
    """The share of the passages' tokens that no module of `prompt` holds, given the same prompt of modules."""
    passages = sum(len(chain.token_ids) for chain in modular.chains if chain.home is not None)
    if len(prompt.chains) == 1:
        return 1.0
    # A passage's chain without a home is its first tokens computed anew.
    links = [chain for chain in prompt.chains[:-1] if chain.name and chain.home is None]
    return sum(len(chain.token_ids) for chain in links) / passages


def compare(reference: Tensor, logits: Tensor) -> tuple[float, float]:
    """KL of the distribution of `logits` from that of `reference`, and how often they agree on the first."""
    expected, found = reference.log_softmax(-1), logits.log_softmax(-1)
    kl = (expected.exp() * (expected - found)).sum(-1).mean()
    agreement = (reference.argmax(-1) == logits.argmax(-1)).float().mean()
    return float(kl), float(agreement)


def measure(reader: Reader, data: str, question: Question) -> list[Measure]:
    """Ask one question in every mode."""
    prompts = prompts_of(reader, question)
    space = " " if reader.tokenizer.chat_template is None else ""
    answer = reader.tokenizer.encode(space + question.answer, add_bos=False)
    reader.forget()
    again = reader.logits(prompts[FULL], answer, step_tokens=OTHER_STEP_TOKENS)
    reader.forget()
    reference = reader.logits(prompts[FULL], answer)
    compared = {FULL: (0.0, 1.0), AGAIN: compare(reference, again)}
    generating = [mode for mode in MODES if mode != AGAIN]
    for mode in generating[1:]:
        compared[mode] = compare(reference, reader.logits(prompts[mode], answer))
    replies = reader.replies(
        [prompts[mode] for mode in generating], max_tokens=64 if question.needle is None else 24
    )
    reply_of = dict(zip(generating, replies, strict=True))
    measures: list[Measure] = []
    for mode in MODES:
        reply = reply_of.get(mode)
        share = 0.0 if mode == NONE else recomputed_share(prompts[mode], prompts[MODULAR])
        score = None if reply is None else _score(question, reply)
        measures.append(Measure(data, question.id, mode, *compared[mode], score, share, reply))
    return measures


def _score(question: Question, reply: str) -> float:
    if question.needle is None:
        return rouge_l(reply, question.answer)
    return float(question.needle.lower() in reply.lower())


def run(
    model: str,
    data: Sequence[Path],
    *,
    questions: int,
    max_tokens: int,
    dtype: str = "auto",
    seed: int = 0,
    loading: Progress | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure `questions` questions of each data set."""
    # The modes share most of their modules; each moved module also stands at its home.
    reader = Reader(model, dtype=dtype, kv_tokens=6 * (max_tokens + 1_024), progress=loading)
    asked = [
        (path.stem, question)
        for path in data
        for question in load_questions(
            path, reader.tokenizer, questions=questions, max_tokens=max_tokens, seed=seed
        )
    ]
    measures: list[Measure] = []
    for number, (name, question) in enumerate(asked):
        if progress is not None:
            progress(number, len(asked))
        measures += measure(reader, name, question)
    if progress is not None:
        progress(len(asked), len(asked))
    sizes = [
        sum(len(reader.tokenizer.encode(passage, add_bos=False)) for passage in question.passages)
        for _, question in asked
    ]
    mean = sum(sizes) / max(1, len(sizes))
    return Report(model, reader.dtype, mean, tuple(summarise(measures, seed)), tuple(measures))


def summarise(measures: Sequence[Measure], seed: int = 0) -> list[Row]:
    """Rows of means; the intervals resample questions, always the same ones for every mode."""
    rows: list[Row] = []
    for data in dict.fromkeys(measure.data for measure in measures):
        by_mode = {mode: [m for m in measures if (m.data, m.mode) == (data, mode)] for mode in MODES}
        isolated = np.array([m.kl for m in by_mode[ISOLATED]])
        picks = np.random.default_rng(seed).integers(len(isolated), size=(RESAMPLES, len(isolated)))
        for mode, each in by_mode.items():
            kl = np.array([m.kl for m in each])
            scores = [m.score for m in each if m.score is not None]
            rows.append(
                Row(
                    data=data,
                    mode=mode,
                    questions=len(each),
                    kl=float(kl.mean()),
                    kl_interval=_interval(kl[picks].mean(1)),
                    agreement=float(np.mean([m.agreement for m in each])),
                    score=float(np.mean(scores)) if scores else None,
                    recomputed=float(np.mean([m.recomputed for m in each])),
                    of_isolated=float(kl.mean() / isolated.mean()),
                    of_isolated_interval=_interval(kl[picks].mean(1) / isolated[picks].mean(1)),
                )
            )
    return rows


def _interval(values: np.ndarray[Any, Any]) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def pyplot() -> Any:
    """matplotlib, which draws to files only."""
    try:
        import matplotlib
    except ImportError:
        raise OstinatoError("A plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(reports: Sequence[Report], path: Path) -> None:
    """KL by mode: a row of panels for each model, a panel for each data set."""
    width = max(len({row.data for row in report.rows}) for report in reports)
    figure, panels = pyplot().subplots(
        len(reports), width, figsize=(4.8 * width, 3.4 * len(reports)), squeeze=False, layout="constrained"
    )
    for report, line in zip(reports, panels, strict=True):
        names = list(dict.fromkeys(row.data for row in report.rows))
        for name, panel in zip(names, line, strict=False):
            _plot_panel(panel, [row for row in report.rows if row.data == name and row.mode != FULL])
            panel.set_title(f"{report.model}, {name}", fontsize=10)
        for panel in line[len(names) :]:
            panel.set_visible(False)
    figure.savefig(path, dpi=90)
    pyplot().close(figure)


def _plot_panel(panel: Any, rows: Sequence[Row]) -> None:
    colours = {ISOLATED: "tab:red", MODULAR: "tab:blue", AGAIN: "tab:grey", NONE: "tab:grey"}
    panel.bar(
        [row.mode for row in rows],
        [row.kl for row in rows],
        yerr=(
            [row.kl - row.kl_interval[0] for row in rows],
            [row.kl_interval[1] - row.kl for row in rows],
        ),
        color=[colours.get(row.mode, "tab:green") for row in rows],
        capsize=3,
    )
    isolated = next(row.kl for row in rows if row.mode == ISOLATED)
    for share, text in ((2 / 3, "2/3 of isolated"), (1 / 2, "1/2 of isolated")):
        panel.axhline(isolated * share, color="black", linewidth=0.7, linestyle=":")
        panel.text(-0.4, isolated * share, text, fontsize=7, va="bottom")
    panel.set_ylabel("KL from full attention")
    panel.tick_params(axis="x", rotation=25, labelsize=8)
