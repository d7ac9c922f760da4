"""A worker's figures: the engine's last stats under the field's names, and the service's own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.engine.request import EngineCoreOutputs, FinishReason, SchedulerStats

LABELS = ["model_name", "engine"]

GAUGES = {
    "vllm:num_requests_running": ("Requests in the running batch.", "num_running"),
    "vllm:num_requests_waiting": ("Requests that wait.", "num_waiting"),
    "vllm:kv_cache_usage_perc": ("Share of KV blocks in use, 0 to 1.", "kv_usage"),
    "diptych:num_pending_tokens": ("Tokens not yet computed.", "num_pending_tokens"),
    "diptych:kv_blocks_total": ("KV blocks in all.", "num_kv_blocks"),
    "diptych:kv_blocks_free": ("KV blocks that no request holds.", "num_free_kv_blocks"),
}
COUNTERS = {
    "vllm:num_preemptions": ("Requests preempted.", "num_preemptions"),
    "vllm:prefix_cache_queries": ("Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    "vllm:prefix_cache_hits": ("Tokens found in the prefix cache.", "prefix_cache_hits"),
    "vllm:generation_tokens": ("Tokens generated.", "generation_tokens"),
    "diptych:engine_steps": ("Steps run.", "num_steps"),
    "diptych:kv_load_failures": ("Loads of KV that failed.", "num_kv_load_failures"),
    "diptych:kv_save_failures": ("Saves of KV that failed.", "num_kv_save_failures"),
    "diptych:kv_save_drops": ("KV objects not saved for want of room.", "num_kv_save_drops"),
    "diptych:kv_corrupt": ("Hand-offs whose KV came with a wrong checksum.", "num_kv_corrupt"),
}
SOURCES = {
    "local_compute": "prompt_tokens_local_compute",
    "local_cache_hit": "prompt_tokens_local_cache_hit",
    "external_kv_transfer": "prompt_tokens_external_kv_transfer",
}


class EngineStatsCollector(Collector):
    """Shows the last `SchedulerStats`; they are sums since the engine's start already."""

    def __init__(self, model_name: str, engine: str) -> None:
        self.stats = SchedulerStats()
        self._labels = [model_name, engine]

    def collect(self) -> Iterator[Metric]:
        for name, (text, field) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, getattr(self.stats, field))
            yield gauge
        for name, (text, field) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, getattr(self.stats, field))
            yield counter
        by_source = CounterMetricFamily(
            "vllm:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from.",
            labels=[*LABELS, "source"],
        )
        total = 0
        for source, field in SOURCES.items():
            value = getattr(self.stats, field)
            total += value
            by_source.add_metric([*self._labels, source], value)
        yield by_source
        prompt = CounterMetricFamily("vllm:prompt_tokens", "Prompt tokens taken in.", labels=LABELS)
        prompt.add_metric(self._labels, total)
        yield prompt


class WorkerMetrics:
    """Everything that a worker's /metrics shows beside its process."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        self._engine = EngineStatsCollector(model_name, engine)
        registry.register(self._engine)
        self._registry = registry
        labels = {"model_name": model_name, "engine": engine}

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*LABELS, *more], registry=registry)

        self._finished = counter("vllm:request_success", "Requests ended.", "finished_reason")
        self._labels = labels
        self.submitted = counter("diptych:requests_submitted", "Requests taken.").labels(**labels)
        self.aborted = counter(
            "diptych:requests_aborted", "Requests ended by cancel, replacement or a gone router."
        ).labels(**labels)
        self.unknown_cancels = counter(
            "diptych:unknown_cancels", "Cancels of requests that are not here."
        ).labels(**labels)
        self._handoffs = counter("diptych:handoffs_out", "Prompts handed over.").labels(**labels)
        self._refused = counter("diptych:submits_refused", "Submits refused.", "reason")

    def add(self, collector: Collector) -> None:
        """Show something more."""
        self._registry.register(collector)

    def start(self, num_kv_blocks: int) -> None:
        """Show the cache of a fresh engine, all free, until its first step says more."""
        self._engine.stats = SchedulerStats(
            num_kv_blocks=num_kv_blocks, num_free_kv_blocks=num_kv_blocks
        )

    @property
    def stats(self) -> SchedulerStats:
        """Those of the last step."""
        return self._engine.stats

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """Take one step's figures."""
        self._engine.stats = outputs.stats
        self._handoffs.inc(len(outputs.commits))
        for reason in outputs.finish_reasons:
            if reason != FinishReason.UNSPECIFIED:
                name = str(FinishReason(reason))
                self._finished.labels(**self._labels, finished_reason=name).inc()

    def refused(self, reason: str) -> None:
        """Count a refused Submit by its error's class."""
        self._refused.labels(**self._labels, reason=reason).inc()
