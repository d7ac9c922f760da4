"""The store as its users meet it: a node in a process of its own, and clients that talk to it."""

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import grpc
import pytest

from diptych.config import KVStoreConfig
from diptych.connectors import store_session, store_transport
from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult
from diptych.connectors.store_stream import StreamMover
from diptych.connectors.store_transport import open_mover
from diptych.connectors.store_wire import (
    ANSWER,
    FRAME,
    READ,
    WELCOME,
    WRITE,
    boot_id,
    hello,
    socket_name,
)
from diptych.embedded_redis import EmbeddedRedis
from diptych.errors import ConfigError, TransferError
from diptych.launcher.child import free_ports
from diptych.proto import kvstore_pb2 as pb
from diptych.proto import kvstore_pb2_grpc
from diptych.services.kvstore.object_types import Status

MIB = 1 << 20
CODE = """
import sys
from diptych.config import KVStoreConfig, RedisConfig
from diptych.services.kvstore.main import run
settings = eval(sys.argv[1])
run(KVStoreConfig(**settings["store"]), RedisConfig(**settings["redis"]))
"""


@dataclass
class Node:
    """A node's process and the ports it was told to take."""

    process: subprocess.Popen[bytes]
    address: str
    admin: str

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.admin}{path}", timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def until_ready(self, status: int = 200, timeout_s: float = 300.0) -> str:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            code, text = self.get("/readyz")
            if code == status:
                return text
            assert self.process.poll() is None
            time.sleep(0.02)
        raise AssertionError(f"/readyz says {code} {text}")


def start_node(
    settings: dict[str, dict[str, object]], stderr: int | None = None
) -> subprocess.Popen[bytes]:
    source = str(Path(__file__).parents[2] / "src")
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", CODE, repr(settings)],
        env={**os.environ, "PYTHONPATH": source, "DIPTYCH_LOG_LEVEL": "WARNING"},
        stderr=stderr,
    )


@contextlib.contextmanager
def running_node(
    ports: Sequence[int] = (), redis: dict[str, object] | None = None, **store: object
) -> Iterator[Node]:
    port, admin_port = ports or free_ports(2)
    settings = {
        "store": {
            "port": port,
            "admin_port": admin_port,
            "pool_bytes": 8 * MIB,
            "put_ttl_s": 60.0,  # nothing lapses while the node gets no time to run
            "lease_s": 60.0,
            **store,
        },
        "redis": redis or {},
    }
    process = start_node(settings)
    node = Node(process, f"127.0.0.1:{port}", f"127.0.0.1:{admin_port}")
    try:
        if not redis:
            node.until_ready()
        yield node
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node


@pytest.fixture(params=["memory", "stream"])
def client(request: pytest.FixtureRequest, node: Node) -> Iterator[StoreClient]:
    client = patient(node.address, transport=request.param)
    yield client
    client.close()


def key() -> bytes:
    return os.urandom(32)


def patient(address: str, timeout_s: float = 60.0, **settings: Any) -> StoreClient:
    """A client that waits: its node may get no time to run for a while."""
    return StoreClient(address, timeout_s=timeout_s, call_timeout_s=60.0, **settings)


def put(client: StoreClient, objects: dict[bytes, bytes]) -> list[PutResult]:
    def writer(data: bytes) -> PutItem:
        return PutItem(b"", len(data), lambda view: view.__setitem__(slice(None), data))

    items = [PutItem(k, len(data), writer(data).write) for k, data in objects.items()]
    return client.put_many(items)


def get(client: StoreClient, keys: Sequence[bytes]) -> tuple[list[GetResult], dict[int, bytes]]:
    taken: dict[int, bytes] = {}
    results = client.get_many(keys, lambda i, view: taken.__setitem__(i, bytes(view)))
    return results, taken


def control(node: Node) -> kvstore_pb2_grpc.KvStoreStub:
    return kvstore_pb2_grpc.KvStoreStub(grpc.insecure_channel(node.address))


@pytest.mark.parametrize(
    "request_",
    [
        pb.PutStartRequest(items=[pb.PutItem()] * 4097),
        pb.PutEndRequest(items=[pb.PutEndItem()] * 4097),
        pb.PutRevokeRequest(put_ids=[1] * 4097),
        pb.GetRequest(keys=[b"k"] * 4097),
        pb.VerifyLeaseRequest(lease_ids=[1] * 4097),
        pb.ReleaseRequest(lease_ids=[1] * 4097),
        pb.ExistsRequest(keys=[b"k"] * 4097),
        pb.PinRequest(keys=[b"k"] * 4097, level=pb.PIN_LEVEL_SOFT),
        pb.CheckRequest(keys=[b"k"] * 4097),
        pb.EvictRequest(keys=[b"k"] * 4097),
    ],
    ids=lambda request: type(request).__name__,
)
def test_a_batch_has_a_bound(node: Node, request_: Any) -> None:
    call = getattr(control(node), type(request_).__name__.removesuffix("Request"))
    with pytest.raises(grpc.RpcError, match="a batch holds at most 4096 items"):
        call(request_, timeout=60)


def test_what_was_put_is_got(client: StoreClient) -> None:
    objects = {key(): os.urandom(size) for size in (1, 4095, 4096, 100_001, 700_000)}
    results = put(client, objects)
    assert [r.outcome for r in results] == [Outcome.OK] * 5
    missing = key()
    found, taken = get(client, [*objects, missing])
    assert [r.outcome for r in found] == [Outcome.OK] * 5 + [Outcome.NOT_FOUND]
    assert list(taken.values()) == list(objects.values())
    assert [r.checksum for r in found[:5]] == [r.checksum for r in results]
    assert [r.num_bytes for r in found[:5]] == [len(data) for data in objects.values()]
    assert client.exists_many([*objects, missing]) == [True] * 5 + [False]


def test_batches_of_many_objects_keep_their_order(client: StoreClient) -> None:
    objects = {key(): i.to_bytes(4, "big") for i in range(300)}
    assert {r.outcome for r in put(client, objects)} == {Outcome.OK}
    _, taken = get(client, list(objects))
    assert [taken[i] for i in range(300)] == list(objects.values())


def test_a_read_waits_for_the_first_of_what_is_not_there_yet(client: StoreClient) -> None:
    """Which is no miss: who waits asks for it again."""
    keys, taken = [key() for _ in range(3)], dict[int, bytes]()
    before = client.ask("GetStats", pb.GetStatsRequest())
    asked: list[GetResult] = []

    def read() -> None:
        take = lambda i, view: taken.__setitem__(i, bytes(view))  # noqa: E731
        while not any(r.outcome is Outcome.OK for r in asked):
            asked[:] = client.get_many(keys, take, wait_s=0.5)

    reading = threading.Thread(target=read)
    reading.start()
    put(client, {keys[1]: b"second"})
    reading.join(60)
    outcomes = [Outcome.NOT_FOUND, Outcome.OK, Outcome.NOT_FOUND]
    assert ([r.outcome for r in asked], taken) == (outcomes, {1: b"second"})
    after = client.ask("GetStats", pb.GetStatsRequest())
    assert (after.misses_total, after.hits_total) == (before.misses_total, before.hits_total + 1)
    assert client.get_many([key()], lambda i, view: None, wait_s=0.001) == [
        GetResult(Outcome.NOT_FOUND)
    ]


def test_memory_and_stream_show_the_same_bytes(node: Node) -> None:
    memory, stream = (patient(node.address, transport=t) for t in ("memory", "stream"))
    first, second = {key(): os.urandom(50_000)}, {key(): os.urandom(50_000)}
    put(memory, first)
    put(stream, second)
    assert get(stream, list(first))[1][0] == next(iter(first.values()))
    assert get(memory, list(second))[1][0] == next(iter(second.values()))
    memory.close()
    stream.close()


def test_a_client_of_the_same_host_that_cannot_reach_the_socket_takes_the_stream(
    node: Node,
) -> None:
    """Two containers on one machine share the kernel's boot id but not their network."""
    store = control(node).GetNode(pb.GetNodeRequest())
    assert store.boot_id == boot_id()
    store.memory_socket = "@diptych-kv-of-another-network"
    mover = open_mover(store, "auto", 5.0)
    assert isinstance(mover, StreamMover)
    mover.close()
    with pytest.raises(ConnectionRefusedError):
        open_mover(store, "memory", 5.0)


def test_where_cores_are_spare_threads_move_objects_and_the_first_are_seen_before_the_last(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_transport.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(store_transport, "_THREADED_BYTES", MIB)
    monkeypatch.setattr(store_session, "_PUBLISH_BYTES", MIB // 2)
    monkeypatch.setattr(store_session, "_LAST_BYTES", MIB // 4)
    writer, other = patient(node.address, transport="memory"), patient(node.address)
    objects = {key(): os.urandom(MIB // 4) for _ in range(8)}
    first, *_, last = objects

    def when_the_first_is_seen(view: memoryview) -> None:
        deadline = time.monotonic() + 60.0
        while other.exists_many([first]) != [True]:
            assert time.monotonic() < deadline, "nothing is published before all is written"
            time.sleep(0.01)
        view[:] = objects[last]

    items = [PutItem.of(k, memoryview(data)) for k, data in objects.items()]
    items[-1] = PutItem(last, MIB // 4, lambda view: partial(when_the_first_is_seen, view))
    assert [result.outcome for result in writer.put_many(items)] == [Outcome.OK] * 8
    results, taken = get(writer, list(objects))
    assert [result.outcome for result in results] == [Outcome.OK] * 8
    assert list(dict(sorted(taken.items())).values()) == list(objects.values())
    writer.close()
    other.close()


def test_who_only_asks_maps_no_pool(node: Node) -> None:
    client = StoreClient(node.address)
    assert client.exists_many([key()]) == [False]
    assert client.pools() == []
    put(client, {key(): b"bytes"})
    assert [len(pool) for pool in client.pools()] == [8 * MIB]
    client.close()


def test_clients_of_one_process_share_their_connection(node: Node) -> None:
    def num_connections() -> int:
        port = f":{int(node.address.rpartition(':')[2]):04X}"
        tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
        rows = [row.split() for table in tables for row in table.splitlines()[1:]]
        return sum(row[2].endswith(port) and row[3] == "01" for row in rows)

    first, second = patient(node.address), patient(node.address)
    assert first.exists_many([key()]) == [False]
    before = num_connections()
    assert before
    assert second.exists_many([key()]) == [False]
    assert num_connections() == before
    first.close()
    assert second.exists_many([key()]) == [False]
    second.close()


def test_an_object_that_exists_is_not_written_again(client: StoreClient) -> None:
    name = key()
    [first] = put(client, {name: b"first"})
    [result] = client.put_many([PutItem(name, 5, pytest.fail)])
    assert result == PutResult(Outcome.EXISTS, first.checksum)
    assert result.stored
    [other_size] = client.put_many([PutItem(name, 6, pytest.fail)])
    assert other_size.outcome is Outcome.INVALID
    assert get(client, [name])[1] == {0: b"first"}


def test_of_two_writers_the_first_to_finish_wins(client: StoreClient) -> None:
    name = key()
    inner: list[PutResult] = []

    def write(view: memoryview) -> None:
        other = threading.Thread(target=lambda: inner.extend(late()))
        other.start()
        other.join()
        view[:] = b"outer"

    def late() -> list[PutResult]:
        rival = patient(client.address)
        results = put(rival, {name: b"inner"})
        rival.close()
        return results

    [outer] = client.put_many([PutItem(name, 5, write)])
    assert (inner[0].outcome, outer.outcome) == (Outcome.OK, Outcome.EXISTS)
    assert get(client, [name])[1] == {0: b"inner"}


def test_an_error_of_the_writer_gives_its_room_back(client: StoreClient, node: Node) -> None:
    before = control(node).GetStats(pb.GetStatsRequest()).used_bytes

    def fail(view: memoryview) -> None:
        raise RuntimeError("no bytes")

    name = key()
    with pytest.raises(RuntimeError, match="no bytes"):
        client.put_many([PutItem(name, 100, fail)])
    stats = control(node).GetStats(pb.GetStatsRequest())
    assert (stats.used_bytes, stats.num_puts) == (before, 0)
    assert put(client, {name: b"again"})[0].outcome is Outcome.OK


def test_an_error_of_the_reader_ends_its_lease(client: StoreClient, node: Node) -> None:
    name = key()
    put(client, {name: b"bytes"})

    def refuse(at: int, view: memoryview) -> None:
        raise ValueError("wrong size")

    with pytest.raises(ValueError, match="wrong size"):
        client.get_many([name], refuse)
    assert control(node).GetStats(pb.GetStatsRequest()).num_leases == 0
    assert get(client, [name])[0][0].outcome is Outcome.OK


@pytest.mark.parametrize(("name", "size"), [(b"short", 1), (bytes(32), 0), (bytes(32), 9 * MIB)])
def test_a_bad_key_or_size_is_invalid(client: StoreClient, name: bytes, size: int) -> None:
    assert client.put_many([PutItem(name, size, pytest.fail)])[0].outcome is Outcome.INVALID


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_bytes_that_changed_do_not_verify_and_go(node: Node, transport: str) -> None:
    """A writer that comes too late damages an object at worst; no reader takes it for good."""
    name = key()
    memory = patient(node.address, transport="memory")
    kept: list[memoryview] = []
    memory.put_many([PutItem(name, 6, lambda view: keep(view, kept))])
    kept[0][:] = b"late!!"
    reader = patient(node.address, transport=transport)
    assert get(reader, [name])[0][0].outcome is Outcome.CORRUPT
    # its reader has reported it, and the node has looked for itself
    assert get(reader, [name])[0][0].outcome is Outcome.NOT_FOUND
    assert put(reader, {name: b"bytes!"})[0].outcome is Outcome.OK
    assert control(node).Check(pb.CheckRequest(keys=[name])).statuses == [pb.ITEM_STATUS_OK]
    reader.close()
    memory.close()


def keep(view: memoryview, kept: list[memoryview]) -> None:
    view[:] = b"bytes!"
    kept.append(view[:])


def test_a_read_that_outlives_its_lease_is_dropped() -> None:
    with running_node(lease_s=0.2) as node:
        for transport in ("memory", "stream"):
            client = patient(node.address, transport=transport)
            name = key()
            put(client, {name: b"bytes"})
            [result] = client.get_many([name], lambda i, view: time.sleep(0.3))
            assert result.outcome is Outcome.EXPIRED
            client.close()


def test_a_put_that_takes_too_long_is_not_published_and_its_room_is_free_again() -> None:
    with running_node(put_ttl_s=0.4) as node:
        for transport in ("memory", "stream"):
            client = patient(node.address, transport=transport)
            slow, after = key(), key()
            results = client.put_many(
                [
                    PutItem(slow, 5, lambda view: time.sleep(0.5)),
                    PutItem(after, 5, lambda view: None),
                ]
            )
            assert [r.outcome for r in results] == [Outcome.EXPIRED, Outcome.EXPIRED]
            assert client.exists_many([slow, after]) == [False, False]
            stats = control(node).GetStats(pb.GetStatsRequest())
            assert (stats.used_bytes, stats.num_puts) == (0, 0)
            client.close()


def test_the_pool_is_bounded_and_old_objects_make_room(node: Node) -> None:
    with running_node(pool_bytes=4 * MIB) as node:
        client = patient(node.address)
        names = [key() for _ in range(40)]
        for name in names:
            assert put(client, {name: os.urandom(256 << 10)})[0].stored
        present = client.exists_many(names)
        assert present == sorted(present)
        assert 10 < sum(present) <= 15
        stats = control(node).GetStats(pb.GetStatsRequest())
        assert stats.used_bytes <= 0.9 * stats.pool_bytes
        assert stats.evictions_total == 40 - sum(present)
        client.close()


def test_what_is_being_read_stays_and_a_full_pool_refuses() -> None:
    with running_node(pool_bytes=4 * MIB) as node:
        client, other = patient(node.address), patient(node.address)
        names = [key() for _ in range(3)]
        put(client, {name: os.urandom(MIB) for name in names})
        outcomes: list[Outcome] = []

        def sink(at: int, view: memoryview) -> None:
            if at == 0:
                filler = {key(): os.urandom(MIB) for _ in range(3)}
                outcomes.extend(r.outcome for r in put(other, filler))

        results = client.get_many(names, sink)
        assert [r.outcome for r in results] == [Outcome.OK] * 3
        assert outcomes == [Outcome.OK, Outcome.NO_SPACE, Outcome.NO_SPACE]
        client.close()
        other.close()


def test_a_revoked_put_is_gone(node: Node) -> None:
    stub = control(node)
    request = pb.PutStartRequest(items=[pb.PutItem(key=key(), num_bytes=10)])
    [reserved] = stub.PutStart(request).reservations
    revoke = pb.PutRevokeRequest(put_ids=[reserved.put_id])
    assert stub.PutRevoke(revoke).statuses == [pb.ITEM_STATUS_OK]
    end = pb.PutEndRequest(items=[pb.PutEndItem(put_id=reserved.put_id)])
    assert stub.PutEnd(end).statuses == [pb.ITEM_STATUS_EXPIRED]


def test_a_lease_is_renewed_over_the_wire(node: Node) -> None:
    stub = control(node)
    name = key()
    client = patient(node.address)
    put(client, {name: b"x"})
    statuses: list[pb.ItemStatus] = []
    deadline = time.monotonic() + 60
    while statuses != [pb.ITEM_STATUS_OK] and time.monotonic() < deadline:  # it may come too late
        [found] = stub.Get(pb.GetRequest(keys=[name], lease_ms=600)).results
        assert found.lease_ms == 600
        renew = pb.VerifyLeaseRequest(lease_ids=[found.lease_id], renew_ms=60_000)
        statuses = list(stub.VerifyLease(renew).statuses)
    time.sleep(0.65)
    release = pb.ReleaseRequest(lease_ids=[found.lease_id, 1])
    assert stub.Release(release).statuses == [pb.ITEM_STATUS_OK, pb.ITEM_STATUS_NOT_FOUND]
    client.close()


def test_another_incarnation_and_an_endless_batch_are_refused(node: Node) -> None:
    stub = control(node)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Get(pb.GetRequest(keys=[key()], incarnation="of last week"))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    with pytest.raises(grpc.RpcError) as caught:
        stub.Exists(pb.ExistsRequest(keys=[b""] * 5000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_bytes_are_shown_to_nobody_without_the_token(node: Node) -> None:
    store = control(node).GetNode(pb.GetNodeRequest())
    host, port = store.stream_address.split(":")
    with socket.create_connection((host, int(port)), 60) as stream:
        stream.sendall(hello(bytes(32)))
        with pytest.raises(ConnectionError):
            raise_if_closed(stream.recv(1))
    with socket.socket(socket.AF_UNIX) as memory:
        memory.settimeout(60)
        memory.connect(socket_name(store.memory_socket))
        memory.sendall(hello(bytes(32)))
        data, fds, _, _ = socket.recv_fds(memory, 8, 1)
        assert (data, fds) == (b"", [])


def test_a_write_that_goes_on_after_its_reservation_touches_nobody() -> None:
    """Half an object comes, its reservation lapses, its room goes to another, the rest comes."""
    with running_node(put_ttl_s=3.0) as node:
        stub = control(node)
        size = 200_000
        slow = pb.PutStartRequest(items=[pb.PutItem(key=key(), num_bytes=size)])
        [reserved] = stub.PutStart(slow).reservations
        stream = open_stream(stub.GetNode(pb.GetNodeRequest()))
        stream.sendall(FRAME.pack(WRITE, reserved.put_id, size) + bytes(size // 2))
        time.sleep(3.05)
        client = patient(node.address)
        name, data = key(), os.urandom(size)
        put(client, {name: data})
        [found] = stub.Get(pb.GetRequest(keys=[name])).results
        assert found.placement.offset_bytes == reserved.placement.offset_bytes
        stream.sendall(bytes(size // 2))
        assert read_answer(stream) == (pb.ITEM_STATUS_EXPIRED, 0)
        assert get(client, [name])[1] == {0: data}
        client.close()
        stream.close()


def test_a_late_write_into_mapped_memory_is_noticed_and_the_object_goes() -> None:
    """Nobody can stop a process that has mapped the pool: it writes where another's object is."""
    with running_node(put_ttl_s=0.5) as node:
        late, other = (StoreClient(node.address, transport="memory") for _ in range(2))
        name, data = key(), os.urandom(200_000)

        def write(view: memoryview) -> None:
            time.sleep(0.6)
            assert put(other, {name: data})[0].outcome is Outcome.OK
            assert get(other, [name])[1] == {0: data}
            view[:1000] = bytes(1000)

        [result] = late.put_many([PutItem(key(), len(data), write)])
        assert result.outcome is Outcome.EXPIRED
        assert [r.outcome for r in get(other, [name])[0]] == [Outcome.CORRUPT]
        assert [r.outcome for r in get(other, [name])[0]] == [Outcome.NOT_FOUND]
        late.close()
        other.close()


def test_the_stream_stays_in_step_after_what_it_refuses(node: Node) -> None:
    stub = control(node)
    [reserved] = stub.PutStart(
        pb.PutStartRequest(items=[pb.PutItem(key=key(), num_bytes=5)])
    ).reservations
    stream = open_stream(stub.GetNode(pb.GetNodeRequest()))
    stream.sendall(FRAME.pack(WRITE, reserved.put_id, 4) + b"four")
    stream.sendall(FRAME.pack(WRITE, 12345, 6) + b"nobody")
    stream.sendall(FRAME.pack(READ, 12345, 6))
    stream.sendall(FRAME.pack(WRITE, reserved.put_id, 5) + b"fives")
    assert [read_answer(stream)[0] for _ in range(4)] == [
        pb.ITEM_STATUS_INVALID,
        pb.ITEM_STATUS_EXPIRED,
        pb.ITEM_STATUS_EXPIRED,
        pb.ITEM_STATUS_OK,
    ]
    stream.sendall(FRAME.pack(77, 1, 1))
    with pytest.raises(ConnectionError):
        raise_if_closed(stream.recv(1))
    stream.close()


def test_a_reader_that_takes_nothing_does_not_fill_the_node(node: Node) -> None:
    """Answers wait for their reader one at a time, and in the order they were asked for."""
    client = patient(node.address)
    names = [key() for _ in range(3)]
    objects = {name: os.urandom(MIB) for name in names}
    put(client, objects)
    found = control(node).Get(pb.GetRequest(keys=names)).results
    stream = open_stream(control(node).GetNode(pb.GetNodeRequest()))
    wanted = [found[i % 3] for i in range(60)]
    stream.sendall(b"".join(FRAME.pack(READ, f.lease_id, MIB) for f in wanted))
    time.sleep(0.2)
    data = list(objects.values())
    for i in range(60):
        assert read_answer(stream) == (pb.ITEM_STATUS_OK, MIB)
        assert read_exactly(stream, MIB) == data[i % 3]
    stream.close()
    client.close()


def open_stream(store: pb.StoreNode) -> socket.socket:
    host, port = store.stream_address.split(":")
    stream = socket.create_connection((host, int(port)), 60)
    stream.sendall(hello(store.access_token))
    assert stream.recv(1) == WELCOME
    return stream


def read_answer(stream: socket.socket) -> tuple[int, int]:
    status, num_bytes = ANSWER.unpack(read_exactly(stream, ANSWER.size))
    return status, num_bytes


def read_exactly(stream: socket.socket, num_bytes: int) -> bytes:
    parts = b""
    while len(parts) < num_bytes:
        part = stream.recv(num_bytes - len(parts))
        assert part
        parts += part
    return parts


def raise_if_closed(data: bytes) -> None:
    if not data:
        raise ConnectionResetError


def test_a_restarted_store_is_found_again_by_both_ways() -> None:
    ports = free_ports(2)
    address = f"127.0.0.1:{ports[0]}"
    clients = [patient(address, transport=t) for t in ("memory", "stream")]
    with running_node(ports):
        for client in clients:
            assert put(client, {key(): b"x"})[0].stored
    with running_node(ports):
        for client in clients:
            deadline = time.monotonic() + 60
            while not put(client, {key(): b"y" * 5000})[0].stored:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            name = key()
            assert put(client, {name: b"z" * 5000})[0].outcome is Outcome.OK
            assert get(client, [name])[1] == {0: b"z" * 5000}
            client.close()


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_a_store_that_dies_in_the_middle_fails_fast_and_wrong_bytes_never_pass(
    transport: str,
) -> None:
    with running_node() as node:
        client = patient(node.address, transport=transport)
        names = [key(), key()]
        put(client, dict.fromkeys(names, b"bytes"))

        def kill(at: int, view: memoryview) -> None:
            node.process.kill()
            node.process.wait()

        started = time.monotonic()
        results = client.get_many(names, kill)
        assert {r.outcome for r in results} == {Outcome.UNAVAILABLE}
        assert put(client, {key(): b"x"})[0].outcome is Outcome.UNAVAILABLE
        with pytest.raises(TransferError, match="does not answer"):
            client.exists_many(names)
        assert time.monotonic() - started < 30.0, "a deadline of 60 s was waited for"
        client.close()


def num_pools_mapped() -> int:
    """Of any node, by this process."""
    names = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    links = [os.readlink(name) for name in names if os.path.lexists(name)]
    return sum("memfd:diptych-kv" in link for link in links)


@pytest.mark.parametrize("way", ["put", "get"])
def test_the_pool_of_a_store_that_died_is_not_mapped_until_garbage_is_collected(way: str) -> None:
    before = num_pools_mapped()
    with running_node() as node:
        client, name = patient(node.address, transport="memory"), key()
        put(client, {name: b"bytes"})
        assert num_pools_mapped() == before + 1
        node.process.kill()
        node.process.wait()
        gc.collect()
        gc.disable()
        try:
            if way == "put":
                assert put(client, {key(): b"x"})[0].outcome is Outcome.UNAVAILABLE
            else:
                assert get(client, [name])[0][0].outcome is Outcome.UNAVAILABLE
            assert num_pools_mapped() == before
        finally:
            gc.enable()
        client.close()


def test_a_store_that_hangs_costs_one_deadline_and_then_nothing() -> None:
    with running_node() as node:
        deadline_s = 3.0
        client = patient(node.address, timeout_s=deadline_s)
        name = key()
        while not put(client, {name: b"bytes"})[0].stored:
            assert node.process.poll() is None
        node.process.send_signal(signal.SIGSTOP)
        times = []
        for _ in range(3):
            started = time.monotonic()
            assert get(client, [name])[0][0].outcome is Outcome.UNAVAILABLE
            times.append(time.monotonic() - started)
        assert 0.9 * deadline_s < times[0] < 2 * deadline_s
        assert max(times[1:]) < 0.9 * deadline_s
        node.process.send_signal(signal.SIGCONT)
        again_by = time.monotonic() + 60
        while get(client, [name])[1] != {0: b"bytes"}:
            assert time.monotonic() < again_by
            time.sleep(0.05)
        client.close()


def test_a_callers_own_deadline_says_nothing_about_the_store(
    client: StoreClient, node: Node
) -> None:
    before = control(node).GetStats(pb.GetStatsRequest()).num_puts
    slow = PutItem(key(), 5, lambda view: time.sleep(0.5))
    assert client.put_many([slow], timeout_s=0.4)[0].outcome is not Outcome.OK
    assert control(node).GetStats(pb.GetStatsRequest()).num_puts == before
    name = key()
    assert client.put_many([slow], timeout_s=0.0)[0].outcome is Outcome.UNAVAILABLE
    if client._transport == "memory":  # a stream that is out of step takes its time
        assert put(client, {name: b"bytes"})[0].outcome is Outcome.OK


def test_to_a_closed_client_the_store_is_lost(client: StoreClient) -> None:
    name = key()
    put(client, {name: b"bytes"})
    assert get(client, [name])[1]
    results = client.get_many([name], lambda i, view: client.close())
    assert results[0].outcome is Outcome.UNAVAILABLE
    assert put(client, {key(): b"x"})[0].outcome is Outcome.UNAVAILABLE
    client.close()


@pytest.mark.parametrize("flag", ["port", "stream_port", "admin_port"])
def test_a_port_in_use_is_one_clear_line(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start_node({"store": {"pool_bytes": MIB, flag: port}, "redis": {}}, PIPE)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.decode().splitlines() == [
        f"diptych kvstore: cannot listen on 127.0.0.1:{port}: the port is in use by another process"
    ]


def test_a_node_that_nobody_could_find_is_one_clear_line() -> None:
    """It listens on loopback, and the directory through which others find it is elsewhere."""
    settings = {"store": {"pool_bytes": MIB}, "redis": {"redis": "redis://192.0.2.2:6379"}}
    process = start_node(settings, PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    (line,) = errors.decode().splitlines()
    assert "others cannot reach this process: it listens on 127.0.0.1" in line
    assert "--host 0.0.0.0" in line


@pytest.mark.parametrize(
    "settings",
    [
        {"pool_bytes": 0},
        {"eviction_high_watermark": 1.5},
        {"eviction_step": 0.95},
        {"put_ttl_s": 0.0},
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        KVStoreConfig(**settings)


def test_a_clean_stop_leaves_nothing_behind() -> None:
    with running_node() as node:
        name = control(node).GetNode(pb.GetNodeRequest()).memory_socket
        assert name in Path("/proc/net/unix").read_text()
        node.process.terminate()
        assert node.process.wait(60) == 0
        assert name not in Path("/proc/net/unix").read_text()


def test_metrics_show_what_happened(node: Node) -> None:
    client = patient(node.address, transport="stream")
    put(client, {key(): b"x" * 100})
    client.close()
    _, text = node.get("/metrics")
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in "#")
    assert float(lines["diptych:kvstore_puts_total"]) >= 1
    assert float(lines["diptych:kvstore_stream_received_bytes_total"]) >= 100
    assert float(lines["diptych:kvstore_pool_bytes"]) == 8 * MIB


def test_statuses_have_the_numbers_of_the_contract() -> None:
    ours = {f"ITEM_STATUS_{s.name}": int(s) for s in Status}
    assert {"ITEM_STATUS_UNSPECIFIED": 0, **ours} == dict(pb.ItemStatus.items())


def test_redis_missing_at_start_is_not_ready_with_a_reason_and_lost_later_is_no_harm(
    tmp_path: Path,
) -> None:
    link = tmp_path / "redis.sock"
    redis = {"redis": f"unix://{link}", "heartbeat_s": 0.1, "liveness_s": 5.0}
    with running_node(redis=redis) as node:
        assert "does not answer" in node.until_ready(503)
        server = EmbeddedRedis()
        link.symlink_to(server.start().removeprefix("unix://"))
        node.until_ready()
        client = patient(node.address)
        name = key()
        put(client, {name: b"bytes"})
        server.kill()
        server.stop()
        time.sleep(0.3)
        assert node.get("/readyz")[0] == 200
        assert get(client, [name])[1] == {0: b"bytes"}
        assert put(client, {key(): b"more"})[0].outcome is Outcome.OK
        client.close()
