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
