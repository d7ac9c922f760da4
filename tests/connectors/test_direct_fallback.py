"""What becomes of direct hand-offs where nothing can carry them, and of links that are down."""

from __future__ import annotations

import pytest
import torch

from diptych.connectors.base import KVConnectorMetadata, KVLayout
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.direct_worker import DirectWorker
from diptych.connectors.link_retries import LinkRetries
from diptych.connectors.transports import choose
from diptych.connectors.transports.base import Memory, Transport
from diptych.connectors.transports.shm import ShmTransport
from diptych.errors import ConfigError, TransferError


class Unreaching(ShmTransport):
    """Cannot use the memory, as NIXL without a driver that lets it."""

    def register(self, region: str, memory: Memory) -> None:
        raise TransferError(f"no way to memory on {memory.device}")


@pytest.fixture(autouse=True)
def unreaching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choose._MAKERS, "shm", lambda settings: Unreaching())


def registered(transports: str, *, required: bool = False) -> DirectWorker:
    layout = KVLayout(4, 2, 1, 16, 8, "float32")
    worker = DirectWorker(DirectSettings(transports=transports, required=required))
    worker.register_kv_caches(torch.zeros(layout.shape), layout)
    return worker


def test_without_a_transport_that_reaches_the_pool_there_are_no_direct_handoffs(caplog) -> None:
    """That is said, and all else goes on."""
    worker = registered("shm")
    try:
        assert worker.driver is None
        assert "no direct hand-offs, KV is computed anew" in caplog.text
        worker.start_load_kv(KVConnectorMetadata())
        worker.wait_for_save(KVConnectorMetadata())
        assert worker.get_finished().empty
    finally:
        worker.shutdown()


def test_where_direct_handoffs_are_required_the_engine_does_not_start() -> None:
    with pytest.raises(ConfigError, match="no transport can reach the KV pool; set kv_transports"):
        registered("shm", required=True)


def test_the_reason_of_each_transport_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(settings: choose.TransportSettings) -> Transport:
        raise TransferError("NIXL is not installed")

    monkeypatch.setitem(choose._MAKERS, "nixl", missing)
    with pytest.raises(ConfigError) as refused:
        registered("nixl", required=True)
    assert "no transport works here (nixl: NIXL is not installed)" in refused.value.message
    assert "\n" not in refused.value.message


def test_a_transport_that_does_not_reach_the_pool_is_passed_over(caplog) -> None:
    worker = registered("shm, grpc")
    try:
        assert worker.driver is not None
        assert "no transfers over shm: no way to memory on cpu" in caplog.text
    finally:
        worker.shutdown()


def test_a_link_is_tested_again_later_each_time_until_it_works() -> None:
    now = [100.0]
    retries = LinkRetries(lambda: now[0])
    waits = []
    for _ in range(7):
        retries.failed("p")
        due_s = retries.next_at_s()
        assert due_s is not None
        assert retries.take_due() == []
        waits.append(due_s - now[0])
        now[0] = due_s
        assert retries.take_due() == ["p"]
        assert retries.take_due() == []
        assert retries.next_at_s() is None
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    retries.forget("p")
    retries.failed("p")
    assert retries.next_at_s() == now[0] + 1
