"""What a worker needs to know before its engine starts: its store."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from diptych.config import EngineConfig, KVTransferConfig, WorkerConfig
from diptych.errors import ConfigError, UnavailableError
from diptych.registry import Registry, StoreRecord

_STORE_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def needs_store(role: str, engine: EngineConfig) -> bool:
    """Whether the role hands KV over and no connector was chosen by hand."""
    return role in _STORE_ROLES and engine.kv_transfer_config is None


async def find_store(
    config: WorkerConfig, registry: Registry | None, say: Callable[[str], None]
) -> str:
    """host:port of the KV store: the configured one, or the first that registers.

    Waits as long as it takes; `say` is told what for.

    Raises:
        ConfigError: neither a store nor a registry is configured.
    """
    if config.kvstore is not None:
        return config.kvstore
    if registry is None:
        raise ConfigError("a split worker needs --kvstore or --redis", param="kvstore")
    while True:
        try:
            members = await registry.members(StoreRecord)
        except UnavailableError as error:
            say(error.message)
        else:
            if members.records:
                return members.records[min(members.records)].address
            say("no KV store is registered yet")
        await asyncio.sleep(registry.config.heartbeat_s)


def with_store(engine: EngineConfig, role: str, store: str) -> EngineConfig:
    """The engine's configuration with the store's connector."""
    transfer = KVTransferConfig(
        kv_connector="StoreConnector",
        kv_role=_STORE_ROLES[role],
        kv_connector_extra_config={"kvstore": store},
    )
    return dataclasses.replace(engine, kv_transfer_config=transfer)
