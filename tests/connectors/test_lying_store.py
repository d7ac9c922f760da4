"""A store node that does not keep to the protocol hurts nobody: it alone is left alone."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from diptych.connectors.sealed_memory import SIZE_SEALS
from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_cluster import FixedNodes, StoreCluster
from diptych.connectors.store_move import Move
from diptych.connectors.store_results import Outcome, PutItem
from diptych.connectors.store_stream import StreamMover
from diptych.connectors.store_transport import MappedMover
from diptych.connectors.store_views import leased
from diptych.connectors.store_wire import ANSWER
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb
from tests.connectors.lying_node import LyingNode, MemoryGiver, served
from tests.services.test_kvstore import Node, key, running_node

POOL_BYTES = 1 << 20


@contextmanager
def memory(
    num_bytes: int = POOL_BYTES, *, said_bytes: int = POOL_BYTES, seals: int = SIZE_SEALS
) -> Iterator[str]:
    fd = os.memfd_create("liar", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    giver = MemoryGiver(fd, said_bytes)
    try:
        yield giver.address
    finally:
        giver.close()
        os.close(fd)


# --- the mapped pool


def test_memory_that_its_node_could_shrink_is_not_mapped() -> None:
    """An access beyond its end would kill this process."""
    with (
        memory(seals=SIZE_SEALS & ~fcntl.F_SEAL_SHRINK) as address,
        pytest.raises(TransferError, match="not sealed at its size"),
    ):
        MappedMover.connect(address, b"t" * 32, 60.0)


@pytest.mark.parametrize("said_bytes", [POOL_BYTES + 1, 0, 1 << 63], ids=["more", "none", "huge"])
def test_memory_of_another_size_than_the_node_says_is_not_mapped(said_bytes: int) -> None:
    with (
        memory(said_bytes=said_bytes) as address,
        pytest.raises(TransferError, match="not sealed at its size"),
    ):
        MappedMover.connect(address, b"t" * 32, 60.0)


def test_sealed_memory_is_mapped() -> None:
    with memory() as address:
        mover = MappedMover.connect(address, b"t" * 32, 60.0)
        assert [view.nbytes for view in mover.pools()] == [POOL_BYTES]
        mover.close()


# --- answers


def more(answers: Any) -> None:
    answers.append(answers[0])


def fewer(answers: Any) -> None:
    del answers[:]


def far(answers: Any) -> None:
    answers[0].placement.offset_bytes = 1 << 40


def beyond(answers: Any) -> None:
    answers[0].placement.offset_bytes = POOL_BYTES - 10


def huge(answers: Any) -> None:
    answers[0].placement.offset_bytes = answers[0].placement.num_bytes = (1 << 64) - 1


def small(answers: Any) -> None:
    answers[0].placement.num_bytes = 1


# method, field of its answer, what is wrong with it, whether it is a put's affair
LIES = [
    *(("PutStart", "reservations", lie, True) for lie in (more, fewer, far, beyond, huge, small)),
    ("PutEnd", "statuses", more, True),
    ("PutEnd", "statuses", fewer, True),
    *(("Get", "results", lie, False) for lie in (more, fewer, far, beyond, huge)),
    ("Release", "statuses", more, False),
    ("Release", "statuses", fewer, False),
]
ITEM = PutItem.of(b"k" * 32, memoryview(b"x" * 100))


@contextmanager
def liar(method: str = "", field: str = "", lie: Callable[[Any], None] = fewer) -> Iterator[Liar]:
    with memory() as address:
        node = LyingNode(address, POOL_BYTES)
        if method:
            honest = getattr(node, method)

            def lying(request: Any, context: Any) -> Any:
                answer = honest(request, context)
                lie(getattr(answer, field))
                return answer

            setattr(node, method, lying)
        with served(node) as at:
            yield Liar(node, at)


class Liar(NamedTuple):
    node: LyingNode
    address: str


@contextmanager
def asking(address: str, transport: str = "auto") -> Iterator[StoreClient]:
    client = StoreClient(address, timeout_s=60.0, call_timeout_s=30.0, transport=transport)
    try:
        yield client
    finally:
        client.close()


def put_one(store: StoreClient | StoreCluster) -> Outcome:
    return store.put_many([ITEM])[0].outcome


def get_one(store: StoreClient | StoreCluster) -> Outcome:
    return store.get_many([ITEM.key], lambda i, view: None)[0].outcome


def test_what_the_lies_below_are_made_of_is_believed() -> None:
    with liar() as (_, address), asking(address) as client:
        assert put_one(client) is Outcome.OK
        assert get_one(client) is Outcome.CORRUPT  # its checksum is none
        assert client.exists_many([ITEM.key]) == [True]
        assert client.usable


@pytest.mark.parametrize(("method", "field", "lie", "puts"), LIES)
def test_an_answer_that_cannot_be_one_makes_its_node_lost_for_a_while(
    method: str, field: str, lie: Callable[[Any], None], puts: bool
) -> None:
    with liar(method, field, lie) as (_, address), asking(address) as client:
        assert (put_one if puts else get_one)(client) is Outcome.UNAVAILABLE
        assert client._breaker._failures == 1


@pytest.mark.parametrize("lie", [more, fewer])
def test_a_node_that_answers_for_more_or_fewer_keys_than_asked_does_not_answer(
    lie: Callable[[Any], None],
) -> None:
    with liar("Exists", "present", lie) as (_, address), asking(address) as client:
        with pytest.raises(TransferError, match="does not answer"):
            client.exists_many([ITEM.key])
        assert client._breaker._failures == 1


def test_leases_that_are_not_answered_for_are_not_verified() -> None:
    with (
        liar("VerifyLease", "statuses", fewer) as (_, address),
        asking(address) as client,
        leased(client, [ITEM.key]) as found,
        pytest.raises(TransferError, match="0 answers"),
    ):
        found.verify(60.0)


@pytest.mark.parametrize("lie", [far, more, fewer])
def test_a_view_of_what_is_not_there_is_not_given(lie: Callable[[Any], None]) -> None:
    with (
        liar("Get", "results", lie) as (_, address),
        asking(address) as client,
        pytest.raises(TransferError, match="does not answer"),
        leased(client, [ITEM.key], 60.0),
    ):
        pass


@pytest.mark.parametrize("address", ["a:b", "127.0.0.1:99999999", "", "a" * 10_000 + ":1"])
def test_a_stream_address_that_is_none_makes_the_node_lost(address: str) -> None:
    with liar() as (node, at), asking(at, "stream") as client:
        node.node.stream_address = address
        assert get_one(client) is Outcome.UNAVAILABLE
        assert client._breaker._failures == 1


def test_an_object_that_no_memory_can_hold_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        mover = StreamMover(ours, 1 << 63)
        theirs.sendall(ANSWER.pack(pb.ITEM_STATUS_OK, 1 << 62))
        later = time.monotonic() + 60
        with pytest.raises(TransferError, match="no room"):
            mover.read([Move(1, 0, 1 << 62, lambda view: None)], later)


def test_the_other_nodes_of_a_store_go_on(node: Node) -> None:
    with liar("PutStart", "reservations", far) as (_, address):
        store = StoreCluster(FixedNodes([address, node.address]), timeout_s=60.0)
        items = [PutItem.of(key(), memoryview(b"y" * 100)) for _ in range(20)]
        assert {r.outcome for r in store.put_many(items)} == {Outcome.OK}
        clients = store.clients()
        assert clients[address]._breaker._failures == 1
        assert clients[node.address].exists_many([i.key for i in items]) == [True] * 20
        store.close()


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with running_node() as node:
        yield node
