"""What is wrong with a connector's configuration, said before an engine starts. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Any

from diptych.config import KVTransferConfig
from diptych.connectors import shared_storage
from diptych.connectors.direct_settings import NAME as DIRECT
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.store_settings import NAME as STORE
from diptych.connectors.store_settings import StoreSettings
from diptych.connectors.transfer_jobs import TransferLimits
from diptych.connectors.transports.choose import check_names
from diptych.errors import ConfigError

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


def checked_transfer(transfer: KVTransferConfig | None) -> KVTransferConfig | None:
    """The configuration, None where it names no connector.

    Raises:
        ConfigError: an unknown connector, or a setting that is missing, unknown or of no sense.
    """
    if transfer is None or transfer.kv_connector is None:
        return None
    name, extra = transfer.kv_connector, transfer.kv_connector_extra_config
    known = _SETTINGS.get(name)
    if known is None:
        raise ConfigError(
            f"kv_connector must be one of {', '.join(_SETTINGS)}, not {name!r}",
            param="kv_transfer_config",
        )
    unknown = sorted(str(key) for key in set(extra) - known)
    if unknown:
        raise ConfigError(f"{name} has no setting {', '.join(unknown)}", param="kv_transfer_config")
    if name == DIRECT:
        check_names(DirectSettings.of(extra).transport_names)
    if name == STORE or (name == DIRECT and has_store(extra)):
        StoreSettings.of(extra)
    if name == shared_storage.NAME:
        place_of(transfer)
    limits_of(transfer)
    return transfer


def has_store(settings: dict[str, Any]) -> bool:
    """Whether a DirectConnector of these settings has a store, for what goes to no peer."""
    return bool(settings.get("kvstore") or settings.get("redis"))


def goes_through_store(transfer: KVTransferConfig | None) -> bool:
    """Whether KV can leave this engine, or come to it, by way of a store or a folder."""
    if transfer is None or transfer.kv_connector is None:
        return False
    return transfer.kv_connector != DIRECT or has_store(transfer.kv_connector_extra_config)


def place_of(transfer: KVTransferConfig) -> str:
    """The folder of a SharedStorageConnector.

    Raises:
        ConfigError: none is named.
    """
    name = "shared_storage_path"
    place = transfer.kv_connector_extra_config.get(name)
    if not isinstance(place, str) or not place:
        raise ConfigError(f"{transfer.kv_connector} needs kv_connector_extra_config[{name!r}]")
    return place


def limits_of(transfer: KVTransferConfig) -> TransferLimits:
    """Bounds of the transfers.

    Raises:
        ConfigError: one is no positive number.
    """
    settings = transfer.kv_connector_extra_config
    of_service = transfer.kv_connector in (STORE, DIRECT)
    defaults = {"trust_stored_s": _TRUST_STORE_S} if of_service else {}
    values = {**defaults, **{name: settings[name] for name in _LIMITS if name in settings}}
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} must be a number, not {value!r}")
    return TransferLimits(**values)
