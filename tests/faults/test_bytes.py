"""KV is damaged where it lies and where it travels: it is computed again, and no answer changes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.cluster import ServiceProcess, until
from tests.faults.clients import QUESTIONS, Question
from tests.faults.damage import spoil_files, spoil_pool
from tests.faults.deployment import Deployment, Shape
from tests.faults.proxy import Proxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

QUESTION = QUESTIONS[2]
STORE = "kvstore-0"


def test_a_byte_flipped_in_the_mapped_pool_is_noticed(system: Deployment) -> None:
    before = sum(map(failures, decodes(system)))
    with system.pausing("decode", "load.begin") as pause, ThreadPoolExecutor(1) as pool:
        _, asked = pause.reached_by(lambda: pool.submit(system.ask, QUESTION))
        spoil_pool(system.pid(STORE))
        pause.release()
        answer = asked.result(240)
    assert answer.is_right(system.expected[QUESTION]), answer
    assert sum(map(failures, decodes(system))) > before


def decodes(system: Deployment) -> list[ServiceProcess]:
    return list(system.of_role("decode").values())


def test_damaged_files_are_misses(system: Deployment) -> None:
    """Pages that lie in damaged files are computed again by workers that remember none."""
    store = system.services[STORE]
    again = Question(QUESTION.prompt, seed=QUESTION.seed, salt="damaged")
    system.check_right(again)
    until(lambda: store.metric("diptych:kvstore_disk_objects") >= 3, "files are there")
    for name in (STORE, "prefill-0", "decode-0", "decode-1"):
        system.send(name, signal.SIGKILL)
    assert spoil_files(system.directory / "disk-0")
    system.revive()
    system.wait_whole()
    system.check_right(again)
    assert store.metric("diptych:kvstore_disk_corrupt_total") > 0


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Proxy]]:
    """A system whose KV takes the byte stream, through a proxy."""
    made = Deployment(
        tmp_path_factory.mktemp("remote"),
        Shape(decode=1, routers=1, transport="stream", store_host="127.0.0.2"),
    )
    control, stream = made.store_ports[0], made.stream_ports[0]
    with (
        Proxy(("127.0.0.2", control), ("127.0.0.1", control)),
        Proxy(("127.0.0.2", stream), ("127.0.0.1", stream)) as proxy,
    ):
        try:
            made.start()
            yield made, proxy
        finally:
            made.stop()


@pytest.mark.parametrize("up", [True, False], ids=["put", "get"])
def test_a_byte_flipped_in_flight_is_noticed(remote: tuple[Deployment, Proxy], up: bool) -> None:
    system, proxy = remote
    decode, flipped = system.services["decode-0"], proxy.num_flipped
    before = failures(decode)

    def noticed() -> bool:
        for question in QUESTIONS[1:]:
            system.check_right(question)
        return proxy.num_flipped > flipped and failures(decode) > before

    proxy.flip_up, proxy.flip_down = up, not up
    try:
        until(noticed, "a flipped byte was noticed", 240)
    finally:
        proxy.flip_up = proxy.flip_down = False

    def loaded() -> bool:
        failed = failures(decode)
        system.check_right(QUESTION)
        return failures(decode) == failed

    until(loaded, "what comes whole is taken", 60)
    system.check_nothing_leaks()


def failures(decode: ServiceProcess) -> float:
    return decode.metric("diptych:kv_load_failures_total")


def test_a_slow_wire_costs_time_only(remote: tuple[Deployment, Proxy]) -> None:
    system, proxy = remote
    proxy.delay_s = 0.2
    try:
        for question in QUESTIONS:
            system.check_right(question)
    finally:
        proxy.delay_s = 0.0
    system.check_nothing_leaks()


def test_a_wire_that_passes_nothing_is_given_up(remote: tuple[Deployment, Proxy]) -> None:
    system, proxy = remote
    proxy.dropping = True
    try:
        system.check_right(QUESTION)
    finally:
        proxy.dropping = False
    system.check_nothing_leaks()
