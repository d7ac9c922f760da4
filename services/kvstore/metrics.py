"""The node's figures for Prometheus, read from the table when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.services.kvstore.objects import ObjectTable
from diptych.services.kvstore.stream import StreamServer


class StoreCollector(Collector):
    """`diptych:kvstore_*`."""

    def __init__(self, table: ObjectTable, stream: StreamServer) -> None:
        self._table = table
        self._stream = stream

    def collect(self) -> Iterator[Metric]:
        self._table.expire()
        counters = self._table.counters
        gauges = [
            ("objects", "Complete objects.", self._table.num_objects),
            ("used_bytes", "Bytes of objects and reservations.", self._table.used_bytes),
            ("pool_bytes", "Size of the pool.", self._table.pool_bytes),
            ("leases", "Live leases.", self._table.num_leases),
            ("puts_open", "Open reservations.", self._table.num_puts),
        ]
        counts = [
            ("puts", "Objects published.", counters.puts_total),
            ("hits", "Keys found.", counters.hits_total),
            ("misses", "Keys not found.", counters.misses_total),
            ("evictions", "Objects evicted.", counters.evictions_total),
            ("stale_puts", "Reservations that lapsed.", counters.stale_puts_total),
            (
                "stream_received_bytes",
                "Bytes written over the stream.",
                self._stream.received_bytes,
            ),
            ("stream_sent_bytes", "Bytes read over the stream.", self._stream.sent_bytes),
        ]
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"diptych:kvstore_{name}", text, value=value)
        for name, text, value in counts:
            yield CounterMetricFamily(f"diptych:kvstore_{name}", text, value=value)
