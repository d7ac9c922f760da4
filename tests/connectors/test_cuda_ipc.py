"""CUDA IPC's bookkeeping, over memory that stands in for a GPU's: reads that end, late or never
wanted; mappings that are shared, and let go once; peers that claim more than they have. What a GPU
does of it is in tests/gpu/test_cuda_ipc_gpu.py."""

import msgspec
import pytest

from diptych.connectors.store_wire import boot_id
from diptych.connectors.transports import cuda_ipc
from diptych.connectors.transports.base import Endpoint, Offer, ReadFailure, ReadState, Runs
from diptych.connectors.transports.cuda_ipc import CudaIpcTransport
from diptych.errors import TransferError

KIB = 1 << 10
RUNS = Runs.of([(0, 512, 256), (KIB, 0, 128)])


class Event:
    over = False

    def query(self) -> bool:
        return self.over


class Gpu:
    """Allocations of 8 KiB at multiples of it; a copy is over when `finish` says so."""

    def __init__(self) -> None:
        self.mapped: dict[int, bytes] = {}
        self.copies: list[tuple[int, int, Event]] = []
        self.at_once = True
        self.refuses = False

    def export(self, address: int) -> tuple[bytes, int]:
        return (address // (8 * KIB)).to_bytes(64), address % (8 * KIB)

    def open(self, handle: bytes) -> tuple[int, int]:
        if self.refuses:
            raise TransferError("no way to that GPU")
        assert handle not in self.mapped.values(), "mapped twice"
        address = (1 << 40) + len(self.mapped) * 64 * KIB
        self.mapped[address] = handle
        return address, 8 * KIB

    def close(self, address: int) -> None:
        assert not any(not event.over for *_, event in self.copies), "unmapped while it is read"
        del self.mapped[address]

    def copy(self, source: int, target: int, runs: Runs) -> Event:
        event = Event()
        event.over = self.at_once
        self.copies.append((source, target, event))
        return event

    def finish(self) -> None:
        for *_, event in self.copies:
            event.over = True


class Memory:
    device, fd, view = "cuda:0", None, None

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address, self.num_bytes = address, num_bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reader(gpu: Gpu, clock: Clock) -> CudaIpcTransport:
    transport = CudaIpcTransport(lambda device: gpu, clock)
    transport.register("kv", Memory(80 * KIB, 4 * KIB))
    return transport


def endpoint(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int] | None = None, **changes: object
) -> Endpoint:
    """Of a source that has two regions in one allocation."""
    gpu = Gpu()
    source = CudaIpcTransport(lambda device: gpu)
    regions = {"kv": Memory(16 * KIB, 4 * KIB), "probe": Memory(20 * KIB, 4 * KIB)}
    for name, memory in regions.items():
        source.register(name, memory)
    with monkeypatch.context() as other:
        other.setattr(cuda_ipc, "_PROCESS", "another")
        offer = source.offer()
    values = {
        "incarnation": "source",
        "boot_id": boot_id(),
        "regions": sizes or {name: memory.num_bytes for name, memory in regions.items()},
        "devices": dict.fromkeys(regions, "cuda:1"),
        "offers": [offer],
    }
    return Endpoint(**{**values, **changes})


def test_a_read_copies_from_the_mapping_into_the_pool(reader, gpu, monkeypatch) -> None:
    peer = reader.connect(endpoint(monkeypatch))
    handle = reader.read(peer, "probe", RUNS, deadline_s=101.0)
    assert reader.poll(handle) is ReadState.DONE
    [(address, _)] = gpu.mapped.items()
    assert [copy[:2] for copy in gpu.copies] == [(address + 4 * KIB, 80 * KIB)]
    reader.disconnect(peer)
    assert not gpu.mapped


def test_only_gpus_of_another_process_of_this_host_are_mapped(reader, monkeypatch) -> None:
    assert reader.supports(endpoint(monkeypatch))
    assert not reader.supports(endpoint(monkeypatch, boot_id="another host"))
    assert not reader.supports(endpoint(monkeypatch), "landing")
    own = Endpoint(
        incarnation="own", boot_id=boot_id(), regions={}, devices={}, offers=[reader.offer()]
    )
    assert not reader.supports(own)
    assert not reader.supports(endpoint(monkeypatch, offers=[]))
    host = Memory(0, KIB)
    host.device = "cpu"
    with pytest.raises(TransferError):
        reader.register("landing", host)


@pytest.mark.parametrize("sizes", [{"kv": 8 * KIB + 1, "probe": 1}, {"kv": 1, "probe": 5 * KIB}])
def test_a_region_that_is_larger_than_its_memory_is_refused(
    reader, gpu, monkeypatch, sizes
) -> None:
    with pytest.raises(TransferError, match="larger than its memory"):
        reader.connect(endpoint(monkeypatch, sizes))
    assert not gpu.mapped


@pytest.mark.parametrize("payload", [b"", b"\x00", msgspec.msgpack.encode({"process": "p"})])
def test_an_offer_that_cannot_be_read_is_refused(reader, monkeypatch, payload) -> None:
    broken = endpoint(monkeypatch, offers=[Offer(transport="cuda_ipc", payload=payload)])
    with pytest.raises(TransferError, match="cannot be read"):
        reader.connect(broken)


def test_a_gpu_that_is_not_reached_leaves_nothing_behind(reader, gpu, monkeypatch) -> None:
    gpu.refuses = True
    with pytest.raises(TransferError, match="no way"):
        reader.connect(endpoint(monkeypatch))
    gpu.refuses = False
    peer = reader.connect(endpoint(monkeypatch))
    reader.disconnect(peer)
    assert not gpu.mapped


def test_peers_share_a_mapping_and_the_last_one_lets_it_go(reader, gpu, monkeypatch) -> None:
    """As while a peer is tested anew."""
    first = reader.connect(endpoint(monkeypatch))
    second = reader.connect(endpoint(monkeypatch))
    reader.disconnect(first)
    assert len(gpu.mapped) == 1
    assert reader.poll(reader.read(second, "kv", RUNS, deadline_s=101.0)) is ReadState.DONE
    failed = reader.read(first, "kv", RUNS, deadline_s=101.0)
    assert failed.failure is ReadFailure.PEER_GONE
    reader.disconnect(second)
    assert not gpu.mapped


@pytest.mark.parametrize("late", [False, True])
def test_a_read_given_up_is_in_quarantine_until_its_kernel_is_over(
    reader, gpu, clock, monkeypatch, late
) -> None:
    gpu.at_once = False
    peer = reader.connect(endpoint(monkeypatch))
    handle = reader.read(peer, "kv", RUNS, deadline_s=101.0)
    assert reader.poll(handle) is ReadState.PENDING
    if late:
        clock.now = 101.0
    else:
        reader.cancel(handle)
    assert reader.poll(handle) is ReadState.QUARANTINED
    assert not reader.fence(peer)
    gpu.finish()
    assert reader.poll(handle) is ReadState.FAILED
    assert handle.failure is (ReadFailure.DEADLINE if late else ReadFailure.CANCELLED)
    assert reader.fence(peer)


def test_a_peer_is_unmapped_only_after_its_reads(reader, gpu, monkeypatch) -> None:
    gpu.at_once = False
    peer = reader.connect(endpoint(monkeypatch))
    handle = reader.read(peer, "kv", RUNS, deadline_s=101.0)
    reader.disconnect(peer)
    reader.progress()
    assert handle.state is ReadState.QUARANTINED
    assert gpu.mapped
    gpu.finish()
    reader.progress()
    assert handle.state is ReadState.FAILED
    assert not gpu.mapped


def test_runs_outside_a_region_are_refused(reader, gpu, monkeypatch) -> None:
    peer = reader.connect(endpoint(monkeypatch))
    for run in [(4 * KIB - 1, 0, 2), (0, 4 * KIB - 1, 2), (-1, 0, 1)]:
        handle = reader.read(peer, "kv", Runs.of([run]), deadline_s=101.0)
        assert handle.failure is ReadFailure.REFUSED
    assert reader.read(peer, "landing", RUNS, deadline_s=101.0).failure is ReadFailure.REFUSED
    assert not gpu.copies


def test_a_read_is_looked_at_when_it_may_be_over(reader, gpu, clock, monkeypatch) -> None:
    peer = reader.connect(endpoint(monkeypatch))
    assert reader.tick_s() is None
    gpu.at_once = False
    first = reader.read(peer, "kv", RUNS, deadline_s=200.0)
    clock.now += 0.4e-3
    gpu.finish()
    assert reader.poll(first) is ReadState.DONE
    reader.read(peer, "kv", RUNS, deadline_s=200.0)
    assert reader.tick_s() == pytest.approx(0.4e-3)
    clock.now += 0.4e-3
    assert reader.tick_s() == pytest.approx(20e-6)
    clock.now += 0.4e-3
    assert reader.tick_s() == pytest.approx(0.1e-3)
    gpu.finish()


def test_closing_lets_everything_go(reader, gpu, monkeypatch) -> None:
    peer = reader.connect(endpoint(monkeypatch))
    reader.read(peer, "kv", RUNS, deadline_s=101.0)
    reader.close()
    reader.close()
    assert not gpu.mapped
