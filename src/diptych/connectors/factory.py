"""Connectors by name: both halves from one engine's configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from diptych.config import EngineConfig, KVTransferConfig
from diptych.connectors import shared_storage
from diptych.connectors.base import KVConnectorScheduler, KVConnectorWorker, KVLayout
from diptych.connectors.page_orders import PageStore
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.shared_storage import FileStore, SharedStorageScheduler
from diptych.connectors.transfers import TransferLimits
from diptych.errors import ConfigError

# `connectors.store` is imported where it is used: it brings gRPC
STORE = "StoreConnector"
_PLACES = {shared_storage.NAME: "shared_storage_path", STORE: "kvstore"}
_LIMITS = tuple(field.name for field in dataclasses.fields(TransferLimits))


def make_scheduler_connector(
    config: EngineConfig, layout: KVLayout, namespace: bytes
) -> KVConnectorScheduler | None:
    """The scheduler half, None where no connector is configured.

    Raises:
        ConfigError: an unknown connector, a missing or unknown setting, or KV it cannot move.
    """
    transfer = _checked(config.kv_transfer_config)
    if transfer is None:
        return None
    if transfer.kv_connector == STORE:
        return PageConnectorScheduler(layout)
    return SharedStorageScheduler(
        layout,
        FileStore(_place(transfer)),
        is_producer=transfer.is_producer,
        is_consumer=transfer.is_consumer,
    )


def make_worker_connector(config: EngineConfig) -> KVConnectorWorker | None:
    """The worker half, None where no connector is configured.

    Raises:
        ConfigError: as `make_scheduler_connector`.
    """
    transfer = _checked(config.kv_transfer_config)
    if transfer is None:
        return None
    limits = _limits(transfer.kv_connector_extra_config)
    return PageConnectorWorker(str(transfer.kv_connector), _opener(transfer, limits), limits)


def _opener(transfer: KVTransferConfig, limits: TransferLimits) -> Callable[[], PageStore]:
    place = _place(transfer)
    if transfer.kv_connector == STORE:
        from diptych.connectors.store import ServiceStore
        from diptych.connectors.store_client import StoreClient

        return lambda: ServiceStore(StoreClient(place, timeout_s=limits.transfer_timeout_s))
    return lambda: FileStore(place)


def _checked(transfer: KVTransferConfig | None) -> KVTransferConfig | None:
    if transfer is None or transfer.kv_connector is None:
        return None
    place = _PLACES.get(transfer.kv_connector)
    if place is None:
        raise ConfigError(
            f"kv_connector must be one of {', '.join(_PLACES)}, not {transfer.kv_connector!r}"
        )
    unknown = sorted(set(transfer.kv_connector_extra_config) - {place, *_LIMITS})
    if unknown:
        raise ConfigError(f"{transfer.kv_connector} has no setting {', '.join(unknown)}")
    return transfer


def _place(transfer: KVTransferConfig) -> str:
    name = _PLACES[str(transfer.kv_connector)]
    place = transfer.kv_connector_extra_config.get(name)
    if not isinstance(place, str) or not place:
        raise ConfigError(f"{transfer.kv_connector} needs kv_connector_extra_config[{name!r}]")
    return place


def _limits(settings: dict[str, Any]) -> TransferLimits:
    values = {name: settings[name] for name in _LIMITS if name in settings}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
    return TransferLimits(**values)
