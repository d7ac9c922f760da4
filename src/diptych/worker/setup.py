"""What a worker needs to know before its engine starts: its store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from diptych.config import EngineConfig, KVTransferConfig, WorkerConfig
from diptych.errors import ConfigError, UnavailableError
from diptych.registry import Registry, StoreRecord

_STORE_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def needs_store(role: str, engine: EngineConfig, worker: WorkerConfig) -> bool:
    """Whether the worker uses the store and no connector was chosen by hand: those that hand KV
    over do, an aggregated one where it is told of a store."""
    if engine.kv_transfer_config is not None:
        return False
    return role in _STORE_ROLES or worker.kvstore is not None


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


def with_store(
    engine: EngineConfig, role: str, worker: WorkerConfig, place: dict[str, Any]
) -> EngineConfig:
    """The engine's configuration with the store's connector."""
    transfer = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role=_STORE_ROLES.get(role, "kv_both"),
        kv_connector_extra_config={
            **place,
            "read_prefix": worker.read_store,
            "write_through": role != "decode",
            "store_decoded": worker.store_decoded and role != "prefill",
        },
    )
    return dataclasses.replace(engine, kv_transfer_config=transfer)
