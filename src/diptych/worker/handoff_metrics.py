"""What a worker's /metrics says of hand-offs from memory to memory; read when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.engine.control_messages import HandoffFigures, PeerLink
from diptych.worker.metrics import LABELS


class Peers(Protocol):
    """`diptych.worker.peers.PeerStreams` has it."""

    num_dropped: int
    figures: HandoffFigures

    def named_links(self) -> Mapping[str, PeerLink]: ...


class HandoffCollector(Collector):
    """Sums since the engine's start, and the links there are now."""

    def __init__(self, model_name: str, engine: str, peers: Peers, bytes_per_token: int) -> None:
        self._labels = [model_name, engine]
        self._peers = peers
        self._bytes_per_token = bytes_per_token

    def collect(self) -> Iterator[Metric]:
        figures = self._peers.figures
        yield self._counter(
            "diptych:handoffs_given",
            "Prompts whose KV was offered to a decode worker directly, by what became of it.",
            "result",
            {
                "read": figures.num_read,
                "left_to_store": figures.num_given_to_store,
                "not_read": figures.num_not_read,
            },
        )
        failed = sum(figures.failures.values())
        yield self._counter(
            "diptych:handoffs_received",
            "Prompts whose KV was to come directly from a prefill worker, by what became of it.",
            "result",
            {
                "valid": figures.num_received,
                "left_to_store": figures.num_taken_from_store,
                "corrupt": figures.num_corrupt,
                "failed": failed - figures.num_corrupt,
            },
        )
        yield self._counter(
            "diptych:handoff_failures", "Direct hand-offs not received.", "reason", figures.failures
        )
        tokens = {"given": figures.num_tokens_given, "received": figures.num_tokens_received}
        yield self._counter(
            "diptych:handoff_bytes",
            "Bytes of KV that went directly from worker to worker, and were valid.",
            "direction",
            {name: count * self._bytes_per_token for name, count in tokens.items()},
        )
        yield self._counter(
            "diptych:handoff_messages_ignored",
            "Control messages of hand-offs that no rule takes, and frames dropped.",
            "why",
            {"no rule": figures.num_ignored_events, "dropped": self._peers.num_dropped},
        )
        yield self._seconds(
            "diptych:handoff_read_seconds",
            "Time that reads of peers' memory took, from their order on.",
            figures.read_seconds,
        )
        yield self._seconds(
            "diptych:handoff_thread_late_seconds",
            "By how much the thread that moves KV ran later than it had asked for: other threads "
            "held the interpreter, or the machine was busy.",
            figures.late_seconds,
        )
        yield self._links()

    def _seconds(self, name: str, text: str, seconds: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._labels, seconds)
        return family

    def _counter(
        self, name: str, text: str, label: str, values: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=[*LABELS, label])
        for value, count in values.items():
            family.add_metric([*self._labels, value], count)
        return family

    def _links(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "diptych:handoff_link_bytes_per_second",
            "Measured when the way to a prefill worker's memory was tested.",
            labels=[*LABELS, "peer", "transport"],
        )
        for worker_id, link in self._peers.named_links().items():
            family.add_metric([*self._labels, worker_id, link.transport], link.gb_per_s * 1e9)
        return family
