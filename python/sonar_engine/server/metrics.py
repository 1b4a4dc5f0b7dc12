"""Prometheus metrics. Names end as vLLM's do, so that its dashboards map one to one.

Histograms and request counts are observed here, on the API's side; counters of the engine are read from its
statistics when a scrape comes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from sonar_engine.types import EngineInfo, EngineStats

if TYPE_CHECKING:
    from sonar_engine.server.choice import Choice

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
LONG = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ServerMetrics:
    """One registry an application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self._engine = _EngineCollector()
        self.registry.register(self._engine)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = LONG) -> Histogram:
            return Histogram(f"sonar_{name}_seconds", text, registry=self.registry, buckets=buckets)

        self.time_to_first_token = seconds("time_to_first_token", "From the request to its first token.")
        self.inter_token_latency = seconds("inter_token_latency", "Between two outputs of a sequence.", SHORT)
        self._time_per_output_token = seconds(
            "request_time_per_output_token", "Decode time over the tokens after the first, a request.", SHORT
        )
        self._e2e = seconds("e2e_request_latency", "From the request to its last token.")
        self._queue = seconds("request_queue_time", "From submission to admission.")
        self._prefill = seconds("request_prefill_time", "From admission to the first token.")
        self._decode = seconds("request_decode_time", "From the first token to the last.")
        self._success = Counter(
            "sonar_request_success", "Finished sequences.", ["finished_reason"], registry=self.registry
        )
        self.iteration_tokens = Histogram(
            "sonar_iteration_tokens_total", "Generated tokens of a step.", registry=self.registry, buckets=SIZES
        )

    def observe_end(self, choice: Choice) -> None:
        """A sequence that has ended, with its metrics."""
        self._success.labels(choice.finish_reason).inc()
        metrics = choice.metrics
        if metrics is None:
            return
        self._e2e.observe(metrics.e2e_latency)
        self._queue.observe(metrics.queue_time)
        self._prefill.observe(max(metrics.time_to_first_token - metrics.queue_time, 0.0))
        self._decode.observe(metrics.decode_time)
        if choice.num_tokens > 1:
            self._time_per_output_token.observe(metrics.decode_time / (choice.num_tokens - 1))

    def render(self, info: EngineInfo | None, stats: EngineStats | None) -> bytes:
        """The text of a scrape."""
        self._engine.info, self._engine.stats = info, stats
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's own counters and gauges, as of its last answer."""

    def __init__(self) -> None:
        self.info: EngineInfo | None = None
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.info is not None:
            yield _cache_config(self.info)
        if self.stats is not None:
            yield from _gauges(self.stats)
            yield from _counters(self.stats)

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _cache_config(info: EngineInfo) -> Metric:
    labels = {
        "page_size": str(info.page_size),
        "num_pages": str(info.num_pages),
        "cache_dtype": info.dtype,
        "max_num_seqs": str(info.max_num_seqs),
    }
    return InfoMetricFamily("sonar_cache_config", "The KV cache.", value=labels)


def _gauges(stats: EngineStats) -> Iterator[Metric]:
    yield GaugeMetricFamily("sonar_num_requests_running", "Sequences in a slot.", value=stats.num_running)
    yield GaugeMetricFamily("sonar_num_requests_waiting", "Sequences in the queue.", value=stats.num_waiting)
    yield GaugeMetricFamily("sonar_kv_cache_usage_perc", "Share of pages in use, 0 to 1.", value=stats.kv_cache_usage)
    yield GaugeMetricFamily("sonar_spec_decode_draft_length", "Most drafts of a sequence.", value=stats.draft_length)


def _counters(stats: EngineStats) -> Iterator[Metric]:
    for name, text, value in (
        ("num_preemptions", "Preemptions.", stats.num_preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_queries),
        ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_hits),
        ("prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("spec_decode_num_drafts", "Verifications of at least one draft token.", stats.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", stats.num_accepted_tokens),
        ("device_idle_seconds", "Time in which the device had nothing to do.", stats.device_idle_seconds),
    ):
        yield CounterMetricFamily(f"sonar_{name}", text, value=value)
    positions = CounterMetricFamily(
        "sonar_spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by position.", labels=["position"]
    )
    for position, count in enumerate(stats.accepted_per_pos):
        positions.add_metric([str(position)], count)
    yield positions
    stages = CounterMetricFamily("sonar_step_seconds", "Time spent, by stage of a step.", labels=["stage"])
    for stage, spent in stats.step_seconds.items():
        stages.add_metric([stage], spent)
    yield stages
