"""The engine: one model, one KV pool, one thread that computes; requests come and go from any thread."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from ostinato.cache.index import Index
from ostinato.cache.keys import model_fingerprint, root_key
from ostinato.cache.policy.lru import LRU
from ostinato.cache.pool import Pool
from ostinato.engine.device import choose_device, choose_dtype, choose_kv_tokens
from ostinato.engine.output import Output, Sink
from ostinato.engine.request import Chunk, Reply, SamplingParams, TokenLogprob
from ostinato.engine.runner import Runner
from ostinato.engine.sampler import Sampler
from ostinato.engine.scheduler import Scheduler, Work
from ostinato.engine.sequence import Sequence
from ostinato.errors import EngineClosedError, InvalidRequestError, PromptTooLongError
from ostinato.models.catalogue import resolve
from ostinato.models.decoder import Decoder
from ostinato.models.linear import Backend
from ostinato.models.tokenizer import Tokenizer
from ostinato.models.weights import QuantTensor, content_hash, load_model_files
from ostinato.native import kernels
from ostinato.prompt.chat import encode_chat
from ostinato.prompt.span import Prompt, Span, plain

log = logging.getLogger(__name__)

PromptLike = str | Prompt | Seq[int] | Seq[Mapping[str, object]]
"""Plain text, token ids, chat messages, or a `Prompt`."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started, and what it holds now. Slots are counted in tokens."""

    waiting: int
    running: int
    slots_total: int
    slots_used: int
    slots_cached: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int
    evicted_blocks: int
    requests_finished: int


class Engine:
    """Generates text with a model and reuses the KV of whatever it has computed before.

    Args:
        model: a catalogue name ("smollm2-135m"), a Hugging Face folder, or a .gguf file.
        dtype: "auto", "bfloat16" or "float32". In float32, quantised weights are dequantised and replies
            are exact: the same greedy tokens with and without cache, chunks, preemption and company.
        device: "auto", "cpu", "cuda" or "cuda:N".
        kv_tokens: size of the KV pool in tokens; by default what fits in a quarter of the free memory.
        max_batch_tokens: tokens computed in one step; a long prefill is cut into chunks of at most this.
        max_sequences: requests computed at once; more wait in turn.
        progress: called with (bytes done, bytes in all) while the model is fetched, and while it loads.

    Raises:
        ModelNotFoundError: no such model.
        ModelFormatError: its files are corrupt, incomplete or of an unsupported kind.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kv_tokens: int | None = None,
        block_size: int = 16,
        max_batch_tokens: int = 512,
        max_sequences: int = 64,
        progress: Progress | None = None,
    ) -> None:
        path = resolve(model, progress=progress)
        self.model_name = model if path.name != model and not Path(model).exists() else path.stem
        self._device = choose_device(device)
        self._dtype = choose_dtype(dtype, self._device)
        self.config, weights = load_model_files(path, progress=progress)
        self.tokenizer = Tokenizer.from_path(path)
        config = self.config
        bytes_per_token = 2 * len(config.layers) * config.kv_heads * config.head_dim * self._dtype.itemsize
        kv_tokens = choose_kv_tokens(kv_tokens, bytes_per_token, self._device, config.context_length)
        blocks = max(1, kv_tokens // block_size)
        self.max_model_len = min(config.context_length, blocks * block_size)
        quantised = self._dtype != torch.float32 and any(isinstance(w, QuantTensor) for w in weights.values())
        fingerprint = model_fingerprint(
            content_hash(path), str(self._dtype), "packed" if quantised else "dense", repr(config), block_size
        )
        self.fingerprint = fingerprint.hex()
        self._root = root_key(fingerprint)
        compiled = kernels.load() if self._device.type == "cpu" else None
        backend = Backend(self._dtype, self._device, compiled, max_batch_tokens)
        decoder = Decoder(config, weights, backend, max_positions=self.max_model_len)
        pool = Pool(
            layers=len(config.layers),
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            blocks=blocks,
            block_size=block_size,
            dtype=self._dtype,
            device=self._device,
        )
        if compiled is not None:
            compiled.huge_pages(pool.kv)
        self.index = Index(pool, LRU())
        self.scheduler = Scheduler(self.index, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences)
        self._runner = Runner(decoder, pool)
        self._sampler = Sampler()
        self._stop_token_ids = frozenset(config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        self._outputs: dict[Sequence, Output] = {}
        self._ids = itertools.count()
        self._totals = {"prompt": 0, "cached": 0, "completion": 0, "finished": 0}
        # Everything that touches the scheduler runs on the engine's thread, as a call from this queue.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._closed = False
        self._warm()
        self._thread = threading.Thread(target=self._loop, name="ostinato-engine", daemon=True)
        self._thread.start()
        # A thread still inside PyTorch when the interpreter ends aborts the process.
        atexit.register(_close, weakref.ref(self))

    # -- requests ---------------------------------------------------------------------------------------

    def generate(self, prompt: PromptLike, params: SamplingParams | None = None) -> Reply:
        """Answer `prompt` and wait for the whole reply.

        Raises:
            InvalidRequestError: the prompt is empty, malformed or (PromptTooLongError) too long.
            EngineClosedError: the engine was closed meanwhile.
        """
        return _collect(list(self.stream(prompt, params)))

    def stream(self, prompt: PromptLike, params: SamplingParams | None = None) -> Stream:
        """Answer `prompt` piece by piece. Closing the stream, or dropping it, cancels the request."""
        chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        sequence = self._prepare(prompt, params)
        self._enqueue(sequence, chunks.put)
        return Stream(chunks, partial(self._inbox.put, partial(self._cancel, sequence)))

    async def agenerate(self, prompt: PromptLike, params: SamplingParams | None = None) -> Reply:
        """`generate` for asyncio. Cancelling the task cancels the request."""
        return _collect([chunk async for chunk in self.astream(prompt, params)])

    async def astream(
        self, prompt: PromptLike, params: SamplingParams | None = None
    ) -> AsyncGenerator[Chunk]:
        """`stream` for asyncio. Closing the iterator, or cancelling the task, cancels the request."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def sink(item: Chunk | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(chunks.put_nowait, item)

        # Tokenising a long prompt takes milliseconds; the event loop serves others meanwhile. Nothing is
        # submitted by that thread: the task may be cancelled while it works.
        sequence = await asyncio.to_thread(self._prepare, prompt, params)
        self._enqueue(sequence, sink)
        ended = False
        try:
            while not ended:
                item = await chunks.get()
                ended = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not ended:
                self._inbox.put(partial(self._cancel, sequence))

    def stats(self) -> EngineStats:
        """Counters and occupancy as of now."""
        size, pool = self.index.pool.block_size, self.index.pool
        cached = self.index.cached_blocks
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            slots_total=pool.slots,
            slots_used=(pool.blocks - pool.free_blocks - cached) * size,
            slots_cached=cached * size,
            prompt_tokens=self._totals["prompt"],
            cached_tokens=self._totals["cached"],
            completion_tokens=self._totals["completion"],
            preemptions=self.scheduler.preemptions,
            evicted_blocks=self.index.evicted_blocks,
            requests_finished=self._totals["finished"],
        )

    @property
    def alive(self) -> bool:
        """False once closed, or if the engine's thread ended by itself."""
        return self._thread.is_alive() and not self._closed

    def clear_cache(self) -> int:
        """Forget all KV that no request uses now; returns the number of blocks freed."""
        done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._put(lambda: done.put(self.index.clear()))
        return done.get()

    def close(self) -> None:
        """Stop; requests in flight fail with EngineClosedError. Safe to call twice."""
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            self._inbox.put(lambda: None)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def encode(self, prompt: PromptLike) -> Prompt:
        """The prompt as tokens: text as it stands, chat messages through the model's template."""
        if isinstance(prompt, Prompt):
            return prompt
        if isinstance(prompt, str):
            self._check_text(len(prompt.encode(errors="replace")))
            return plain(Span(tuple(self.tokenizer.encode(prompt))))
        if prompt and all(isinstance(item, int) for item in prompt):
            return plain(Span(tuple(prompt)))  # pyright: ignore[reportArgumentType]
        self._check_text(sum(len(str(message)) for message in prompt))
        return plain(*(Span(tuple(ids), kind) for ids, kind in encode_chat(self.tokenizer, prompt)))  # pyright: ignore[reportArgumentType]

    # -- inside -----------------------------------------------------------------------------------------

    def _prepare(self, prompt: PromptLike, params: SamplingParams | None) -> Sequence:
        """Tokenise and check a request."""
        params = params or SamplingParams()
        tokens = self.encode(prompt).token_ids
        vocab = self.config.vocab_size
        if not tokens:
            raise InvalidRequestError("The prompt is empty: send at least one token.", param="prompt")
        if not all(0 <= token < vocab for token in tokens):
            raise InvalidRequestError(f"Token ids must be between 0 and {vocab - 1}.", param="prompt")
        if not all(0 <= token < vocab for token in params.logit_bias):
            raise InvalidRequestError(
                f"logit_bias names a token id outside 0 to {vocab - 1}.", param="logit_bias"
            )
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise self._too_long(f"The prompt has {len(tokens)} tokens")
        max_tokens = min(params.max_tokens or room, room)
        return Sequence(next(self._ids), tokens, len(tokens), params, self._root, max_tokens)

    def _check_text(self, size: int) -> None:
        """Refuse text that cannot fit without tokenising it, which takes seconds for megabytes."""
        if size <= 16 * self.max_model_len:
            return
        least = size // self.tokenizer.longest_token
        if least > self.max_model_len:
            raise self._too_long(f"The prompt has {size} bytes, at least {least} tokens")

    def _too_long(self, what: str) -> PromptTooLongError:
        of_model = self.max_model_len == self.config.context_length
        return PromptTooLongError(
            f"{what}; with one to answer, {'the context of the model' if of_model else 'the KV pool'} holds "
            f"{self.max_model_len}. Shorten the prompt{'.' if of_model else ', or start with more kv_tokens.'}"
        )

    def _enqueue(self, sequence: Sequence, sink: Sink) -> None:
        params = sequence.params
        stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._stop_token_ids)
        self._put(partial(self._add, sequence, Output(sequence, self.tokenizer, stop, sink)))

    def _put(self, call: Callable[[], None]) -> None:
        """Have the engine's thread do `call`; it certainly will, or this raises."""
        with self._submitting:
            if self._closed:
                raise EngineClosedError("The engine is closed.")
            self._inbox.put(call)

    def _warm(self) -> None:
        """Compute once, so that the first request does not pay for the libraries' own start."""
        for tokens in (32, 1):
            sequence = Sequence(-1, [0] * tokens, tokens, SamplingParams(), self._root, 1)
            if tokens > self.max_model_len:
                continue
            sequence.blocks = self.index.allocate(-(-tokens // self.index.pool.block_size))
            self._runner.run([Work(sequence, tokens)])
            self.index.release(sequence.blocks)

    def _loop(self) -> None:
        while not self._closed:
            try:
                self._read_inbox()
                if self._outputs:
                    self._step()
            except Exception as error:
                log.exception("a step failed; its requests are dropped")
                self._fail_all(error)
        self._read_inbox()
        self._fail_all(EngineClosedError("The engine was closed."))

    def _read_inbox(self) -> None:
        """Run what other threads asked for; with nothing else to do, wait for it."""
        if not self._outputs and not self._closed:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self) -> None:
        work = self.scheduler.schedule()
        for item in work:
            self._outputs[item.sequence].started()
        logits = self._runner.run(work)
        sampling = [item.sequence for item in work if item.samples]
        self.scheduler.computed(work)
        for sequence, sampled in zip(sampling, self._sampler.sample(logits, sampling), strict=True):
            sequence.token_ids.append(sampled.token_id)
            if self._outputs[sequence].add(sampled) is not None:
                self._finish(sequence)

    def _add(self, sequence: Sequence, output: Output) -> None:
        self._outputs[sequence] = output
        self.scheduler.add(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        if sequence in self._outputs:
            self._outputs[sequence].cancelled()
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._sampler.forget(sequence)
        del self._outputs[sequence]
        if sequence.cached_tokens is not None:
            self._totals["prompt"] += sequence.prompt_tokens
            self._totals["cached"] += sequence.cached_tokens
        self._totals["completion"] += sequence.generated
        self._totals["finished"] += 1

    def _fail_all(self, error: Exception) -> None:
        for sequence, output in list(self._outputs.items()):
            output.failed(error)
            self._finish(sequence)


class Stream(Iterator[Chunk]):
    """The chunks of one reply. The request is cancelled if this is closed or dropped before its end."""

    def __init__(self, chunks: queue.SimpleQueue[Chunk | Exception], cancel: Callable[[], None]) -> None:
        self._chunks, self._cancel, self._ended = chunks, cancel, False

    def __next__(self) -> Chunk:
        if self._ended:
            raise StopIteration
        item = self._chunks.get()
        if isinstance(item, Exception):
            self._ended = True
            raise item
        self._ended = item.finish_reason is not None
        return item

    def close(self) -> None:
        """Cancel the request, if it still runs."""
        if not self._ended:
            self._ended = True
            self._cancel()

    def __del__(self) -> None:
        self.close()


def _close(engine: weakref.ref[Engine]) -> None:
    if (alive := engine()) is not None:
        alive.close()


def _collect(chunks: list[Chunk]) -> Reply:
    last = chunks[-1]
    logprobs: tuple[TokenLogprob, ...] = tuple(lp for chunk in chunks for lp in chunk.logprobs)
    return Reply(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason or "cancelled",
        usage=last.usage,
        timing=replace(last.timing),
        logprobs=logprobs,
    )
