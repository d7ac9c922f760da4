"""One session with a node: leases that are renewed, bytes that are flipped on their way, views."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import pytest

from diptych.connectors.pages import PageObject
from diptych.connectors.store_move import Begun, Move
from diptych.connectors.store_results import GetResult, Outcome, PutItem
from diptych.connectors.store_session import Ahead, ControlCalls, StoreSession
from diptych.connectors.store_settings import StoreSettings
from diptych.connectors.store_transport import MappedMover, open_mover
from diptych.connectors.store_views import leased
from diptych.connectors.stored_objects import StoredObjects
from diptych.connectors.xxh3 import xxh3_64
from diptych.errors import ConfigError, TransferError
from diptych.proto import kvstore_pb2 as pb
from tests.services.test_kvstore import MIB, Node, control, get, key, patient, put, running_node


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node(pool_bytes=64 * MIB) as node:
        yield node


# --- a line that flips a byte


class Flipper:
    """A TCP proxy that flips one bit of the n-th byte it passes on, in one direction."""

    def __init__(self, target: str, at: int, *, to_client: bool) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._at = at
        self._to_client = to_client
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.close()
        self._thread.join(5)

    def _serve(self) -> None:
        with suppress(OSError):
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            with client, server:
                back = threading.Thread(target=self._pass, args=(server, client, self._to_client))
                back.start()
                self._pass(client, server, not self._to_client)
                back.join(5)

    def _pass(self, source: socket.socket, sink: socket.socket, flips: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(65536)):
                if flips and passed <= self._at < passed + len(data):
                    data[self._at - passed] ^= 8
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def session_over(node: Node, at: int, *, to_client: bool) -> Iterator[StoreSession]:
    stub = control(node)
    store = stub.GetNode(pb.GetNodeRequest())
    proxy = Flipper(store.stream_address, at, to_client=to_client)
    store.stream_address = proxy.address
    mover = open_mover(store, "stream", 5.0)
    try:
        yield StoreSession(ControlCalls(stub, 2.0), store.incarnation, mover)
    finally:
        mover.close()
        proxy.close()


def until() -> float:
    return time.monotonic() + 60.0


def read(session: StoreSession, name: bytes) -> GetResult:
    [result] = session.get([name], session.ask_get([name], until()), lambda i, v: None, until())
    return result


def test_a_byte_flipped_on_its_way_to_a_reader_is_seen_and_the_object_stays(node: Node) -> None:
    client = patient(node.address)
    name = key()
    put(client, {name: os.urandom(10_000)})
    with session_over(node, 5_000, to_client=True) as session:
        assert read(session, name).outcome is Outcome.CORRUPT
        assert read(session, name).outcome is Outcome.OK
    assert get(client, [name])[0][0].outcome is Outcome.OK
    client.close()


def test_a_byte_flipped_on_its_way_into_the_store_is_seen_by_the_reader_and_the_object_goes(
    node: Node,
) -> None:
    name, data = key(), os.urandom(10_000)
    with session_over(node, 5_000, to_client=False) as session:
        item = PutItem(name, len(data), lambda view: view.__setitem__(slice(None), data))
        [result] = session.put([item], session.ask_put([item], "", until()), until()).finish()
        assert result.outcome is Outcome.OK  # nobody has looked at the bytes yet
        assert read(session, name).outcome is Outcome.CORRUPT
        assert read(session, name).outcome is Outcome.NOT_FOUND


# --- leases


def test_a_long_read_renews_its_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.connectors.store_session._READ_BYTES", 1)
    objects = {key(): os.urandom(1000) for _ in range(8)}

    def slowly(index: int, view: memoryview) -> None:
        time.sleep(0.4)

    with running_node(lease_s=2.4) as node:
        client = patient(node.address, transport="stream")
        put(client, objects)
        # 3.2 s under leases of 2.4 s
        results = client.get_many(list(objects), slowly)
        assert {result.outcome for result in results} == {Outcome.OK}
        client.close()


def test_leases_that_were_taken_ahead_are_renewed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.connectors.store_client._BATCH_ITEMS", 4)
    objects = {key(): os.urandom(1000) for _ in range(12)}

    def slowly(index: int, view: memoryview) -> None:
        time.sleep(0.4)

    with running_node(lease_s=2.4) as node:
        client = patient(node.address, transport="memory")
        put(client, objects)
        # each batch takes 1.6 s under leases that began as long before it
        results = client.get_many(list(objects), slowly)
        assert {result.outcome for result in results} == {Outcome.OK}
        client.close()


def test_views_show_objects_in_place_for_as_long_as_the_lease_holds(node: Node) -> None:
    client = patient(node.address, transport="memory")
    name = key()
    put(client, {name: b"in place"})
    with leased(client, [name, key()]) as found:
        assert found.views[1] is None
        assert found.views[0] is not None
        assert bytes(found.views[0]) == b"in place"
        assert found.views[0].readonly
        assert found.verify()
        assert control(node).Release(pb.ReleaseRequest(lease_ids=found.lease_ids))
        assert not found.verify()
    client.close()


def test_without_the_pool_there_are_no_views(node: Node) -> None:
    client = patient(node.address, transport="stream")
    with pytest.raises(TransferError, match="mapped"), leased(client, [key()]):
        pass
    client.close()


# --- several threads


def moves(fail_at: int = -1, slow_s: float = 0.0) -> tuple[list[Move], list[int]]:
    done: list[int] = []

    def touch(number: int, view: memoryview) -> None:
        time.sleep(slow_s if number % 3 else 0.0)
        if number == fail_at:
            raise ValueError("no bytes")
        view[:] = bytes([number]) * len(view)
        done.append(number)

    size = MIB
    made = [Move(n, n * size, size, partial(partial, touch, n)) for n in range(20)]
    return made, done


def threaded_mover(monkeypatch: pytest.MonkeyPatch) -> tuple[MappedMover, mmap.mmap]:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    pool = mmap.mmap(-1, 20 * MIB)
    return MappedMover(pool), pool


def test_large_batches_are_moved_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, pool = threaded_mover(monkeypatch)
    work, done = moves()
    later = time.monotonic() + 60
    checksums = list(mover.write(work, later, later))
    assert sorted(done) == list(range(20))
    assert checksums == mover.read([_reading(m) for m in work], later)
    assert [pool[n * MIB] for n in range(20)] == list(range(20))
    mover.close()


def _reading(move: Move) -> Move:
    return Move(move.id, move.offset, move.num_bytes, lambda view: None)


def test_an_error_in_one_thread_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, _ = threaded_mover(monkeypatch)
    work, done = moves(fail_at=0, slow_s=0.02)
    later = time.monotonic() + 60
    with pytest.raises(ValueError, match="no bytes"):
        list(mover.write(work, later, later))
    count = len(done)
    time.sleep(0.1)
    # room that is given back now is touched by nobody
    assert len(done) == count == 19
    mover.close()


def test_copies_that_go_on_by_themselves_are_begun_in_order_and_looked_at_once_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a write the bytes are there when the checksum is taken, of a read they need not be."""
    mover, _ = threaded_mover(monkeypatch)
    here, begun = threading.current_thread(), []
    ended = threading.Event()

    def write(number: int, view: memoryview) -> Begun:
        assert threading.current_thread() is here
        begun.append(number)
        return Begun(lambda: view.__setitem__(slice(None), bytes([number]) * len(view)))

    def read(number: int, view: memoryview) -> Begun:
        begun.append(number)
        return Begun(ended.wait)

    later = time.monotonic() + 600
    work = [Move(n, n * MIB, MIB, partial(write, n)) for n in range(20)]
    with contextlib.closing(mover.write(work, later, later)) as sums:
        checksums = list(sums)
    assert begun == list(range(20))
    assert checksums == [xxh3_64(bytes([n]) * MIB) for n in range(20)]
    ended.set()
    work = [Move(n, n * MIB, MIB, partial(read, n)) for n in range(20)]
    assert mover.read(work, later) == checksums
    mover.close()


def test_who_looks_at_some_of_a_write_waits_for_all_that_was_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mover, _ = threaded_mover(monkeypatch)
    work, done = moves(slow_s=0.02)
    later = time.monotonic() + 600
    with contextlib.closing(mover.write(work, later, later)) as sums:
        next(sums)
    assert len(done) == 20
    mover.close()


def test_what_is_left_of_a_write_is_not_begun_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    mover, _ = threaded_mover(monkeypatch)
    until, here = time.monotonic() + 60, threading.current_thread()
    work = [Move(n, n * MIB, MIB, lambda view: partial(pytest.fail, "late")) for n in range(20)]
    in_time = lambda: 0.0 if threading.current_thread() is here else until  # noqa: E731
    monkeypatch.setattr("time.monotonic", in_time)
    assert list(mover.write(work, until, until)) == [None] * 20
    mover.close()


def test_calls_of_many_batches_keep_their_order(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.connectors.store_client._BATCH_ITEMS", 7)
    client = patient(node.address)
    objects = {key(): os.urandom(500) for _ in range(60)}
    assert {r.outcome for r in put(client, objects)} == {Outcome.OK}
    _, taken = get(client, list(objects))
    assert [taken[i] for i in range(60)] == list(objects.values())
    assert control(node).GetStats(pb.GetStatsRequest()).num_puts == 0
    client.close()


# --- what was stored a moment ago


def test_what_was_stored_lately_is_known_and_is_forgotten_in_time() -> None:
    now = [0.0]
    stored = StoredObjects(lambda: now[0], trusted_s=10.0)
    page = PageObject(key(), 64, 128)
    stored.note(page.key, 77, 1000)
    known = stored.get(page, 1000)
    assert known is not None
    assert (known.checksum, known.start_token, known.end_token) == (77, 64, 128)
    assert stored.get(page, 999) is None
    now[0] = 10.1
    assert stored.get(page, 1000) is None
    stored.note(page.key, 77, 1000)
    stored.forget(page.key)
    assert stored.get(page, 1000) is None


def test_what_is_not_told_any_more_takes_no_memory() -> None:
    now = [0.0]
    stored = StoredObjects(lambda: now[0], trusted_s=10.0)
    for step in range(100):
        now[0] = float(step)
        stored.note(key(), 77, 1000)
    assert len(stored) == 11


def test_without_trust_nothing_is_known() -> None:
    stored = StoredObjects(lambda: 0.0, trusted_s=0.0)
    page = PageObject(key(), 0, 64)
    stored.note(page.key, 77, 1000)
    assert stored.get(page, 1000) is None


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "kvstore"),
        ({"kvstore": 3}, "kvstore must be a str"),
        ({"kvstore": "a:1", "read_prefix": "yes"}, "read_prefix must be a bool"),
        ({"kvstore": "a:1", "lookup_timeout_s": True}, "lookup_timeout_s must be a float"),
    ],
    ids=str,
)
def test_settings_of_a_wrong_kind_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StoreSettings.of(settings)


def test_a_whole_number_of_seconds_will_do() -> None:
    assert StoreSettings.of({"kvstore": "a:1", "lookup_timeout_s": 1}).lookup_timeout_s == 1


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_a_reader_goes_on_as_long_as_something_comes(
    node: Node, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its turns asks for what is left, and each is verified."""
    client, writer = patient(node.address, transport=transport), patient(node.address)
    keys, taken = [key() for _ in range(4)], dict[int, bytes]()
    asked: list[int] = []
    ask_get = StoreSession.ask_get

    def note(session: StoreSession, keys: Sequence[bytes], *more: float) -> Ahead:
        asked.append(len(keys))
        return ask_get(session, keys, *more)

    def take(index: int, view: memoryview) -> None:
        taken[index] = bytes(view)
        if index + 1 < len(keys):
            put(writer, {keys[index + 1]: b"%d" % (index + 1)})

    monkeypatch.setattr(StoreSession, "ask_get", note)
    put(client, {keys[0]: b"0"})
    results = client.get_many(keys, take, wait_s=0.5, goes_on=lambda: len(taken) < 3)
    while not all(r.outcome is Outcome.OK for r in results):  # a turn may have come up empty
        results = client.get_many(keys, take, wait_s=0.5, goes_on=lambda: True)
    assert taken == {n: b"%d" % n for n in range(4)}
    assert asked[:2] == [4, 3]
    only = client.get_many([keys[0], key()], take, wait_s=0.5, goes_on=lambda: False)
    assert [r.outcome for r in only] == [Outcome.OK, Outcome.NOT_FOUND]
    client.close()
    writer.close()
