"""The transfer thread: links are found by testing, and every read gives its results."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from diptych.connectors.transports import self_test
from diptych.connectors.transports.base import Endpoint, ReadFailure, ReadState, Runs
from diptych.connectors.transports.choose import TransportSettings, open_transports
from diptych.connectors.transports.links import MARGIN, LinkState
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.orders import ReadOrder, ReadResult
from diptych.connectors.transports.thread import TransferThread
from diptych.errors import ConfigError, TransferError
from tests.certificates import files_of, make_certificates
from tests.connectors.test_transports import WITHOUT_NIXL
from tests.connectors.transport_pair import (
    MIB,
    UNTOUCHED,
    Source,
    expected,
    running_source,
    shuffled,
)
from tests.connectors.transport_source import pattern

POOL = 16 * MIB
ALL = ["shm", "tcp", "grpc"] if WITHOUT_NIXL else ["nixl", "shm", "tcp", "grpc"]


class Worker:
    """A transfer thread with a pool, and what it reported."""

    def __init__(self, *names: str, **settings: float) -> None:
        self.memory = HostMemory.shared(POOL)
        self.memory.array[:] = UNTOUCHED
        self.thread = TransferThread(open_transports(names), self.memory, "worker", **settings)
        self.endpoint = self.thread.start()
        self.results: dict[str, list[ReadResult]] = {}

    def read(self, read_id: str, runs: Runs, within_s: float = 60.0, **more: object) -> None:
        deadline_s = time.monotonic() + within_s
        fields: dict = {"peer_id": "p", "runs": runs, "deadline_s": deadline_s, **more}
        self.thread.read(ReadOrder(read_id=read_id, **fields))

    def ended(self, read_id: str) -> ReadResult | None:
        for result in self.thread.take_results():
            self.results.setdefault(result.read_id, []).append(result)
        last = self.results.get(read_id, [None])[-1]
        return last if last and last.state in (ReadState.DONE, ReadState.FAILED) else None

    def wait(self, read_id: str) -> ReadResult:
        until(lambda: self.ended(read_id) is not None)
        result = self.ended(read_id)
        assert result is not None
        return result

    def link_is(self, state: LinkState, peer_id: str = "p") -> Callable[[], bool]:
        return lambda: (link := self.thread.links().get(peer_id)) and link.state is state


def until(done: Callable[[], object], limit_s: float = 120.0) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def source() -> Iterator[Source]:
    with running_source("lasting", POOL, *ALL) as source:
        yield source
        assert source.close() == 0


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(*ALL)
    yield worker
    worker.thread.close()


def lying(source: Source, **changes: object) -> Endpoint:
    return msgspec.structs.replace(source.endpoint, **changes)


def test_the_fastest_transport_that_passes_its_test_is_taken(
    worker: Worker, source: Source
) -> None:
    worker.thread.connect("p", source.endpoint)
    # reads may be ordered before the test is over
    runs = shuffled(POOL, MIB)
    worker.read("r", runs)
    assert worker.wait("r").state is ReadState.DONE
    np.testing.assert_array_equal(worker.memory.array, expected(runs, POOL))
    # which is the fastest on a busy machine nobody knows
    link = worker.thread._links.all["p"]
    until(lambda: len(link.gb_per_s) == len(ALL))
    fastest, *others = link.gb_per_s
    for name in others:
        if link.gb_per_s[name] >= MARGIN * link.gb_per_s[fastest]:
            fastest = name
    until(lambda: worker.thread.links()["p"].transport == fastest)
    report = worker.thread.links()["p"]
    assert report.state is LinkState.READY
    assert report.bandwidth_gb_per_s == link.gb_per_s[fastest] > 0
    assert report.failures == {}


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_host_tests_a_probe_of_the_size_of_a_gpus(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    memory = HostMemory.shared(MIB)
    with monkeypatch.context() as gpu:
        gpu.setattr(self_test, "HOST_PROBE_BYTES", self_test.DEVICE_PROBE_BYTES)
        source = TransferThread(open_transports([name]), memory, "source")
    worker = Worker(name)
    try:
        worker.thread.connect("p", source.start())
        until(lambda: any(worker.link_is(s)() for s in (LinkState.READY, LinkState.DOWN)))
        assert worker.thread.links()["p"].failures == {}
    finally:
        worker.thread.close()
        source.close()


def test_a_transport_that_fails_its_test_is_passed_over(worker: Worker, source: Source) -> None:
    offers = [
        offer
        if offer.transport == "tcp"
        else msgspec.structs.replace(offer, token=bytes(32), payload=b"rubbish")
        for offer in source.endpoint.offers
    ]
    worker.thread.connect("p", lying(source, offers=offers))
    worker.read("r", Runs.of([(0, 0, MIB)]))
    assert worker.wait("r").state is ReadState.DONE
    until(lambda: len(worker.thread.links()["p"].failures) == len(offers) - 1)
    report = worker.thread.links()["p"]
    assert (report.state, report.transport) == (LinkState.READY, "tcp")


def test_an_address_that_cannot_be_costs_that_peer_its_link_and_nobody_else(
    worker: Worker, source: Source
) -> None:
    offers = [
        msgspec.structs.replace(offer, address=f"127.0.0.1:{'9' * 40}")
        for offer in source.endpoint.offers
        if offer.transport == "tcp"
    ]
    worker.thread.connect("good", source.endpoint)
    until(worker.link_is(LinkState.READY, "good"))
    mark = Mark()
    worker.read("r", Runs.of([(0, 0, MIB)]), peer_id="good", mark=mark)
    worker.thread.connect("p", lying(source, offers=offers))
    until(worker.link_is(LinkState.DOWN))
    assert worker.thread.links()["p"].failures.keys() == {"tcp"}
    mark.over = True
    assert worker.wait("r").state is ReadState.DONE


def test_bytes_that_do_not_check_bring_no_link_up(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", lying(source, probe_checksum=source.endpoint.probe_checksum ^ 1))
    until(worker.link_is(LinkState.DOWN))
    failures = worker.thread.links()["p"].failures
    assert failures.keys() == set(ALL)
    assert all("not those that were sent" in why for why in failures.values())
    worker.read("r", Runs.of([(0, 0, MIB)]))
    assert worker.wait("r").failure is ReadFailure.PEER_GONE
    assert (worker.memory.array == UNTOUCHED).all()


def test_a_peer_with_nothing_in_common_is_down_at_once(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", lying(source, offers=[]))
    until(worker.link_is(LinkState.DOWN))
    assert worker.thread.links()["p"].failures == {"*": "no transport is common to both sides"}


def test_a_peer_that_came_back_is_met_anew(worker: Worker) -> None:
    with running_source("first", POOL, *ALL) as first:
        worker.thread.connect("p", first.endpoint)
        worker.read("a", Runs.of([(0, 0, MIB)]))
        assert worker.wait("a").state is ReadState.DONE
        until(lambda: worker.thread.links()["p"].transport == "shm")
        first.kill()
        until(worker.link_is(LinkState.DOWN))
        worker.read("b", Runs.of([(0, 0, MIB)]))
        assert worker.wait("b").failure is ReadFailure.PEER_GONE
    with running_source("second", POOL, *ALL) as second:
        worker.thread.connect("p", second.endpoint)
        worker.read("c", Runs.of([(0, 0, MIB)]))
        assert worker.wait("c").state is ReadState.DONE


def test_a_peer_that_is_known_is_not_tested_again(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", source.endpoint)
    until(worker.link_is(LinkState.READY))
    until(lambda: not worker.thread._links.testing)
    link = worker.thread._links.get("p")
    worker.thread.connect("p", source.endpoint)
    worker.read("r", Runs.of([(0, 0, 8)]))
    worker.wait("r")
    assert worker.thread._links.get("p") is link


class Mark:
    """An event that is over when told."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over


def test_a_read_waits_for_the_steps_that_used_its_blocks(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", source.endpoint)
    mark = Mark()
    worker.read("r", Runs.of([(0, 0, MIB)]), mark=mark)
    worker.read("free", Runs.of([(MIB, MIB, MIB)]))
    assert worker.wait("free").state is ReadState.DONE
    assert worker.ended("r") is None
    assert (worker.memory.array[:MIB] == UNTOUCHED).all()
    mark.over = True
    assert worker.wait("r").state is ReadState.DONE


def test_a_read_whose_mark_never_comes_ends_at_its_deadline(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", source.endpoint)
    worker.read("r", Runs.of([(0, 0, MIB)]), within_s=0.1, mark=Mark())
    assert worker.wait("r").failure is ReadFailure.DEADLINE
    assert (worker.memory.array == UNTOUCHED).all()


def test_reads_that_cannot_be_made_say_why(worker: Worker, source: Source) -> None:
    worker.read("nobody", Runs.of([(0, 0, 8)]), peer_id="stranger")
    assert worker.wait("nobody").failure is ReadFailure.PEER_GONE
    worker.thread.connect("p", source.endpoint)
    mark = Mark()
    worker.read("twice", Runs.of([(0, 0, 8)]), mark=mark)
    worker.read("twice", Runs.of([(0, 0, 8)]))
    assert worker.wait("twice").failure is ReadFailure.REFUSED
    worker.thread.cancel("twice")
    until(lambda: worker.ended("twice").failure is ReadFailure.CANCELLED)
    worker.thread.cancel("unknown")
    assert [r.failure for r in worker.results["twice"]] == [
        ReadFailure.REFUSED,
        ReadFailure.CANCELLED,
    ]


def test_disconnecting_ends_what_is_under_way(worker: Worker, source: Source) -> None:
    worker.thread.connect("p", source.endpoint)
    worker.read("r", Runs.of([(0, 0, 8)]), mark=Mark())
    worker.thread.disconnect("p")
    assert worker.wait("r").failure is ReadFailure.CANCELLED
    assert worker.thread.links() == {}


def test_results_wake_whoever_asked(source: Source) -> None:
    woken = threading.Event()
    worker = Worker("tcp", on_result=woken.set)
    worker.thread.connect("p", source.endpoint)
    worker.read("r", Runs.of([(0, 0, MIB)]))
    assert woken.wait(120)
    assert worker.wait("r").state is ReadState.DONE
    assert worker.thread.counters.reads_done == 1
    assert worker.thread.counters.bytes_read == MIB
    worker.thread.close()


class Staged(HostMemory):
    """As a device's: its bytes are copied to be sent, each megabyte as one piece."""

    view = None  # type: ignore[assignment]

    def __init__(self, array: np.ndarray) -> None:
        super().__init__(array)
        self.view = None  # type: ignore[assignment]

    def load(self, offset: int, target: memoryview) -> None:
        target[:] = self.array[offset : offset + len(target)].data


def test_what_tls_has_decrypted_already_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of 16 KB go into runs of 2,000 bytes: no descriptor tells of what is left of one."""
    monkeypatch.setattr("diptych.connectors.transports.tcp._TURN_BYTES", 1000)
    make_certificates(tmp_path)
    settings = TransportSettings(tls=files_of(tmp_path))
    source = TransferThread(open_transports(["tcp"], settings), Staged(pattern(POOL)), "source")
    memory = HostMemory(np.zeros(POOL, np.uint8))
    reader = TransferThread(open_transports(["tcp"], settings), memory, "reader")
    try:
        endpoint = source.start()
        reader.start()
        reader.connect("p", endpoint)
        runs = Runs.of([(at, at, 2000) for at in range(0, 206_000, 2000)])
        deadline_s = time.monotonic() + 20
        results: list[ReadResult] = []
        reader.read(ReadOrder(read_id="r", peer_id="p", runs=runs, deadline_s=deadline_s))
        until(lambda: results.extend(reader.take_results()) or results)
        assert results[0].state is ReadState.DONE
        np.testing.assert_array_equal(memory.array[:206_000], pattern(POOL)[:206_000])
    finally:
        reader.close()
        source.close()


def test_closing_leaves_no_read_no_thread_and_no_descriptor(source: Source) -> None:
    def now() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once(names: list[str]) -> list[str]:
        worker = Worker(*names)
        worker.thread.connect("p", source.endpoint)
        worker.read("a", shuffled(POOL, MIB))
        worker.wait("a")
        for index in range(8):
            worker.read(f"{index}", shuffled(POOL, 32 << 10, index))
        worker.thread.close()
        worker.thread.close()
        states = []
        for index in range(8):
            result = worker.ended(f"{index}")
            states.append("none" if result is None else result.state.value)
        worker.memory.array[:] = UNTOUCHED
        time.sleep(0.05)
        assert (worker.memory.array == UNTOUCHED).all()
        worker.memory.close()
        return states

    names = [name for name in ALL if name != "nixl"]
    once(names)
    before = now()
    for _ in range(3):
        assert set(once(names)) <= {"done", "failed"}
    until(lambda: now() == before)  # gRPC's last descriptors go a moment later
    if not WITHOUT_NIXL:
        assert set(once(["nixl"])) <= {"done", "failed"}


def test_a_thread_that_is_awake_does_not_end_before_its_closer_has_woken_it(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker("tcp")
    worker.thread.connect("p", source.endpoint)
    until(worker.link_is(LinkState.READY))
    # while a mark is waited for the thread looks for commands all the time
    worker.read("a", shuffled(POOL, MIB), mark=Mark())
    write = os.eventfd_write

    def late_write(fd: int, value: int) -> None:
        time.sleep(0.2)  # as on a busy machine
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", late_write)
    worker.thread.close()
    worker.memory.close()


@pytest.mark.parametrize("name", ALL)
def test_a_stopped_peer_gives_a_quarantine_first_or_the_end_at_once(name: str) -> None:
    worker = Worker(name)
    with running_source("stopped", POOL, name) as victim:
        worker.thread.connect("p", victim.endpoint)
        worker.read("a", Runs.of([(0, 0, 8)]))
        worker.wait("a")
        victim.signal(signal.SIGSTOP)
        worker.read("b", shuffled(POOL, MIB), within_s=0.2)
        until(lambda: worker.ended("b") or worker.results.get("b"))
        victim.signal(signal.SIGCONT)
        result = worker.wait("b")
        if result.state is ReadState.FAILED:
            assert result.failure is ReadFailure.DEADLINE
        states = [entry.state for entry in worker.results["b"]]
        assert states in (
            [ReadState.FAILED],
            [ReadState.DONE],
            [ReadState.QUARANTINED, ReadState.FAILED],
        )
    worker.thread.close()


def test_a_pool_in_no_memfd_is_not_offered_as_shared_memory() -> None:
    """Its test would pass all the same: the regions that it reads lie in one."""
    memory = HostMemory(np.zeros(POOL, np.uint8))
    thread = TransferThread(open_transports(["shm", "tcp"]), memory, "worker")
    endpoint = thread.start()
    thread.close()
    assert [offer.transport for offer in endpoint.offers] == ["tcp"]


def test_transports_are_known_by_name() -> None:
    with pytest.raises(ConfigError, match="transports are auto, cuda_ipc, nixl, shm, tcp, grpc"):
        open_transports(["carrier-pigeon"])
    with pytest.raises(ConfigError):
        open_transports([])
    with pytest.raises(TransferError, match="on no GPU"):
        open_transports(["cuda_ipc"])
    assert opened("tcp", "shm", "tcp") == ["tcp", "shm"]
    # alone with a CPU, NIXL has nothing to offer
    rdma = any(Path("/sys/class/infiniband").glob("*"))
    assert opened("auto") == opened("shm", "auto") == [*["nixl"] * rdma, "shm", "tcp", "grpc"]
    if not WITHOUT_NIXL:
        assert opened("auto", "nixl") == ["nixl", "shm", "tcp", "grpc"]


def opened(*names: str) -> list[str]:
    transports = open_transports(names)
    for transport in transports:
        transport.close()
    return [transport.name for transport in transports]
