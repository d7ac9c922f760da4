"""The byte stream under clients that stop, lie, or never read; and its sender alone."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator

import pytest
import xxhash

from diptych.connectors.store_results import Outcome, PutItem
from diptych.connectors.store_wire import FRAME, WAKE_BYTES, WRITE, wake_bytes
from diptych.proto import kvstore_pb2 as pb
from diptych.services.kvstore.sending import Outgoing
from tests.services.test_kvstore import (
    MIB,
    Node,
    control,
    key,
    open_stream,
    patient,
    put,
    read_answer,
    running_node,
)

SIZES = (1, WAKE_BYTES - 1, WAKE_BYTES, WAKE_BYTES + 1, 2 * WAKE_BYTES + 9, 2 * MIB)


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node(pool_bytes=32 * MIB) as node:
        yield node


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_bytes_that_lie_together_go_and_come_without_a_callback(node: Node, transport: str) -> None:
    client = patient(node.address, transport=transport)
    objects = {key(): os.urandom(size) for size in SIZES}
    results = client.put_many([PutItem.of(k, memoryview(v)) for k, v in objects.items()])
    assert {r.outcome for r in results} == {Outcome.OK}
    targets = [bytearray(len(data)) for data in objects.values()]
    found = client.get_into(list(objects), [memoryview(target) for target in targets])
    assert {r.outcome for r in found} == {Outcome.OK}
    assert targets == list(objects.values())
    assert [r.checksum for r in found] == [r.checksum for r in results]
    client.close()


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_a_target_of_another_size_is_left_alone(node: Node, transport: str) -> None:
    client = patient(node.address, transport=transport)
    names = [key(), key(), key()]
    put(client, {names[0]: b"first", names[1]: b"other"})
    targets = [bytearray(5), bytearray(6), bytearray(5)]
    found = client.get_into(names, [memoryview(target) for target in targets])
    assert [r.outcome for r in found] == [Outcome.OK, Outcome.INVALID, Outcome.NOT_FOUND]
    assert targets == [b"first", bytes(6), bytes(5)]
    client.close()


def test_targets_belong_to_their_keys_in_later_batches_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diptych.connectors.store_client._BATCH_ITEMS", 3)
    client = patient(node.address, transport="stream")
    objects = {key(): os.urandom(100) for _ in range(8)}
    put(client, objects)
    targets = [bytearray(100) for _ in objects]
    client.get_into(list(objects), [memoryview(target) for target in targets])
    assert targets == list(objects.values())
    client.close()


@pytest.mark.parametrize("sent", [7, WAKE_BYTES + 5])
def test_a_batch_that_breaks_off_shows_nothing_and_leaves_nothing(sent: int) -> None:
    """The first object is whole, the second stops after `sent` bytes, and the client is gone."""
    with running_node(pool_bytes=8 * MIB, put_ttl_s=1.0) as node:
        stub = control(node)
        names = [key(), key(), key()]
        items = [pb.PutItem(key=name, num_bytes=MIB) for name in names]
        reserved = stub.PutStart(pb.PutStartRequest(items=items)).reservations
        stream = open_stream(stub.GetNode(pb.GetNodeRequest()))
        stream.sendall(FRAME.pack(WRITE, reserved[0].put_id, MIB) + bytes(MIB))
        read_answer(stream)
        stream.sendall(FRAME.pack(WRITE, reserved[1].put_id, MIB) + bytes(sent))
        stream.close()
        assert list(stub.Exists(pb.ExistsRequest(keys=names)).present) == [False] * 3
        deadline = time.monotonic() + 60
        while stub.GetStats(pb.GetStatsRequest()).used_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert list(stub.Exists(pb.ExistsRequest(keys=names)).present) == [False] * 3
        client = patient(node.address, transport="stream")
        # all of the room is there again
        whole = {key(): os.urandom(2 * MIB) for _ in range(3)}
        while not all(r.stored for r in put(client, whole)):
            assert time.monotonic() < deadline
        client.close()


def test_a_put_whose_writer_fails_in_the_middle_of_a_batch_shows_nothing(node: Node) -> None:
    client = patient(node.address, transport="stream")
    first, second = key(), key()
    before = control(node).GetStats(pb.GetStatsRequest()).num_puts

    def fail(view: memoryview) -> None:
        raise LookupError("the page is gone")

    items = [PutItem.of(first, memoryview(bytes(MIB))), PutItem(second, MIB, fail)]
    with pytest.raises(LookupError):
        client.put_many(items)
    assert client.exists_many([first, second]) == [False, False]
    deadline = time.monotonic() + 60  # given back at once, or where that was lost by and by
    while control(node).GetStats(pb.GetStatsRequest()).num_puts > before:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {r.outcome for r in put(client, {first: b"again"})} == {Outcome.OK}
    client.close()


@pytest.mark.parametrize("transport", ["memory", "stream"])
def test_bytes_that_are_not_what_they_were_are_not_stored(node: Node, transport: str) -> None:
    client = patient(node.address, transport=transport)
    good, bad, last = key(), key(), key()
    data = memoryview(os.urandom(9000))
    checksum = xxhash.xxh3_64_intdigest(data)
    items = [
        PutItem.of(good, data, checksum),
        PutItem.of(bad, data[:-1], checksum),
        PutItem.of(last, data),
    ]
    results = client.put_many(items)
    assert [r.outcome for r in results] == [Outcome.OK, Outcome.CORRUPT, Outcome.OK]
    assert client.exists_many([good, bad, last]) == [True, False, True]
    client.close()


def test_nobody_waits_for_more_bytes_than_will_come() -> None:
    for left in range(0, 3 * WAKE_BYTES, 4093):
        assert 1 <= wake_bytes(left) <= max(1, left)


@pytest.mark.anyio
async def test_what_a_socket_does_not_take_follows_in_order_and_uncopied() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    pool = memoryview(os.urandom(3 * MIB))
    due = [[memoryview(b"head"), pool], [memoryview(b"tail")], [pool[:5]]]
    failures: list[bool] = []
    out = Outgoing(
        ours.fileno(),
        lambda: due.pop(0) if due else [],
        lambda: out.flush(),
        lambda: failures.append(True),
    )
    out.flush()
    wanted = b"head" + pool.tobytes() + b"tail" + pool[:5].tobytes()
    got = b""
    loop = asyncio.get_running_loop()
    while len(got) < len(wanted):
        got += await asyncio.wait_for(loop.sock_recv(theirs, 1 << 20), 20)
    assert got == wanted
    theirs.close()
    due.append([pool])
    out.flush()
    assert failures == [True]
    out.close()
    out.close()
    ours.close()
    pool.release()  # nothing holds it any more
