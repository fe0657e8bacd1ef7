"""What the server tells Prometheus.

Totals come from the engine's own counters at each scrape, so that nothing is counted twice; latencies are
observed as chunks arrive. There is no label a client chooses: label values must not grow without bound,
nor tell one tenant what another asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.cache.use import TokenType
from ostinato.engine.explain import MissReason
from ostinato.engine.request import Chunk
from ostinato.prompt.span import SpanKind

if TYPE_CHECKING:
    from ostinato.engine.engine import Engine

_LATENCY = (0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
_GAP = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self.requests = Counter(
            "ostinato_requests_total",
            "HTTP requests by endpoint and status (499: the client left before the answer).",
            ("endpoint", "status"),
            registry=self.registry,
        )
        self.limited = Counter(
            "ostinato_limited_total",
            "HTTP requests that were refused because their principal was at a limit.",
            registry=self.registry,
        )
        self._ttft = Histogram(
            "ostinato_time_to_first_token_seconds",
            "From the submission of a request to its first token, queueing included.",
            buckets=_LATENCY,
            registry=self.registry,
        )
        self._itl = Histogram(
            "ostinato_inter_token_latency_seconds",
            "Between the tokens of one request.",
            buckets=_GAP,
            registry=self.registry,
        )
        self._e2e = Histogram(
            "ostinato_request_duration_seconds",
            "From the submission of a request to its last token.",
            buckets=_LATENCY,
            registry=self.registry,
        )

    def observe(self, chunk: Chunk, previous: Chunk | None) -> None:
        """Record the latencies that a chunk shows; `previous` is the one before it in the same reply."""
        if chunk.token_ids:
            if previous is None or not previous.usage.completion_tokens:
                self._ttft.observe(chunk.timing.ttft)
            else:
                self._itl.observe((chunk.timing.total - previous.timing.total) / len(chunk.token_ids))
        if chunk.finish_reason:
            self._e2e.observe(chunk.timing.total)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's running totals and present state, read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()

        def counter(name: str, help: str, value: int) -> Metric:
            return CounterMetricFamily(f"ostinato_{name}", help, value=value)

        yield counter("prompt_tokens", "Prompt tokens of admitted requests.", stats.prompt_tokens)
        yield counter(
            "cached_tokens",
            "Prompt tokens whose prefill was skipped, each counted once, re-runs after preemption excluded. "
            "The hit rate is ostinato_cached_tokens_total / ostinato_prompt_tokens_total.",
            stats.cached_tokens,
        )
        yield counter("completion_tokens", "Generated tokens.", stats.completion_tokens)
        yield counter(
            "preemptions", "Requests set back to waiting because the pool was full.", stats.preemptions
        )
        yield counter("evicted_blocks", "Cached blocks given up to make room.", stats.evicted_blocks)
        yield counter("sessions", "Conversations and agent runs that began, as far as known.", stats.sessions)
        yield counter(
            "records_lost", "Requests that could not be written to the recording.", stats.records_lost
        )

        def by_kind(name: str, help: str, values: Mapping[TokenType, int]) -> Metric:
            family = CounterMetricFamily(f"ostinato_{name}", help, labels=["kind"])
            for kind in get_args(SpanKind):
                family.add_metric([kind], values.get(kind, 0))
            return family

        yield by_kind(
            "prompt_tokens_by_kind", "ostinato_prompt_tokens_total by what they are.", stats.prompt_kinds
        )
        yield by_kind(
            "cached_tokens_by_kind", "ostinato_cached_tokens_total by what they are.", stats.cached_kinds
        )
        missed = CounterMetricFamily(
            "ostinato_miss_tokens", "Prompt tokens that were not found cached, by why.", labels=["reason"]
        )
        for reason in get_args(MissReason):
            missed.add_metric([reason], stats.miss_reasons[reason])
        yield missed
        yield InfoMetricFamily(
            "ostinato_cache_config",
            "How the cache is set up.",
            value={
                "policy": self._engine.policy,
                "block_size": str(self._engine.index.pool.block_size),
                "num_blocks": str(self._engine.index.pool.blocks),
            },
        )
        for name, help, value in (
            ("waiting", "Requests not yet admitted.", stats.waiting),
            ("running", "Requests being computed.", stats.running),
        ):
            yield GaugeMetricFamily(f"ostinato_requests_{name}", help, value=value)
        slots = GaugeMetricFamily(
            "ostinato_slots",
            "KV slots of the pool (one a token): held by requests (used), evictable (cached), or free.",
            labels=["state"],
        )
        slots.add_metric(["used"], stats.slots_used)
        slots.add_metric(["cached"], stats.slots_cached)
        slots.add_metric(["free"], stats.slots_total - stats.slots_used - stats.slots_cached)
        yield slots
