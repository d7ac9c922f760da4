"""The node's part in registry and directory; ready at once where no Redis is configured."""

from __future__ import annotations

from contextlib import AsyncExitStack

from diptych.addresses import reachable_address
from diptych.config import KVStoreConfig
from diptych.observe import Status
from diptych.registry import Heartbeat, Registry, StoreRecord, Watch
from diptych.services.kvstore.directory import Directory, DirectoryWriter
from diptych.services.kvstore.servicer import NodeAddresses
from diptych.services.kvstore.tiers import Tiers

_DIRECTORY_S = 0.2


class Membership:
    """Announces the node and its objects for as long as the stack it entered is open."""

    def __init__(
        self, config: KVStoreConfig, registry: Registry | None, tiers: Tiers, node: NodeAddresses
    ) -> None:
        self._config = config
        self._registry = registry
        self._tiers = tiers
        self._node = node
        self._heartbeat: Heartbeat | None = None
        self._watch: Watch[StoreRecord] | None = None

    @property
    def enabled(self) -> bool:
        return self._registry is not None

    @property
    def members(self) -> dict[str, StoreRecord]:
        """The store's nodes, this one included; none where there is no Redis."""
        return {} if self._watch is None else self._watch.members

    def status(self) -> Status:
        if not self.enabled:
            return Status(True)
        if self._heartbeat is None:
            return Status(False, "starting")
        return Status(self._heartbeat.ready, self._heartbeat.problem or "ok")

    async def enter(self, stack: AsyncExitStack, port: int, admin_port: int) -> None:
        """Announce the node and its objects until the stack is left."""
        registry = self._registry
        if registry is None:
            return
        writer = DirectoryWriter(
            Directory(registry.redis),
            self._tiers,
            self._node.node_id,
            self._node.incarnation,
            interval_s=min(_DIRECTORY_S, registry.config.heartbeat_s),
            life_s=registry.config.liveness_s,
        )
        await stack.enter_async_context(writer)
        directory_url = registry.config.redis
        address = reachable(self._config, port, directory_url)
        admin_address = reachable(self._config, admin_port, directory_url)
        self._heartbeat = Heartbeat(registry, lambda: self._record(address, admin_address))
        await stack.enter_async_context(self._heartbeat)
        self._watch = await stack.enter_async_context(Watch(registry, StoreRecord))

    def _record(self, address: str, admin_address: str) -> StoreRecord:
        return StoreRecord(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            address=address,
            admin_address=admin_address,
            boot_id=self._node.boot_id,
            pool_bytes=self._tiers.table.pool_bytes,
            used_bytes=self._tiers.table.used_bytes,
        )


def reachable(config: KVStoreConfig, port: int, directory_url: str | None) -> str:
    """host:port that others reach one of our ports at; only the gRPC port itself may be mapped.

    Raises:
        AddressError: those who find the node through the directory could not reach it.
    """
    if config.advertise_address is None:
        return reachable_address(config.host, port, None, directory_url)
    host, _, advertised_port = config.advertise_address.rpartition(":")
    return f"{host}:{advertised_port if port == config.port else port}"
