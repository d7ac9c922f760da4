"""Which connector a worker gets, and what it is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diptych.config import EngineConfig, KVTransferConfig, WorkerConfig
from diptych.connectors.direct_settings import DirectSettings
from diptych.errors import AddressError, ConfigError
from diptych.worker.setup import check_transfers, needs_store, with_connector
from tests.certificates import files_of, make_certificates

PLACE = {"kvstore": "s:1"}


def config(role: str, place: dict[str, Any] | None, **worker: Any) -> KVTransferConfig | None:
    made = with_connector(EngineConfig(), role, WorkerConfig(**worker), place)
    return made.kv_transfer_config


@pytest.mark.parametrize(
    ("role", "worker", "expected"),
    [
        ("prefill", {}, True),
        ("decode", {"handoff": "auto"}, True),
        ("decode", {"handoff": "direct"}, False),
        ("decode", {"handoff": "direct", "kvstore": "s:1"}, True),
        ("aggregated", {}, False),
        ("aggregated", {"handoff": "auto"}, False),
        ("aggregated", {"kvstore": "s:1"}, True),
    ],
)
def test_who_needs_a_store(role: str, worker: dict[str, Any], expected: bool) -> None:
    assert needs_store(role, EngineConfig(), WorkerConfig(**worker)) is expected


def test_through_the_store_alone_there_is_the_stores_connector() -> None:
    transfer = config("decode", PLACE, handoff="store")
    assert transfer is not None
    assert (transfer.kv_connector, transfer.kv_role) == ("StoreConnector", "kv_consumer")
    assert "transports" not in transfer.kv_connector_extra_config


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("place", [PLACE, None], ids=["store", "no store"])
def test_workers_that_hand_over_directly_have_the_direct_connector(
    role: str, place: dict[str, Any] | None
) -> None:
    transfer = config(role, place, handoff="auto", kv_lease_s=2.0, kv_transports="tcp")
    assert transfer is not None
    assert transfer.kv_connector == "DirectConnector"
    extra = transfer.kv_connector_extra_config
    assert extra.get("kvstore") == (place or {}).get("kvstore")
    assert (extra["lease_s"], extra["transports"], extra["verify_kv"]) == (2.0, "tcp", None)


@pytest.mark.parametrize(("handoff", "required"), [("direct", True), ("auto", False)])
def test_only_direct_workers_need_a_transport_that_works(handoff: str, required: bool) -> None:
    transfer = config("decode", PLACE, handoff=handoff)
    assert transfer is not None
    assert transfer.kv_connector_extra_config["required"] is required


def test_an_aggregated_worker_hands_nothing_over() -> None:
    assert config("aggregated", None, handoff="direct") is None


def test_a_connector_chosen_by_hand_stays() -> None:
    own = KVTransferConfig(kv_connector="StoreConnector")
    engine = EngineConfig(kv_transfer_config=own)
    made = with_connector(engine, "decode", WorkerConfig(handoff="direct"), None)
    assert made.kv_transfer_config is own


def test_readers_are_told_the_host_at_which_the_worker_is_reached() -> None:
    transfer = config("prefill", None, handoff="direct", advertise_address="[2001:db8::5]:70")
    assert transfer is not None
    assert transfer.kv_connector_extra_config["advertised_host"] == "2001:db8::5"


def test_a_worker_that_nobody_could_read_from_does_not_start() -> None:
    worker = WorkerConfig(handoff="direct", host="127.0.0.1")
    with pytest.raises(AddressError):
        with_connector(EngineConfig(), "prefill", worker, None, "redis://10.1.2.3:6379")


def test_certificates_are_those_that_kv_travels_under(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    names = ("certificate", "key", "authority")
    given = {f"kv_tls_{name}": str(tmp_path / f"{name}.pem") for name in names}
    check_transfers("decode", EngineConfig(), WorkerConfig(**given))
    transfer = config("decode", PLACE, kv_tls_name="worker.kv", **given)
    assert transfer is not None
    settings = DirectSettings.of(transfer.kv_connector_extra_config).for_transports("cpu")
    assert settings.tls == replace(files_of(tmp_path), server_name="worker.kv")


def test_certificates_that_cannot_be_used_are_named_before_anything_loads(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    names = ("certificate", "key", "authority")
    given = {f"kv_tls_{name}": str(tmp_path / f"{name}.pem") for name in names}
    with pytest.raises(ConfigError, match="kv_tls_authority is missing"):
        WorkerConfig(**{**given, "kv_tls_authority": None})
    with pytest.raises(ConfigError, match="kv_tls_certificate, kv_tls_key, kv_tls_authority is"):
        WorkerConfig(kv_tls_name="worker.kv")
    worker = WorkerConfig(**{**given, "kv_tls_key": given["kv_tls_authority"]})
    with pytest.raises(ConfigError, match="TLS files for transfers cannot be used"):
        check_transfers("decode", EngineConfig(), worker)
    check_transfers("decode", EngineConfig(), replace(worker, handoff="store"))
