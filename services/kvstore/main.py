"""One KV-store node: pool, table, byte movers, gRPC, admin port, registry and directory. Wiring."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from contextlib import AsyncExitStack

from diptych.addresses import reachable_address
from diptych.config import KVStoreConfig, RedisConfig
from diptych.connectors.store_wire import TOKEN_BYTES, boot_id
from diptych.observe import AdminServer, Status, new_registry, run_until_signal
from diptych.proto import kvstore_pb2_grpc
from diptych.registry import Heartbeat, Registry, StoreRecord
from diptych.rpc import RpcServer, Service
from diptych.services.kvstore.arena import PAGE_BYTES, Arena
from diptych.services.kvstore.directory import Directory, DirectoryWriter
from diptych.services.kvstore.memory import MemoryPool, MemorySocket
from diptych.services.kvstore.metrics import StoreCollector
from diptych.services.kvstore.objects import ObjectTable
from diptych.services.kvstore.servicer import KvStoreServicer, NodeAddresses
from diptych.services.kvstore.stream import StreamServer

_HOUSEKEEPING_S = 0.5
_DIRECTORY_S = 0.2


def run(config: KVStoreConfig, redis_config: RedisConfig) -> None:
    """Serve until SIGTERM or SIGINT. Exits non-zero with one line on stderr if it cannot."""
    run_until_signal("kvstore", lambda stop: serve(config, redis_config, stop))


async def serve(config: KVStoreConfig, redis_config: RedisConfig, stop: asyncio.Event) -> None:
    """Serve until `stop` is set. Without a Redis in the configuration the node is found by its
    address alone; with one it is ready once Redis has answered."""
    async with AsyncExitStack() as stack:
        pool = stack.enter_context(MemoryPool(config.pool_bytes // PAGE_BYTES * PAGE_BYTES))
        table = _make_table(config, pool.num_bytes)
        token = secrets.token_bytes(TOKEN_BYTES)
        memory = await stack.enter_async_context(MemorySocket(pool, token))
        stream = StreamServer(config.host, config.stream_port, table, pool.view, token)
        await stack.enter_async_context(stream)
        node = NodeAddresses(
            node_id=f"kvstore-{secrets.token_hex(4)}",
            incarnation=secrets.token_hex(16),
            boot_id=boot_id(),
            memory_socket=memory.address,
            stream_address=_reachable(config, stream.port),
            access_token=token,
        )
        service = Service(
            "diptych.v1.KvStore",
            kvstore_pb2_grpc.add_KvStoreServicer_to_server,
            KvStoreServicer(table, node),
        )
        rpc = await stack.enter_async_context(RpcServer(config.host, config.port, [service]))
        membership = _Membership(config, redis_config, table, node)
        metrics = new_registry()
        metrics.register(StoreCollector(table, stream))
        admin = AdminServer(
            config.host, config.admin_port, registry=metrics, ready=membership.status
        )
        await stack.enter_async_context(admin)
        await membership.enter(stack, rpc.port, admin.port)
        await _keep_house(table, rpc, membership, stop)
        await rpc.set_serving(False)


class _Membership:
    """The node's part in registry and directory; ready at once where no Redis is configured."""

    def __init__(
        self,
        config: KVStoreConfig,
        redis_config: RedisConfig,
        table: ObjectTable,
        node: NodeAddresses,
    ) -> None:
        self._config = config
        self._redis_config = redis_config
        self._table = table
        self._node = node
        self._heartbeat: Heartbeat | None = None

    @property
    def enabled(self) -> bool:
        return self._redis_config.redis is not None

    def status(self) -> Status:
        if not self.enabled:
            return Status(True)
        if self._heartbeat is None:
            return Status(False, "starting")
        return Status(self._heartbeat.ready, self._heartbeat.problem or "ok")

    async def enter(self, stack: AsyncExitStack, port: int, admin_port: int) -> None:
        """Announce the node and its objects until the stack is left."""
        if not self.enabled:
            return
        registry = Registry(self._redis_config)
        stack.push_async_callback(registry.close)
        writer = DirectoryWriter(
            Directory(registry.redis),
            self._table,
            self._node.node_id,
            self._node.incarnation,
            interval_s=min(_DIRECTORY_S, self._redis_config.heartbeat_s),
            life_s=self._redis_config.liveness_s,
        )
        await stack.enter_async_context(writer)
        address = _reachable(self._config, port)
        admin_address = _reachable(self._config, admin_port)
        self._heartbeat = Heartbeat(registry, lambda: self._record(address, admin_address))
        await stack.enter_async_context(self._heartbeat)

    def _record(self, address: str, admin_address: str) -> StoreRecord:
        return StoreRecord(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            address=address,
            admin_address=admin_address,
            boot_id=self._node.boot_id,
            pool_bytes=self._table.pool_bytes,
            used_bytes=self._table.used_bytes,
        )


async def _keep_house(
    table: ObjectTable, rpc: RpcServer, membership: _Membership, stop: asyncio.Event
) -> None:
    """Reclaim what has lapsed and keep the health status current, until `stop` is set."""
    while not stop.is_set():
        table.expire()
        if not membership.enabled:
            table.take_changes()  # without a directory nobody else does, and they would pile up
        await rpc.set_serving(membership.status().ok)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HOUSEKEEPING_S):
                await stop.wait()


def _make_table(config: KVStoreConfig, pool_bytes: int) -> ObjectTable:
    return ObjectTable(
        Arena(pool_bytes),
        time.monotonic,
        put_ttl_s=config.put_ttl_s,
        lease_s=config.lease_s,
        high_watermark=config.eviction_high_watermark,
        eviction_step=config.eviction_step,
        # drawn, so that the ids of an earlier incarnation are unknown to this one
        first_id=secrets.randbits(62),
    )


def _reachable(config: KVStoreConfig, port: int) -> str:
    """host:port that others reach one of our ports at; only the gRPC port itself may be mapped."""
    if config.advertise_address is None:
        return reachable_address(config.host, port, None)
    host, _, advertised_port = config.advertise_address.rpartition(":")
    return f"{host}:{advertised_port if port == config.port else port}"
