"""The node's figures as the `GetStats` message."""

from __future__ import annotations

from diptych.proto import kvstore_pb2 as pb
from diptych.services.kvstore.checks import Checker
from diptych.services.kvstore.replicator import Replicator
from diptych.services.kvstore.tiers import Tiers


def store_stats(tiers: Tiers, checker: Checker, replicator: Replicator) -> pb.StoreStats:
    """Counts since the start, and what the node holds now."""
    table, disk = tiers.table, tiers.disk
    table.expire()
    counters = table.counters
    stats = pb.StoreStats(
        num_objects=table.num_objects,
        used_bytes=table.used_bytes,
        pool_bytes=table.pool_bytes,
        num_leases=table.num_leases,
        num_puts=table.num_puts,
        pinned_bytes=table.pinned_bytes,
        puts_total=counters.puts_total,
        hits_total=counters.hits_total,
        misses_total=counters.misses_total,
        evictions_total=counters.evictions_total,
        stale_puts_total=counters.stale_puts_total,
        quota_refusals_total=counters.quota_refusals_total,
        copies_total=replicator.copies_total,
        corrupt_total=checker.corrupt_total,
        tenant_bytes=table.tenants.used_bytes,
    )
    if disk is not None:
        stats.num_disk_objects = len(disk.index)
        stats.disk_used_bytes = disk.index.used_bytes
        stats.disk_bytes = disk.index.max_bytes
        stats.disk_hits_total = disk.counters.hits_total
        stats.corrupt_total += disk.counters.corrupt_total
    return stats
