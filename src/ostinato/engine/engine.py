"""The engine: one model, one KV pool, one thread that computes; requests come and go from any thread."""

from __future__ import annotations

import asyncio
import atexit
import logging
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Unpack

import torch

from ostinato.access.principal import LOCAL, Principal
from ostinato.access.scope import Level, MemorySecrets, Scope, Secrets
from ostinato.cache.block import NEVER
from ostinato.cache.index import Index
from ostinato.cache.keys import model_fingerprint
from ostinato.cache.policy import DEFAULT_POLICY, POLICIES
from ostinato.cache.pool import Pool
from ostinato.cache.use import TokenType
from ostinato.engine.attention import move
from ostinato.engine.device import choose_device, choose_dtype, choose_kv_tokens
from ostinato.engine.explain import Explainer, Explanation
from ostinato.engine.forgetting import Forgetting, Forgettings, Forgotten
from ostinato.engine.grammar import Grammars
from ostinato.engine.intake import LINK_TOKENS, Intake, Options, PromptLike
from ostinato.engine.output import Output, Sink
from ostinato.engine.predictor import Predictor
from ostinato.engine.recorder import Recorder
from ostinato.engine.request import Chunk, Reply, SamplingParams
from ostinato.engine.runner import Runner
from ostinato.engine.sampler import Sampler
from ostinato.engine.scheduler import Scheduler, Work
from ostinato.engine.sequence import Sequence, secret_of
from ostinato.engine.stats import EngineStats
from ostinato.engine.stream import Stream, collect
from ostinato.errors import EngineClosedError, InvalidRequestError
from ostinato.models import catalogue
from ostinato.models.decoder import Decoder
from ostinato.models.linear import Backend
from ostinato.models.tokenizer import Tokenizer
from ostinato.models.weights import QuantTensor, content_hash, load_model_files
from ostinato.native import kernels
from ostinato.native.kernels import Kernels
from ostinato.prompt.layout import Layout
from ostinato.prompt.registry import Registry, module_prompts
from ostinato.prompt.report import cacheable
from ostinato.prompt.resolve import ReuseMode, resolve
from ostinato.prompt.schema import Schema
from ostinato.prompt.scopes import Asker
from ostinato.prompt.span import Prompt, Span, plain

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


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
        policy: which cached blocks go first when the pool is full, a name from `ostinato.cache.policy.POLICIES`.
        record: a file to write every request to, as a trace without text (see `ostinato.lab.trace`).
        predictor: a file of `ostinato lab train-predictor`, which foretells whether sessions come back. It goes on
            learning and is saved when the engine closes; a file that does not exist yet is begun.
        secrets: of the scopes; by default they end with the process.
        ttls: longest time to live of each scope, in seconds since the latest use.
        release_once: what is computed in a scope of several users is found by who has computed the same itself, or
            once two others have, so that nobody can sense what another wrote by asking for it.
        progress: called with (bytes done, bytes in all) while the model is fetched, and while it loads.

    Raises:
        ModelNotFoundError: no such model.
        ModelFormatError: its files are corrupt, incomplete or of an unsupported kind.
        InvalidRequestError: there is no such device, dtype or policy.
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
        policy: str = DEFAULT_POLICY,
        record: Path | None = None,
        predictor: Path | None = None,
        secrets: Secrets | None = None,
        ttls: Mapping[Level, float] | None = None,
        release_once: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if policy not in POLICIES:
            raise InvalidRequestError(f"No policy {policy!r}: use {', '.join(POLICIES)}.", param="policy")
        self.policy = policy
        path = catalogue.resolve(model, progress=progress)
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
        self.predictor = predictor and Predictor.open(
            predictor, fingerprint=self.fingerprint, model=self.model_name, features=config.hidden_size
        )
        self._secrets = secrets or MemorySecrets()
        self.schemas = Registry(self.tokenizer, self.max_model_len)
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
            # The system gives memory page by page as slots are first written, in the middle of a prefill, at
            # milliseconds a request. What the first contexts need is asked for meanwhile.
            first = min(pool.slots, 2 * config.context_length)
            threading.Thread(target=_populate, args=(compiled, pool, first), daemon=True).start()
        self.index = Index(pool, POLICIES[policy](blocks))
        self._stop_token_ids = frozenset(config.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        self._intake = Intake(
            config,
            self.tokenizer,
            self.schemas,
            pool,
            max_length=self.max_model_len,
            fingerprint=fingerprint,
            secrets=self._secrets,
            grammars=Grammars(self.tokenizer, self._stop_token_ids),
            ttls=dict(ttls or {}),
            release_once=release_once,
        )
        self._explainer = Explainer(self.index, self.tokenizer, policy, self._intake.root)
        self.scheduler = Scheduler(
            self.index,
            admitted=self._explainer.admitted,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            move=partial(move, pool, [layer.attention for layer in decoder.layers], compiled),
        )
        self._runner = Runner(decoder, pool)
        self._sampler = Sampler()
        self._outputs: dict[Sequence, Output] = {}
        self._totals = {"completion": 0, "finished": 0, "sessions": 0}
        self._prompt_kinds, self._cached_kinds = Counter[TokenType](), Counter[TokenType]()
        self._recorder = None if record is None else Recorder(record, block_size)
        # Everything that touches the scheduler runs on the engine's thread, as a call from this queue.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._submitting = threading.Lock()
        self._forgettings = Forgettings()
        self._closed = False
        self._warm()
        self._thread = threading.Thread(target=self._loop, name="ostinato-engine", daemon=True)
        self._thread.start()
        # A thread still inside PyTorch when the interpreter ends aborts the process.
        atexit.register(_close, weakref.ref(self))

    # -- requests ---------------------------------------------------------------------------------------

    def generate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Reply:
        """Answer `prompt` and wait for the whole reply.

        Raises:
            InvalidRequestError: the prompt is empty, malformed or (PromptTooLongError) too long.
            EngineClosedError: the engine was closed meanwhile.
        """
        return collect(list(self.stream(prompt, params, **options)))

    def stream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Answer `prompt` piece by piece. Closing the stream, or dropping it, cancels the request."""
        chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        sequence = self.prepare(prompt, params, **options)
        self._enqueue(sequence, chunks.put)
        return Stream(chunks, partial(self._inbox.put, partial(self._cancel, sequence)))

    async def agenerate(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Reply:
        """`generate` for asyncio. Cancelling the task cancels the request."""
        return collect([chunk async for chunk in self.astream(prompt, params, **options)])

    async def astream(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk]:
        """`stream` for asyncio. Closing the iterator, or cancelling the task, cancels the request."""
        # Tokenising a long prompt takes milliseconds; the event loop serves others meanwhile. Nothing is
        # submitted by that thread: the task may be cancelled while it works.
        sequence = await asyncio.to_thread(self.prepare, prompt, params, **options)
        async with aclosing(self.afollow(sequence)) as chunks:
            async for chunk in chunks:
                yield chunk

    def prepare(
        self, prompt: PromptLike, params: SamplingParams | None = None, **options: Unpack[Options]
    ) -> Sequence:
        """A request that is tokenised and checked, and not yet submitted. Safe from any thread.

        Raises:
            InvalidRequestError: as `generate` does.
        """
        options.setdefault("epoch", self.epoch)
        return self._intake.prepare(prompt, params, time.perf_counter(), **options)

    async def afollow(self, sequence: Sequence) -> AsyncGenerator[Chunk]:
        """Submit a request that was prepared, and answer it as `astream` does."""
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[Chunk | Exception] = asyncio.Queue()

        def sink(item: Chunk | Exception) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(chunks.put_nowait, item)

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
        size, pool, cached = self.index.pool.block_size, self.index.pool, self.index.cached_blocks
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            running=len(self.scheduler.running),
            slots_total=pool.slots,
            slots_used=(pool.blocks - pool.free_blocks - cached) * size,
            slots_cached=cached * size,
            prompt_tokens=self._prompt_kinds.total(),
            cached_tokens=self._cached_kinds.total(),
            completion_tokens=self._totals["completion"],
            preemptions=self.scheduler.preemptions,
            evicted_blocks=self.index.evicted_blocks,
            requests_finished=self._totals["finished"],
            sessions=self._totals["sessions"],
            prompt_kinds=self._prompt_kinds,
            cached_kinds=self._cached_kinds,
            miss_reasons=self._explainer.missed,
            records_lost=0 if self._recorder is None else self._recorder.lost,
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

    def cached_tokens(self, prompt: Prompt, principal: Principal = LOCAL) -> list[int]:
        """How many tokens of each chain are cached now, for that principal."""
        size, done = self.index.pool.block_size, queue.SimpleQueue[list[int]]()
        chains = [chain for chain in self._intake.chains(prompt, Asker(principal)) if not chain.continues]
        asked = [(c.root, c.chain(size), c.token_ids, len(c.token_ids)) for c in chains]
        now, reader = time.perf_counter(), principal.scope("user")
        self._put(
            lambda: done.put([self.index.match(*each, now=now, reader=reader).tokens for each in asked])
        )
        return done.get()

    def explain(self, request_id: str, principal: Principal = LOCAL) -> Explanation | None:
        """What became of a request's prompt in the cache; None if that principal made no such request lately."""
        return self._explainer.get(request_id, principal.scope("user"))

    @property
    def epoch(self) -> int:
        """How many times something was forgotten. Who reads text to ask about takes it before, for `Options.epoch`."""
        return self._forgettings.epoch

    def forget(
        self, scopes: Callable[[Scope], bool], *, request_id: str = "", principal: Principal = LOCAL
    ) -> Forgotten:
        """Take away, erase and make unreachable all KV of some scopes, with all that was computed from it, or that of
        a principal's request.

        The scopes' secrets are replaced, so that nothing kept anywhere under the old ones can be found again. Requests
        in flight go on; what they compute from it is not kept. Of what a request has computed in shared scopes, that
        goes which nobody else has sent too.

        Returns:
            How much of it was the principal's own; nobody learns how much others had.
        """
        return self._forget(Forgetting(scopes, request_id, principal)).result()

    async def aforget(
        self, scopes: Callable[[Scope], bool], *, request_id: str = "", principal: Principal = LOCAL
    ) -> Forgotten:
        """`forget` for asyncio."""
        asked = await asyncio.to_thread(self._forget, Forgetting(scopes, request_id, principal))
        return await asyncio.wrap_future(asked)

    def _forget(self, forgetting: Forgetting) -> Future[Forgotten]:
        done: Future[Forgotten] = Future()

        def forget() -> None:
            now = time.perf_counter()
            # What an erased block was is still noted in it.
            blocks = [b for b in self.scheduler.forget(forgetting.covers) if forgetting.counts(b, now)]
            if forgetting.request:
                blocks += self.scheduler.unclaim(forgetting.user, forgetting.request)
            self._explainer.forget(forgetting.covers)
            done.set_result(Forgotten(len(blocks), sum(block.size for block in blocks)))

        self._forgettings.add(forgetting)
        self._secrets.replace(forgetting.scopes)
        self._intake.forget(forgetting.scopes, forgetting.user)
        self._put(forget)
        return done

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

    def register(
        self,
        schema: Schema | str | Path,
        *,
        encode: bool = False,
        scope: Scope | None = None,
        progress: Progress | None = None,
    ) -> Layout:
        """Make a schema known: PML text, the path of a PML file, or a `Schema`. A known name is replaced.

        Args:
            schema: the schema.
            encode: compute the states of its modules now; without it each is computed on first use.
            scope: who may reuse them; by default whoever computes them, alone.
            progress: called with (modules done, modules in all) while encoding.

        Raises:
            SchemaError: it is malformed, and where and why. Nothing is registered then.
        """
        laid_out = self.schemas.lay_out(schema, scope)
        if encode:
            self.encode_modules(laid_out, progress=progress)
        replaced = self.schemas.register(laid_out)
        if replaced is not None:
            self.retire(replaced)
        return laid_out

    def encode_modules(
        self, laid_out: Layout, principal: Principal = LOCAL, *, progress: Progress | None = None
    ) -> None:
        """Compute the states of a schema's modules, on behalf of a principal."""
        prompts = module_prompts(laid_out.schema)
        for done, prompt in enumerate(prompts, start=1):
            resolved = resolve(laid_out, prompt).prompt
            self.generate(resolved, SamplingParams(max_tokens=1, temperature=0), principal=principal)
            if progress is not None:
                progress(done, len(prompts))

    def unregister(self, name: str) -> None:
        """Forget a schema; what is cached of it is evicted first. SchemaError if there is none of that name."""
        self.retire(self.schemas.remove(name))

    def retire(self, laid_out: Layout) -> None:
        """Evict the states of a schema first; those that the schema's new version uses too survive their next use."""
        _, prompt = cacheable(laid_out)
        keys = [
            key
            for chain in self._intake.chains(prompt, Asker())
            for key in chain.chain(self.index.pool.block_size)
        ]
        self._put(partial(self.index.store.retire, keys))

    def encode(
        self,
        prompt: PromptLike,
        *,
        mode: ReuseMode = "modular",
        link_tokens: int = LINK_TOKENS,
        level: Level = "user",
    ) -> Prompt:
        """The prompt as chains of tokens; see `Intake.encode`."""
        return self._intake.encode(prompt, mode=mode, link_tokens=link_tokens, level=level)

    # -- inside -----------------------------------------------------------------------------------------

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
        """Compute once, so that the first request does not pay for the libraries' own start, and to know what a step takes."""
        for tokens in (min(32, self.max_model_len), 1, 1):
            chains = self._intake.chains(plain(Span((0,) * tokens)), Asker())
            sequence = Sequence(-1, chains, SamplingParams(), 1)
            sequence.last.blocks = self.index.allocate(-(-tokens // self.index.pool.block_size))
            sequence.last.written(0, tokens, self.index.pool.block_size)
            began = time.perf_counter()
            self._runner.run([Work(sequence, tokens)])
            self.scheduler.shares.alone = time.perf_counter() - began
            self.index.release(sequence.last.blocks, sequence.use)

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
        if self._recorder is not None:
            self._recorder.close()
        if self.predictor is not None:
            self.predictor.close()

    def _read_inbox(self) -> None:
        """Run what other threads asked for; with nothing else to do, wait for it, or for what expires next."""
        if not self._outputs and not self._closed:
            expiry = self.index.next_expiry - time.perf_counter()
            try:
                self._inbox.get(timeout=None if expiry == NEVER else max(0.01, expiry))()
            except queue.Empty:
                self.index.sweep(time.perf_counter())
        while not self._inbox.empty():
            self._inbox.get()()

    def _step(self) -> None:
        work = self.scheduler.schedule()
        for item in work:
            self._outputs[item.sequence].started()
        began = time.perf_counter()
        replies = sum(item.sequence.remaining == 1 for item in work)
        logits = self._runner.run(work)
        sampling = [item.sequence for item in work if item.samples]
        if self.predictor is not None:
            for row, sequence in enumerate(sampling):
                if not sequence.generated:
                    sequence.use = self.predictor.prefilled(sequence.use, partial(self._runner.hidden, row))
        self.scheduler.computed(work)
        for sequence, sampled in zip(sampling, self._sampler.sample(logits, sampling), strict=True):
            sequence.last.token_ids.append(sampled.token_id)
            if self._outputs[sequence].add(sampled) is not None:
                self._finish(sequence)
        if work:
            prefill = sum(item.tokens for item in work) - replies
            self.scheduler.shares.took(prefill, replies, time.perf_counter() - began)

    def _add(self, sequence: Sequence, output: Output) -> None:
        self._outputs[sequence] = output
        if self._forgotten_since(sequence):
            self.scheduler.keep_nothing(sequence)
        self.scheduler.add(sequence)
        self._totals["sessions"] += sequence.use.turn == 1
        if self._recorder is not None:
            self._recorder.begin(sequence)
        if self.predictor is not None:
            self.predictor.arrive(sequence.use)

    def _forgotten_since(self, sequence: Sequence) -> bool:
        """Whether something that a sequence has to do with was forgotten while it was read and prepared."""
        secret = self._secrets.secret
        replaced = any(secret_of(c.scope, c.registered, secret) != c.secret for c in sequence.chains)
        return replaced or self._forgettings.concern(sequence)

    def _cancel(self, sequence: Sequence) -> None:
        if sequence in self._outputs:
            self._outputs[sequence].cancelled()
            self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self._sampler.forget(sequence)
        if self._recorder is not None:
            self._recorder.end(sequence)
        if sequence.admitted:
            # New ones, not changed ones: other threads read them.
            self._prompt_kinds = self._prompt_kinds + sequence.prompt_kinds
            self._cached_kinds = self._cached_kinds + sequence.cached_kinds
        self._totals["completion"] += sequence.generated
        self._totals["finished"] += 1
        self._outputs.pop(sequence).end()
        if self.predictor is not None:
            self.predictor.learn()

    def _fail_all(self, error: Exception) -> None:
        for sequence, output in list(self._outputs.items()):
            output.failed(error)
            self._finish(sequence)


def _populate(compiled: Kernels, pool: Pool, slots: int) -> None:
    for heads in pool.kv.flatten(0, 2):
        compiled.populate(heads[:slots])


def _close(engine: weakref.ref[Engine]) -> None:
    if (alive := engine()) is not None:
        alive.close()
