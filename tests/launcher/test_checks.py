"""What does not fit together is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from diptych.config import KVTransferConfig
from diptych.config_sources import SECTIONS, load
from diptych.connectors.checks import checked_transfer
from diptych.errors import ConfigError
from diptych.launcher.checks import check_together

PLACE = {"kvstore": "s:1"}


def by_hand(name: str, **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"router.handoff": "direct", "worker.handoff": "store"}, "is for both"),
        ({"router.handoff": "direct"}, None),
        ({"router.handoff": "store", "worker.handoff": "direct"}, "is for both"),
        ({"engine.kv_transfer_config": by_hand("NoConnector")}, "must be one of"),
        (
            {
                "router.handoff": "direct",
                "engine.kv_transfer_config": by_hand("StoreConnector", **PLACE),
            },
            "--handoff direct needs the DirectConnector",
        ),
        (
            {"router.handoff": "store", "engine.kv_transfer_config": by_hand("DirectConnector")},
            "--handoff store needs a connector with a store",
        ),
        (
            {
                "router.handoff": "store",
                "engine.kv_transfer_config": by_hand("DirectConnector", **PLACE),
            },
            None,
        ),
    ],
)
def test_router_and_workers_must_have_a_way_in_common(
    flags: dict[str, Any], text: str | None
) -> None:
    settings = load(tuple(SECTIONS), flags, {})
    if text is None:
        check_together(settings)
        return
    with pytest.raises(ConfigError) as caught:
        check_together(settings)
    assert text in caught.value.message


def test_a_file_of_api_keys_is_read_before_anything_starts() -> None:
    settings = load(tuple(SECTIONS), {"router.api_keys": "/nope"}, {})
    for aggregated in (False, True):
        with pytest.raises(ConfigError, match="API keys /nope cannot be read"):
            check_together(settings, aggregated=aggregated)


ELSEWHERE = {"redis.redis": "redis://192.0.2.2:26379"}


@pytest.mark.parametrize(
    ("flags", "variables"),
    [
        ({}, ["DIPTYCH_WORKER_HOST=0.0.0.0", "DIPTYCH_KVSTORE_HOST=0.0.0.0"]),
        ({"router.handoff": "direct"}, ["DIPTYCH_WORKER_HOST=0.0.0.0"]),
        ({"kvstore.advertise_address": "me:1"}, ["DIPTYCH_WORKER_HOST=0.0.0.0"]),
        ({"worker.host": "192.0.2.7"}, ["DIPTYCH_KVSTORE_HOST=0.0.0.0"]),
    ],
)
def test_beside_a_redis_elsewhere_the_variables_of_up_are_named(
    flags: dict[str, Any], variables: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_together(load(tuple(SECTIONS), {**ELSEWHERE, **flags}, {}))
    assert f"here: set {' '.join(variables)}, or" in caught.value.message
    assert "\n" not in caught.value.message
    assert "--" not in caught.value.message, "up has no flag for it"
    environment = dict(variable.split("=") for variable in variables)
    load(tuple(SECTIONS), {}, environment)


def test_one_machine_needs_no_address_of_a_network() -> None:
    for url in (None, "redis://127.0.0.1:1", "unix:///tmp/redis.sock"):
        check_together(load(tuple(SECTIONS), {"redis.redis": url}, {}))
    there = {**ELSEWHERE, "worker.host": "192.0.2.7", "kvstore.host": "192.0.2.7"}
    check_together(load(tuple(SECTIONS), there, {}))
    check_together(load(tuple(SECTIONS), there, {}), aggregated=True)


def test_serve_beside_a_redis_elsewhere_has_no_store_to_be_reached() -> None:
    with pytest.raises(ConfigError, match=r"here: set DIPTYCH_WORKER_HOST=0\.0\.0\.0, or"):
        check_together(load(tuple(SECTIONS), ELSEWHERE, {}), aggregated=True)


@pytest.mark.parametrize(
    ("name", "extra", "text"),
    [
        ("MooncakeConnector", {}, "kv_connector must be one of"),
        ("StoreConnector", {}, "needs kv_connector_extra_config"),
        ("StoreConnector", {**PLACE, "color": 1}, "has no setting color"),
        ("SharedStorageConnector", {}, "shared_storage_path"),
        ("SharedStorageConnector", {"shared_storage_path": 7}, "shared_storage_path"),
        ("DirectConnector", {"transports": "pigeon"}, "pigeon"),
        ("DirectConnector", {"lease_s": -1}, "lease_s must be positive"),
        ("DirectConnector", {"lease_s": "long"}, "lease_s must be a float"),
        ("DirectConnector", {"transfer_timeout_s": 0}, "transfer_timeout_s must be positive"),
        ("DirectConnector", {"kvstore": 7}, "kvstore must be a str"),
    ],
)
def test_a_connector_of_nonsense_is_named(name: str, extra: dict[str, Any], text: str) -> None:
    transfer = KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra)
    with pytest.raises(ConfigError) as caught:
        checked_transfer(transfer)
    assert text in caught.value.message
