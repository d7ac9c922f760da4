"""The node's figures for Prometheus, read from the table when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diptych.services.kvstore.checks import Checker
from diptych.services.kvstore.disk_tier import DiskTier
from diptych.services.kvstore.replicator import Replicator
from diptych.services.kvstore.stream import StreamServer
from diptych.services.kvstore.tiers import Tiers


class StoreCollector(Collector):
    """`diptych:kvstore_*`."""

    def __init__(
        self, tiers: Tiers, checker: Checker, replicator: Replicator, stream: StreamServer
    ) -> None:
        self._table = tiers.table
        self._disk = tiers.disk
        self._checker = checker
        self._replicator = replicator
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
            ("pinned_bytes", "Bytes of hard-pinned objects.", self._table.pinned_bytes),
        ]
        counts = [
            ("puts", "Objects published.", counters.puts_total),
            ("hits", "Keys found.", counters.hits_total),
            ("misses", "Keys not found.", counters.misses_total),
            ("evictions", "Objects evicted.", counters.evictions_total),
            ("stale_puts", "Reservations that lapsed.", counters.stale_puts_total),
            ("quota_refusals", "Puts over a tenant's quota.", counters.quota_refusals_total),
            ("copies", "Copies of hot objects sent away.", self._replicator.copies_total),
            ("corrupt", "Objects in memory found damaged.", self._checker.corrupt_total),
            (
                "stream_received_bytes",
                "Bytes written over the stream.",
                self._stream.received_bytes,
            ),
            ("stream_sent_bytes", "Bytes read over the stream.", self._stream.sent_bytes),
        ]
        if self._disk is not None:
            gauges += _disk_gauges(self._disk)
            counts += _disk_counts(self._disk)
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"diptych:kvstore_{name}", text, value=value)
        for name, text, value in counts:
            yield CounterMetricFamily(f"diptych:kvstore_{name}", text, value=value)


def _disk_gauges(disk: DiskTier) -> list[tuple[str, str, int]]:
    return [
        ("disk_objects", "Objects on disk.", len(disk.index)),
        ("disk_used_bytes", "Bytes of their files.", disk.index.used_bytes),
        ("disk_bytes", "Bound of the disk tier.", disk.index.max_bytes),
    ]


def _disk_counts(disk: DiskTier) -> list[tuple[str, str, int]]:
    counters = disk.counters
    return [
        ("disk_hits", "Objects read back from disk.", counters.hits_total),
        ("disk_read_bytes", "Bytes read back from disk.", counters.read_bytes_total),
        ("disk_written_bytes", "Bytes written to disk.", counters.written_bytes_total),
        ("disk_write_errors", "Writes that failed.", counters.write_errors_total),
        ("disk_corrupt", "Files found damaged.", counters.corrupt_total),
        ("disk_drops", "Objects not written: the queue or disk was full.", counters.drops_total),
        ("disk_evictions", "Objects evicted from disk.", disk.index.evictions_total),
        ("disk_refusals", "Objects not admitted to disk.", disk.index.refusals_total),
    ]
