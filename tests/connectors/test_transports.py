"""Every transport, between real processes: what arrives, and what happens when a peer does not."""

import contextlib
import importlib.util
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from diptych.connectors.store_wire import socket_name
from diptych.connectors.transports.base import (
    Endpoint,
    Offer,
    ReadFailure,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.grpc_bytes import GrpcTransport
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.nixl import NixlTransport, check_ucx_tls
from diptych.connectors.transports.shm import ShmTransport, _map
from diptych.connectors.transports.tcp import TcpTransport
from diptych.connectors.transports.tcp_wire import (
    ANSWER,
    HELLO_BYTES,
    MAGIC,
    REQUEST,
    RUN,
    WELCOME,
    TlsFiles,
)
from diptych.connectors.transports.thread import TransferThread
from diptych.errors import ConfigError, TransferError
from tests.certificates import files_of, make_certificates
from tests.connectors.transport_pair import (
    MIB,
    UNTOUCHED,
    Reader,
    Source,
    expected,
    running_source,
    shuffled,
)

POOL = 32 * MIB
WITHOUT_NIXL = importlib.util.find_spec("nixl_cu12") is None and (
    importlib.util.find_spec("nixl_cu13") is None
)
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(WITHOUT_NIXL, reason="the nixl package is not installed")
)


def make(name: str) -> Transport:
    if name == "tcp":
        return TcpTransport()
    if name == "grpc":
        return GrpcTransport()
    return ShmTransport() if name == "shm" else NixlTransport()


@pytest.fixture(params=[NIXL, "shm", "tcp", "grpc"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Source]]:
    """One source that lives through the module and serves every transport."""
    names = ["shm", "tcp", "grpc"] if WITHOUT_NIXL else ["nixl", "shm", "tcp", "grpc"]
    with running_source("lasting", POOL, *names) as source:
        yield dict.fromkeys(names, source)
        assert source.alive(), "no reader may hurt it"
        assert source.close() == 0


@pytest.fixture
def reader(name: str) -> Iterator[Reader]:
    reader = Reader(make(name), POOL)
    yield reader
    reader.close()


@pytest.mark.parametrize("unit", [8 * MIB, 2 * MIB, 32 << 10, 2000], ids=str)
def test_bytes_land_where_they_belong_and_nowhere_else(
    reader: Reader, name: str, sources: dict[str, Source], unit: int
) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    runs = shuffled(POOL, unit)
    some = Runs(runs.src[::2], runs.dst[::2], runs.length[::2] - 16)
    handle = reader.read(peer, some)
    assert reader.wait(handle) is ReadState.DONE
    np.testing.assert_array_equal(reader.memory.array, expected(some, POOL))
    assert handle.num_bytes == some.num_bytes
    assert reader.transport.fence(peer)


def test_many_reads_share_a_peer(reader: Reader, name: str, sources: dict[str, Source]) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    whole = shuffled(POOL, MIB)
    handles = [
        reader.read(peer, Runs(whole.src[i::8], whole.dst[i::8], whole.length[i::8]))
        for i in range(8)
    ]
    for handle in reversed(handles):
        assert reader.wait(handle) is ReadState.DONE
    np.testing.assert_array_equal(reader.memory.array, expected(whole, POOL))


def test_nothing_is_read_at_once(reader: Reader, name: str, sources: dict[str, Source]) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    assert reader.wait(reader.read(peer, Runs.of([]))) is ReadState.DONE


@pytest.mark.parametrize(
    "run", [(POOL - 4, 0, 8), (0, POOL - 4, 8), (-8, 0, 16), (0, 0, 0)], ids=str
)
def test_runs_outside_a_region_are_refused(
    reader: Reader, name: str, sources: dict[str, Source], run: tuple[int, int, int]
) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    handle = reader.read(peer, Runs.of([run]))
    assert (handle.state, handle.failure) == (ReadState.FAILED, ReadFailure.REFUSED)
    unknown = reader.read(peer, Runs.of([(0, 0, 8)]), region="weights")
    assert unknown.failure is ReadFailure.REFUSED


def test_a_peer_that_is_killed_in_mid_read_fails_the_read(reader: Reader, name: str) -> None:
    with running_source("victim", POOL, name) as source:
        peer = reader.transport.connect(source.endpoint)
        assert reader.wait(reader.read(peer, Runs.of([(0, 0, 4096)]))) is ReadState.DONE
        source.signal(signal.SIGSTOP)
        # what the kernel copies without the peer's help may end all the same
        handles = [reader.read(peer, shuffled(POOL, MIB, seed)) for seed in range(3)]
        source.kill()
        for handle in handles:
            reader.until(lambda h=handle: reader.transport.poll(h) and h.ended)
        assert handles[-1].state in (ReadState.FAILED, ReadState.DONE)
        if name != "nixl":
            assert handles[-1].state is ReadState.FAILED
        assert reader.transport.fence(peer)
        reader.memory.array[:] = UNTOUCHED
        late = reader.read(peer, Runs.of([(0, 0, MIB)]))
        reader.until(lambda: reader.transport.poll(late) and late.ended)
        assert late.state is ReadState.FAILED
        assert late.failure in (ReadFailure.PEER_GONE, ReadFailure.TRUNCATED, ReadFailure.BACKEND)
        assert (reader.memory.array == UNTOUCHED).all()


def test_a_silent_peer_costs_a_read_its_deadline_and_no_byte_comes_late(name: str) -> None:
    reader = Reader(make(name), POOL)
    with running_source("silent", POOL, name) as source:
        peer = reader.transport.connect(source.endpoint)
        assert reader.wait(reader.read(peer, Runs.of([(0, 0, 4096)]))) is ReadState.DONE
        source.signal(signal.SIGSTOP)
        handle = reader.read(peer, shuffled(POOL, MIB), within_s=0.3)
        reader.wait(handle)
        if handle.state is not ReadState.DONE:
            assert handle.failure is ReadFailure.DEADLINE
            assert reader.transport.fence(peer) is handle.ended
        if handle.ended:
            reader.memory.array[:] = UNTOUCHED
        source.signal(signal.SIGCONT)
        reader.until(lambda: reader.transport.fence(peer))
        assert reader.transport.poll(handle) in (ReadState.FAILED, ReadState.DONE)
        reader.memory.array[:] = UNTOUCHED
        end_s = time.monotonic() + 0.3
        reader.until(lambda: time.monotonic() > end_s)
        assert (reader.memory.array == UNTOUCHED).all(), "written after the fence"
        # the pair still works
        assert reader.wait(reader.read(peer, Runs.of([(0, 0, MIB)]))) is ReadState.DONE
    reader.close()


@pytest.mark.parametrize("name", ["tcp", "grpc"])
def test_a_source_that_is_slow_to_accept_is_not_taken_for_gone(reader: Reader, name: str) -> None:
    with running_source("slow", POOL, name) as source:
        source.signal(signal.SIGSTOP)
        peer = reader.transport.connect(source.endpoint)
        handle = reader.read(peer, Runs.of([(0, 0, MIB)]))
        end_s = time.monotonic() + 0.4
        reader.until(lambda: reader.transport.poll(handle) and time.monotonic() > end_s)
        source.signal(signal.SIGCONT)
        assert reader.wait(handle) is ReadState.DONE, handle.detail


def test_a_cancelled_read_writes_nothing_after_the_fence(
    reader: Reader, name: str, sources: dict[str, Source]
) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    runs = shuffled(POOL, 32 << 10)
    for _ in range(3):
        handle = reader.read(peer, runs)
        reader.transport.cancel(handle)
        reader.until(lambda: reader.transport.fence(peer))
        if handle.failure is not None:
            assert handle.failure is ReadFailure.CANCELLED
        reader.memory.array[:] = UNTOUCHED
        end_s = time.monotonic() + 0.05
        reader.until(lambda end_s=end_s: time.monotonic() > end_s)
        assert (reader.memory.array == UNTOUCHED).all()
    assert reader.wait(reader.read(peer, runs)) is ReadState.DONE
    np.testing.assert_array_equal(reader.memory.array, expected(runs, POOL))


def test_a_reader_that_is_killed_does_not_hurt_the_source(
    reader: Reader, name: str, sources: dict[str, Source]
) -> None:
    with running_source("doomed", POOL, name) as other:
        other.read_for_ever(sources[name].endpoint)
        time.sleep(0.1)
        other.kill()
    peer = reader.transport.connect(sources[name].endpoint)
    assert reader.wait(reader.read(peer, shuffled(POOL, MIB))) is ReadState.DONE


def test_a_disconnected_peer_is_let_go(
    reader: Reader, name: str, sources: dict[str, Source]
) -> None:
    peer = reader.transport.connect(sources[name].endpoint)
    handle = reader.read(peer, shuffled(POOL, MIB))
    reader.transport.disconnect(peer)
    reader.transport.disconnect(peer)
    reader.until(lambda: reader.transport.fence(peer))
    assert reader.transport.poll(handle) in (ReadState.FAILED, ReadState.DONE)
    assert reader.read(peer, Runs.of([(0, 0, 8)])).failure is ReadFailure.PEER_GONE
    # and can be met again
    again = reader.transport.connect(sources[name].endpoint)
    assert reader.wait(reader.read(again, Runs.of([(0, 0, MIB)]))) is ReadState.DONE


@pytest.mark.parametrize("name", ["shm", "tcp", "grpc"])
def test_a_wrong_token_opens_nothing(reader: Reader, name: str, sources: dict[str, Source]) -> None:
    endpoint = sources[name].endpoint
    offers = [msgspec.structs.replace(offer, token=bytes(32)) for offer in endpoint.offers]
    peer = reader.transport.connect(msgspec.structs.replace(endpoint, offers=offers))
    handle = reader.read(peer, Runs.of([(0, 0, 8)]))
    assert reader.wait(handle) is ReadState.FAILED
    assert handle.failure is ReadFailure.PEER_GONE
    assert (reader.memory.array == UNTOUCHED).all()


def test_an_endpoint_without_this_transport_is_refused(
    reader: Reader, name: str, sources: dict[str, Source]
) -> None:
    endpoint = msgspec.structs.replace(sources[name].endpoint, offers=[])
    assert not reader.transport.supports(endpoint)
    with pytest.raises(TransferError):
        reader.transport.connect(endpoint)


def test_an_endpoint_of_another_version_is_refused(sources: dict[str, Source]) -> None:
    other = msgspec.structs.replace(sources["tcp"].endpoint, version=9)
    with pytest.raises(TransferError, match="version 9 of the transfer endpoint"):
        Endpoint.decode(other.encode())
    with pytest.raises(TransferError, match="cannot be read"):
        Endpoint.decode(b"\x93abc")


# --- shared memory


def test_a_reader_cannot_write_into_a_sources_memory(sources: dict[str, Source]) -> None:
    reader = Reader(ShmTransport(), POOL)
    peer = reader.transport.connect(sources["shm"].endpoint)
    reader.wait(reader.read(peer, Runs.of([(0, 0, 8)])))
    view = peer.views["kv"]
    assert not view.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    reader.close()


@pytest.mark.parametrize("num_bytes", [-1, 0, 1 << 40, 1 << 63])
def test_a_region_of_a_size_that_cannot_be_is_not_mapped(num_bytes: int) -> None:
    memory = HostMemory.shared(MIB)
    with pytest.raises(TransferError, match="not sealed at its size"):
        _map(msgspec.msgpack.encode([("kv", num_bytes)]), [memory.fd])


def test_shared_memory_is_for_one_host_and_host_memory(sources: dict[str, Source]) -> None:
    endpoint = sources["shm"].endpoint
    transport = ShmTransport()
    assert transport.supports(endpoint)
    assert not transport.supports(msgspec.structs.replace(endpoint, boot_id="another"))
    on_gpu = {**endpoint.devices, "kv": "cuda:0"}
    assert not transport.supports(msgspec.structs.replace(endpoint, devices=on_gpu))
    transport.close()


# --- TCP


class FakeSource:
    """Answers one connection with given bytes after its first request, then does as told."""

    def __init__(self, answer: bytes, *, close: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answer = answer
        self._close = close
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection:
            connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
            connection.sendall(WELCOME)
            connection.recv(1 << 16)
            connection.sendall(self._answer)
            if not self._close:
                self._done.wait(120)

    def stop(self) -> None:
        self._done.set()
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("answer", "close", "failure"),
    [
        (b"\1" + bytes(7) + b"\0" + (8192).to_bytes(4, "little") + b"x" * 100, True, "truncated"),
        (b"\1" + bytes(7) + b"\0" + (8192).to_bytes(4, "little") + b"x" * 100, False, "peer gone"),
        (b"\1" + bytes(7) + b"\0" + (4096).to_bytes(4, "little"), False, "protocol"),
        (b"\2" + bytes(7) + b"\0" + (8192).to_bytes(4, "little"), False, "protocol"),
        (b"\1" + bytes(7) + b"\1" + bytes(4), False, "refused"),
        (b"\1" + bytes(3), True, "truncated"),
    ],
    ids=["truncated", "stalled", "short", "out of turn", "refused", "half a header"],
)
def test_a_stream_that_goes_wrong_has_a_name(
    sources: dict[str, Source], answer: bytes, close: bool, failure: str
) -> None:
    fake = FakeSource(answer, close=close)
    endpoint = sources["tcp"].endpoint
    offers = [msgspec.structs.replace(endpoint.offer("tcp"), address=fake.address)]
    # only what stalls may take as long as a stall
    stall_s = 0.3 if failure == "peer gone" else 20.0
    reader = Reader(TcpTransport(stall_s=stall_s), POOL)
    peer = reader.transport.connect(msgspec.structs.replace(endpoint, offers=offers))
    handle = reader.read(peer, Runs.of([(0, 0, 8192)]))
    assert reader.wait(handle) is ReadState.FAILED
    assert handle.failure == failure
    fake.stop()
    reader.close()


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        transport = TcpTransport(port=port)
        with pytest.raises(ConfigError, match=f"{port}: the port is in use"):
            transport.offer()
        transport.close()


def test_a_source_owes_what_it_was_asked_for_though_its_turn_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A turn may end between two answers; the reader has no reason to say anything more."""
    monkeypatch.setattr("diptych.connectors.transports.tcp_server._TURN_BYTES", 1)
    source = Reader(TcpTransport(), MIB)
    offer = source.transport.offer()
    host, _, port = offer.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        requests = [REQUEST.pack(number, 0, 1) + RUN.pack(0, 64) for number in range(20)]
        connection.sendall(MAGIC + offer.token + b"".join(requests))
        wanted = len(WELCOME) + 20 * (ANSWER.size + 64)
        connection.setblocking(False)
        received = bytearray()

        def take() -> bool:
            # as the thread does: a turn only where a descriptor asks for one
            if select.select(source.transport.waitables(), [], [], 0)[0]:
                source.transport.progress()
            with contextlib.suppress(BlockingIOError):
                received.extend(connection.recv(1 << 16))
            return len(received) == wanted

        end_s = time.monotonic() + 20
        while not take():
            assert time.monotonic() < end_s, f"{len(received)} of {wanted} bytes came"
            time.sleep(0.001)
    source.close()


def test_rubbish_does_not_hurt_a_source(sources: dict[str, Source]) -> None:
    offer = sources["tcp"].endpoint.offer("tcp")
    host, _, port = offer.address.rpartition(":")
    for rubbish in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"DKT1" + offer.token + b"\xff" * 64):
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(rubbish)
            connection.settimeout(60)
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(64):
                    pass
    reader = Reader(TcpTransport(), POOL)
    peer = reader.transport.connect(sources["tcp"].endpoint)
    assert reader.wait(reader.read(peer, Runs.of([(0, 0, MIB)]))) is ReadState.DONE
    reader.close()


# --- readers that do not say who they are


def raw(offer: Offer) -> socket.socket:
    """A connection to a source that says nothing by itself."""
    if offer.transport == "shm":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(socket_name(offer.address))
    else:
        host, _, port = offer.address.rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def shorten_hello(name: str, monkeypatch: pytest.MonkeyPatch, *, readers: int) -> None:
    module = f"diptych.connectors.transports.{'shm' if name == 'shm' else 'tcp_server'}"
    monkeypatch.setattr(f"{module}._HELLO_DEADLINE_S", 0.3)
    monkeypatch.setattr(f"{module}._MAX_CLIENTS", readers)


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_a_reader_that_says_nothing_is_let_go_though_the_source_sleeps(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_hello(name, monkeypatch, readers=8)
    transport = make(name)
    thread = TransferThread([transport], HostMemory.shared(MIB), "idle")
    try:
        offer = thread.start().offer(name)
        assert offer is not None
        with raw(offer) as connection:
            assert connection.recv(1) == b"", "nothing else wakes the source"
        assert transport.tick_s() is None, "with nobody to wait for it sleeps for ever again"
    finally:
        thread.close()


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_readers_that_say_nothing_keep_no_place_from_one_that_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_hello(name, monkeypatch, readers=2)
    transport = make(name)
    transport.register("kv", HostMemory.shared(MIB))
    offer = transport.offer()
    assert offer is not None
    with contextlib.ExitStack() as stack:
        stack.callback(transport.close)
        for _ in range(2):
            stack.enter_context(raw(offer))
            transport.progress()
        time.sleep(transport.tick_s() or 0)
        reader = stack.enter_context(raw(offer))
        reader.sendall(offer.token if name == "shm" else MAGIC + offer.token)
        transport.progress()  # lets the two go, and this one in
        transport.progress()
        assert reader.recv(4), "the one that has the token is served"


# --- TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Source, Path, Path]]:
    """A source with TLS, the folder of its certificates, and one of another authority's."""
    ours, others = tmp_path_factory.mktemp("ours"), tmp_path_factory.mktemp("others")
    make_certificates(ours)
    make_certificates(others)
    with running_source("tls", POOL, "tcp", "grpc", SOURCE_TLS=str(ours)) as source:
        yield source, ours, others


@pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])
def test_bytes_travel_inside_tls(
    tls: tuple[Source, Path, Path], kind: type[TcpTransport | GrpcTransport]
) -> None:
    source, ours, _ = tls
    reader = Reader(kind(tls=files_of(ours)), POOL)
    runs = shuffled(POOL, 32 << 10)
    assert reader.wait(reader.read(reader.transport.connect(source.endpoint), runs)) is (
        ReadState.DONE
    )
    np.testing.assert_array_equal(reader.memory.array, expected(runs, POOL))
    reader.close()


@pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])
def test_a_certificate_of_another_authority_opens_nothing(
    tls: tuple[Source, Path, Path], kind: type[TcpTransport | GrpcTransport], tmp_path: Path
) -> None:
    source, ours, others = tls
    # they trust the source, but cannot show a certificate that it trusts; and the other way round
    files = {"certificate": others, "key": others, "authority": ours}
    for swap in (files, {**dict.fromkeys(files, ours), "authority": others}):
        paths = {name: folder / f"{name}.pem" for name, folder in swap.items()}
        reader = Reader(kind(tls=TlsFiles(**paths)), POOL)
        handle = reader.read(reader.transport.connect(source.endpoint), Runs.of([(0, 0, 8)]), 3)
        assert reader.wait(handle) is ReadState.FAILED
        assert (reader.memory.array == UNTOUCHED).all()
        reader.close()


@pytest.mark.parametrize("kind", [TcpTransport, GrpcTransport])
def test_nothing_travels_in_the_clear_where_tls_is_on(
    tls: tuple[Source, Path, Path],
    sources: dict[str, Source],
    kind: type[TcpTransport | GrpcTransport],
) -> None:
    source, ours, _ = tls
    for transport, endpoint in (
        (kind(), source.endpoint),
        (kind(tls=files_of(ours)), sources["tcp"].endpoint),
    ):
        with pytest.raises(TransferError, match="one side transfers with TLS"):
            transport.connect(endpoint)
        transport.close()


def test_missing_certificates_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TLS files for transfers cannot be used"):
        TcpTransport(tls=files_of(tmp_path))


# --- NIXL


@pytest.fixture
def over_tcp(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Reader, Source]]:
    """NIXL as between hosts without RDMA: UCX emulates reads by messages, which come late. A test
    may name the time after which a read that goes on takes the agent with it."""
    if WITHOUT_NIXL:
        pytest.skip("the nixl package is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp")
    # the end of an agent with reads under way is what these tests provoke; UCX warns of it
    monkeypatch.setenv("UCX_LOG_LEVEL", "error")
    reader = Reader(NixlTransport(quarantine_s=getattr(request, "param", 60.0)), 8 * POOL)
    with running_source("slow", 8 * POOL, "nixl") as source:
        yield reader, source
        reader.close()


def test_a_read_that_goes_on_is_quarantined_until_it_ended(
    over_tcp: tuple[Reader, Source],
) -> None:
    reader, source = over_tcp
    peer = reader.transport.connect(source.endpoint)
    handle = reader.read(peer, shuffled(8 * POOL, MIB))
    reader.until(lambda: (reader.memory.array[::MIB] != UNTOUCHED).sum() > 4)
    reader.transport.cancel(handle)
    assert (handle.state, handle.failure) == (ReadState.QUARANTINED, ReadFailure.CANCELLED)
    assert not reader.transport.fence(peer)
    # it does go on: whoever reused these blocks now would lose their contents
    touched = (reader.memory.array[::MIB] != UNTOUCHED).sum()
    reader.until(lambda: (reader.memory.array[::MIB] != UNTOUCHED).sum() > touched)
    reader.until(lambda: reader.transport.fence(peer))
    assert reader.transport.poll(handle) is ReadState.FAILED
    assert handle.failure is ReadFailure.CANCELLED
    reader.memory.array[:] = UNTOUCHED
    end_s = time.monotonic() + 0.2
    reader.until(lambda: time.monotonic() > end_s)
    assert (reader.memory.array == UNTOUCHED).all()


def test_a_source_killed_in_mid_read_ends_the_read_by_name(
    over_tcp: tuple[Reader, Source],
) -> None:
    reader, source = over_tcp
    peer = reader.transport.connect(source.endpoint)
    handle = reader.read(peer, shuffled(8 * POOL, MIB))
    reader.until(lambda: (reader.memory.array[::MIB] != UNTOUCHED).sum() > 4)
    source.kill()
    reader.until(lambda: reader.transport.poll(handle) and handle.ended)
    assert (handle.state, handle.failure) == (ReadState.FAILED, ReadFailure.PEER_GONE)
    assert peer.gone
    reader.memory.array[:] = UNTOUCHED
    end_s = time.monotonic() + 0.2
    reader.until(lambda: time.monotonic() > end_s)
    assert (reader.memory.array == UNTOUCHED).all()


def test_a_reader_killed_in_mid_read_leaves_its_source_serving(
    over_tcp: tuple[Reader, Source],
) -> None:
    reader, source = over_tcp
    with running_source("doomed", 8 * POOL, "nixl") as other:
        other.read_for_ever(source.endpoint)
        time.sleep(0.1)
        other.kill()
    peer = reader.transport.connect(source.endpoint)
    assert reader.wait(reader.read(peer, Runs.of([(0, 0, MIB)]))) is ReadState.DONE
    assert source.alive()


@pytest.mark.parametrize("over_tcp", [0.5], indirect=True)
def test_a_read_that_never_ends_takes_the_agent_with_it(over_tcp: tuple[Reader, Source]) -> None:
    reader, source = over_tcp
    peer = reader.transport.connect(source.endpoint)
    handle = reader.read(peer, shuffled(8 * POOL, MIB), within_s=0.2)
    reader.until(lambda: (reader.memory.array[::MIB] != UNTOUCHED).sum() > 4)
    source.signal(signal.SIGSTOP)
    assert reader.wait(handle) is ReadState.QUARANTINED
    assert handle.failure is ReadFailure.DEADLINE
    reader.until(lambda: handle.ended)
    assert reader.transport.fence(peer)
    assert peer.gone
    reader.memory.array[:] = UNTOUCHED
    source.signal(signal.SIGCONT)
    end_s = time.monotonic() + 0.5
    reader.until(lambda: time.monotonic() > end_s)
    assert (reader.memory.array == UNTOUCHED).all(), "written after the fence"
    # a new agent meets new peers
    with running_source("next", POOL, "nixl") as other:
        again = reader.transport.connect(other.endpoint)
        assert reader.wait(reader.read(again, Runs.of([(0, 0, MIB)]))) is ReadState.DONE


@pytest.mark.parametrize("value", ["", "all", "tcp", "cuda_ipc,rc,sm,tcp", "^rc"])
def test_ucx_has_tcp(value: str) -> None:
    check_ucx_tls({"UCX_TLS": value})


@pytest.mark.parametrize("value", ["cuda_ipc,rc", "sm,self", "^tcp"])
def test_ucx_without_tcp_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="add tcp") as caught:
        check_ucx_tls({"UCX_TLS": value})
    assert caught.value.param == "UCX_TLS"
