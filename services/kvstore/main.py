"""One KV-store node: tiers, byte movers, gRPC, admin port, registry and directory. Wiring."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from contextlib import AsyncExitStack

from diptych.config import KVStoreConfig, RedisConfig
from diptych.connectors.store_wire import TOKEN_BYTES, boot_id
from diptych.observe import AdminServer, new_registry, run_until_signal
from diptych.proto import kvstore_pb2_grpc
from diptych.registry import Registry
from diptych.rpc import RpcServer, Service
from diptych.services.kvstore.arena import PAGE_BYTES, Arena
from diptych.services.kvstore.checks import Checker
from diptych.services.kvstore.disk_files import ObjectFiles
from diptych.services.kvstore.disk_index import DiskIndex
from diptych.services.kvstore.disk_tier import DiskTier
from diptych.services.kvstore.frequency import FrequencySketch
from diptych.services.kvstore.heat import HeatMap
from diptych.services.kvstore.membership import Membership, reachable
from diptych.services.kvstore.memory import MemoryPool, MemorySocket
from diptych.services.kvstore.metrics import StoreCollector
from diptych.services.kvstore.objects import ObjectTable
from diptych.services.kvstore.replicator import Replicator
from diptych.services.kvstore.servicer import KvStoreServicer, NodeAddresses
from diptych.services.kvstore.stream import StreamServer
from diptych.services.kvstore.tiers import Tiers

_log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.5
_RETIRE_LOOK_S = 0.02


def run(config: KVStoreConfig, redis_config: RedisConfig) -> None:
    """Serve until SIGTERM or SIGINT. Exits non-zero with one line on stderr if it cannot."""
    run_until_signal("kvstore", lambda stop: serve(config, redis_config, stop))


async def serve(config: KVStoreConfig, redis_config: RedisConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Without a Redis in the configuration the node is found by its
    address alone; with one it is ready once Redis has answered."""
    async with AsyncExitStack() as stack:
        registry = None
        if redis_config.redis is not None:
            registry = Registry(redis_config)
            stack.push_async_callback(registry.close)
        pool = stack.enter_context(MemoryPool(config.pool_bytes // PAGE_BYTES * PAGE_BYTES))
        table = _make_table(config, pool.num_bytes)
        files = None if config.ssd_path is None else ObjectFiles(config.ssd_path)
        disk = None if files is None else await _enter_disk(stack, config, files, table, pool.view)
        tiers = Tiers(table, disk)
        checker = Checker(tiers, pool.view)
        token = secrets.token_bytes(TOKEN_BYTES)
        memory = await stack.enter_async_context(MemorySocket(pool, token))
        stream = StreamServer(config.host, config.stream_port, table, pool.view, token)
        await stack.enter_async_context(stream)
        node = NodeAddresses(
            node_id=_node_id(config, files),
            incarnation=secrets.token_hex(16),
            boot_id=boot_id(),
            memory_socket=memory.address,
            stream_address=reachable(config, stream.port, redis_config.redis),
            access_token=token,
        )
        membership = Membership(config, registry, tiers, node)
        heat = HeatMap(time.monotonic, reads_per_s=config.hot_reads_per_s)
        replicator = await stack.enter_async_context(
            Replicator(node.node_id, table, pool.view, membership, heat)
        )
        service = Service(
            "diptych.v1.KvStore",
            kvstore_pb2_grpc.add_KvStoreServicer_to_server,
            KvStoreServicer(tiers, checker, replicator, node),
        )
        rpc = await stack.enter_async_context(RpcServer(config.host, config.port, [service]))
        metrics = new_registry()
        metrics.register(StoreCollector(tiers, checker, replicator, stream))
        admin = AdminServer(
            config.host, config.admin_port, registry=metrics, ready=membership.status
        )
        await stack.enter_async_context(admin)
        stack.push_async_callback(_retire, tiers, config.drain_s)
        await membership.enter(stack, rpc.port, admin.port)
        await _keep_house(tiers, rpc, membership, stop)
        await rpc.set_serving(False)


async def _keep_house(
    tiers: Tiers, rpc: RpcServer, membership: Membership, stop: asyncio.Event
) -> None:
    """Reclaim what has lapsed and keep the health status current, until `stop` is set."""
    while not stop.is_set():
        tiers.table.expire()
        if not membership.enabled:
            tiers.take_changes()  # without a directory nobody else does, and they would pile up
        await rpc.set_serving(membership.status().ok)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOUSEKEEPING_S):
                await stop.wait()


async def _retire(tiers: Tiers, limit_s: float) -> None:
    """The node has left the registry. What only its memory has goes to disk, and who reads or
    writes may end."""
    until = time.monotonic() + limit_s
    if tiers.disk is not None:
        num_kept = await tiers.disk.flush(limit_s)
        _log.info("%d objects of memory went to disk", num_kept)
    while (tiers.table.num_leases or tiers.table.num_puts) and time.monotonic() < until:
        await asyncio.sleep(_RETIRE_LOOK_S)
        tiers.table.expire()


def _make_table(config: KVStoreConfig, pool_bytes: int) -> ObjectTable:
    return ObjectTable(
        Arena(pool_bytes),
        time.monotonic,
        put_ttl_s=config.put_ttl_s,
        lease_s=config.lease_s,
        high_watermark=config.eviction_high_watermark,
        eviction_step=config.eviction_step,
        tenant_quota=config.tenant_quota,
        # drawn, so that the ids of an earlier incarnation are unknown to this one
        first_id=secrets.randbits(62),
    )


async def _enter_disk(
    stack: AsyncExitStack,
    config: KVStoreConfig,
    files: ObjectFiles,
    table: ObjectTable,
    pool: memoryview,
) -> DiskTier:
    stack.callback(files.close)
    frequency = FrequencySketch()
    index = DiskIndex(
        config.ssd_bytes,
        time.monotonic,
        frequency,
        high_watermark=config.eviction_high_watermark,
        eviction_step=config.eviction_step,
        tenant_quota=config.tenant_quota,
    )
    tier = DiskTier(files, index, frequency, table, pool, min_uses=config.ssd_min_uses)
    return await stack.enter_async_context(tier)


def _node_id(config: KVStoreConfig, files: ObjectFiles | None) -> str:
    """Of a restarted node the same as before, where it is named or has a disk: its share of the
    keys stays its own."""
    if config.node_id is not None:
        return config.node_id
    return f"kvstore-{secrets.token_hex(4)}" if files is None else files.node_id()
