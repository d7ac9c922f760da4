"""What a worker needs to know before its engine starts: its store, and how KV reaches others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from diptych.addresses import reachable_address
from diptych.config import EngineConfig, KVTransferConfig, WorkerConfig
from diptych.connectors.checks import checked_transfer
from diptych.connectors.direct_settings import DirectSettings
from diptych.errors import ConfigError, UnavailableError
from diptych.registry import Registry, StoreRecord

_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def needs_store(role: str, engine: EngineConfig, worker: WorkerConfig) -> bool:
    """Whether the worker uses the store and no connector was chosen by hand: those that hand KV
    over do, unless it goes from worker to worker; others where they are told of a store."""
    if engine.kv_transfer_config is not None:
        return False
    return worker.kvstore is not None or (role in _ROLES and worker.handoff != "direct")


def hands_over_directly(role: str, engine: EngineConfig, worker: WorkerConfig) -> bool:
    """Whether the worker's memory is read by others, or it reads theirs."""
    return engine.kv_transfer_config is None and role in _ROLES and worker.handoff != "store"


async def wait_for_store(
    config: WorkerConfig, registry: Registry | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Where the store is, as settings of the connector: the configured addresses, or the registry
    once a node is in it.

    Waits as long as it takes; `say` is told what for.

    Raises:
        ConfigError: neither a store nor a registry is configured.
    """
    if config.kvstore is not None:
        return {"kvstore": config.kvstore}
    if registry is None:
        raise ConfigError("a split worker needs --kvstore or --redis", param="kvstore")
    while True:
        try:
            members = await registry.members(StoreRecord)
        except UnavailableError as error:
            say(error.message)
        else:
            if members.records:
                return dataclasses.asdict(registry.config)
            say("no KV store is registered yet")
        await asyncio.sleep(registry.config.heartbeat_s)


def with_connector(
    engine: EngineConfig,
    role: str,
    worker: WorkerConfig,
    place: dict[str, Any] | None,
    directory_url: str | None = None,
) -> EngineConfig:
    """The engine's configuration with the connector of its role: the store's, or the direct one
    with or without a store beside it.

    Args:
        place: where the store is; None for none.
        directory_url: of the directory through which peers find this worker.

    Raises:
        AddressError: others would have no address to read this worker's KV from.
    """
    direct = hands_over_directly(role, engine, worker)
    if place is None and not direct:
        return engine
    settings: dict[str, Any] = {}
    if place is not None:
        settings = {
            **place,
            "read_prefix": worker.read_store,
            "write_through": role != "decode",
            "store_decoded": worker.store_decoded and role != "prefill",
        }
    if direct:
        settings |= _direct_settings(worker, directory_url)
    transfer = KVTransferConfig(
        kv_connector="DirectConnector" if direct else "StoreConnector",
        kv_role=_ROLES.get(role, "kv_both"),
        kv_connector_extra_config=settings,
    )
    return dataclasses.replace(engine, kv_transfer_config=transfer)


def check_transfers(role: str, engine: EngineConfig, worker: WorkerConfig) -> None:
    """What can be known to be wrong with the way of KV before anything is loaded.

    Raises:
        ConfigError: a connector of nonsense, or TLS files that cannot be used.
    """
    checked_transfer(engine.kv_transfer_config)
    if not hands_over_directly(role, engine, worker) or worker.kv_tls_certificate is None:
        return
    files = DirectSettings.of(_tls_settings(worker)).for_transports("cpu").tls
    if files is not None:
        files.server_context()
        files.client_context()


def _direct_settings(worker: WorkerConfig, directory_url: str | None) -> dict[str, Any]:
    """Where and how this worker's KV is read by others."""
    reachable = reachable_address(worker.host, 0, worker.advertise_address, directory_url)
    return {
        "transports": worker.kv_transports,
        "required": worker.handoff == "direct",
        "host": worker.host,
        "advertised_host": reachable.rpartition(":")[0].strip("[]"),
        "lease_s": worker.kv_lease_s,
        "verify_kv": worker.verify_kv,
        **_tls_settings(worker),
    }


def _tls_settings(worker: WorkerConfig) -> dict[str, str]:
    return {
        "tls_certificate": worker.kv_tls_certificate or "",
        "tls_key": worker.kv_tls_key or "",
        "tls_authority": worker.kv_tls_authority or "",
        "tls_name": worker.kv_tls_name or "",
    }
