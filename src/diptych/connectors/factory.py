"""Connectors by name: both halves from one engine's configuration."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from diptych.config import EngineConfig, KVTransferConfig
from diptych.connectors import shared_storage
from diptych.connectors.base import KVConnectorScheduler, KVConnectorWorker, KVLayout
from diptych.connectors.direct_scheduler import DirectScheduler
from diptych.connectors.direct_settings import NAME as DIRECT
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_worker import DirectWorker
from diptych.connectors.page_costs import LoadCosts
from diptych.connectors.page_lookup import PrefixLookup
from diptych.connectors.page_orders import PageStore
from diptych.connectors.page_worker import PageConnectorWorker
from diptych.connectors.pages import token_bytes
from diptych.connectors.shared_storage import FileStore, SharedStorageScheduler
from diptych.connectors.store_scheduler import StoreScheduler
from diptych.connectors.store_settings import StoreSettings
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.errors import ConfigError

# what brings gRPC is imported where it is used: `connectors.store`, `store_cluster`
STORE = "StoreConnector"
# A store evicts what was not used for longest; files may be gone whenever their user says so.
_TRUST_STORE_S = 10.0
_LIMITS = tuple(field.name for field in dataclasses.fields(TransferLimits))
_STORE_FIELDS = tuple(field.name for field in dataclasses.fields(StoreSettings))
_DIRECT_FIELDS = tuple(field.name for field in dataclasses.fields(DirectSettings))
_SETTINGS = {
    DIRECT: {*_DIRECT_FIELDS, *_STORE_FIELDS, *_LIMITS},
    shared_storage.NAME: {"shared_storage_path", *_LIMITS},
    STORE: {*_STORE_FIELDS, *_LIMITS},
}


def make_scheduler_connector(
    config: EngineConfig,
    layout: KVLayout,
    namespace: bytes,
    worker: KVConnectorWorker | None = None,
) -> KVConnectorScheduler | None:
    """The scheduler half, None where no connector is configured. `worker` is the other half, for
    connectors whose halves share a thread.

    Raises:
        ConfigError: an unknown connector, a missing or unknown setting, or KV it cannot move.
    """
    transfer = _checked(config.kv_transfer_config)
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == DIRECT:
        if not isinstance(worker, DirectWorker):
            raise ConfigError(f"{DIRECT} runs in the process of its worker half only")
        other = _store_scheduler(layout, StoreSettings.of(extra)) if _has_store(extra) else None
        return DirectScheduler(worker.driver, namespace, other)
    if transfer.kv_connector == STORE:
        return _store_scheduler(layout, StoreSettings.of(extra))
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
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != DIRECT:
        return _page_worker(transfer)
    other = _page_worker(transfer) if _has_store(extra) else None
    return DirectWorker(DirectSettings.of(extra), reads_peers=transfer.is_consumer, other=other)


def _page_worker(transfer: KVTransferConfig) -> PageConnectorWorker:
    limits = _limits(str(transfer.kv_connector), transfer.kv_connector_extra_config)
    return PageConnectorWorker(str(transfer.kv_connector), _opener(transfer, limits), limits)


def _has_store(settings: dict[str, Any]) -> bool:
    """Whether a store takes what goes to no peer."""
    return bool(settings.get("kvstore") or settings.get("redis"))


def _opener(transfer: KVTransferConfig, limits: TransferLimits) -> Callable[[], PageStore]:
    if transfer.kv_connector in (STORE, DIRECT):
        from diptych.connectors.store import ServiceStore

        settings = StoreSettings.of(transfer.kv_connector_extra_config)
        return lambda: ServiceStore(settings.open(timeout_s=limits.transfer_timeout_s))
    place = _place(transfer)
    return lambda: FileStore(place)


def _store_scheduler(layout: KVLayout, settings: StoreSettings) -> StoreScheduler:
    costs = LoadCosts(token_bytes(layout), time.monotonic)
    lookup = None
    if settings.read_prefix:
        timeout_s = settings.lookup_timeout_s
        lookup = PrefixLookup(lambda: settings.open(timeout_s=timeout_s), time.monotonic, timeout_s)
    return StoreScheduler(
        layout,
        lookup,
        costs,
        write_through=settings.write_through,
        store_decoded=settings.store_decoded,
    )


def _checked(transfer: KVTransferConfig | None) -> KVTransferConfig | None:
    if transfer is None or transfer.kv_connector is None:
        return None
    known = _SETTINGS.get(transfer.kv_connector)
    if known is None:
        raise ConfigError(
            f"kv_connector must be one of {', '.join(_SETTINGS)}, not {transfer.kv_connector!r}"
        )
    unknown = sorted(set(transfer.kv_connector_extra_config) - known)
    if unknown:
        raise ConfigError(f"{transfer.kv_connector} has no setting {', '.join(unknown)}")
    return transfer


def _place(transfer: KVTransferConfig) -> str:
    name = "shared_storage_path"
    place = transfer.kv_connector_extra_config.get(name)
    if not isinstance(place, str) or not place:
        raise ConfigError(f"{transfer.kv_connector} needs kv_connector_extra_config[{name!r}]")
    return place


def _limits(connector: str, settings: dict[str, Any]) -> TransferLimits:
    defaults = {"trust_stored_s": _TRUST_STORE_S} if connector in (STORE, DIRECT) else {}
    values = {**defaults, **{name: settings[name] for name in _LIMITS if name in settings}}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
    return TransferLimits(**values)
