"""Connectors by name: both halves from one engine's configuration."""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych.config import EngineConfig, KVTransferConfig
from diptych.connectors.base import KVConnectorScheduler, KVConnectorWorker, KVLayout
from diptych.connectors.checks import checked_transfer, has_store, limits_of, place_of
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
from diptych.connectors.store_settings import NAME as STORE
from diptych.connectors.store_settings import StoreSettings
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.errors import ConfigError


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
    transfer = checked_transfer(config.kv_transfer_config)
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector == DIRECT:
        if not isinstance(worker, DirectWorker):
            raise ConfigError(f"{DIRECT} runs in the process of its worker half only")
        other = _store_scheduler(layout, transfer, worker.other) if has_store(extra) else None
        if worker.driver is None:
            return other
        return DirectScheduler(worker.driver, namespace, other)
    if transfer.kv_connector == STORE:
        return _store_scheduler(layout, transfer, worker)
    return SharedStorageScheduler(
        layout,
        FileStore(place_of(transfer)),
        is_producer=transfer.is_producer,
        is_consumer=transfer.is_consumer,
    )


def make_worker_connector(config: EngineConfig) -> KVConnectorWorker | None:
    """The worker half, None where no connector is configured.

    Raises:
        ConfigError: as `make_scheduler_connector`.
    """
    transfer = checked_transfer(config.kv_transfer_config)
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config
    if transfer.kv_connector != DIRECT:
        return _page_worker(transfer)
    other = _page_worker(transfer) if has_store(extra) else None
    return DirectWorker(DirectSettings.of(extra), reads_peers=transfer.is_consumer, other=other)


def _page_worker(transfer: KVTransferConfig) -> PageConnectorWorker:
    limits = limits_of(transfer)
    return PageConnectorWorker(str(transfer.kv_connector), _opener(transfer, limits), limits)


def _opener(transfer: KVTransferConfig, limits: TransferLimits) -> Callable[[], PageStore]:
    if transfer.kv_connector in (STORE, DIRECT):
        from diptych.connectors.store import ServiceStore  # brings gRPC

        settings = StoreSettings.of(transfer.kv_connector_extra_config)
        return lambda: ServiceStore(settings.open(timeout_s=limits.transfer_timeout_s))
    place = place_of(transfer)
    return lambda: FileStore(place)


def _store_scheduler(
    layout: KVLayout, transfer: KVTransferConfig, worker: KVConnectorWorker | None
) -> StoreScheduler:
    settings = StoreSettings.of(transfer.kv_connector_extra_config)
    load_timeout_s = limits_of(transfer).transfer_timeout_s
    costs = LoadCosts(token_bytes(layout), time.monotonic, load_timeout_s)
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
        loads=worker.loads if isinstance(worker, PageConnectorWorker) else None,
    )
