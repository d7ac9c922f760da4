"""Both ends of our byte streams watch over connections on which nothing is sent."""

from __future__ import annotations

import time
from pathlib import Path

from diptych.connectors.transports.base import ReadState, Runs
from diptych.connectors.transports.tcp import TcpTransport
from diptych.proto import kvstore_pb2 as pb
from tests.connectors.transport_pair import MIB, Reader, running_source
from tests.services.test_kvstore import key, patient, put, running_node

_ESTABLISHED, _KEEPALIVE = "01", "02"


def watched(port: int) -> list[bool]:
    """For each end of each connection to a port of this host: whether the kernel's keepalive timer
    runs."""
    found = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, _, timer, *_ = line.split()
        if state == _ESTABLISHED and port in (_port(local), _port(remote)):
            found.append(timer.partition(":")[0] == _KEEPALIVE)
    return found


def until_watched(port: int) -> None:
    """What was sent last may still wait to be confirmed, by another timer."""
    until_s = time.monotonic() + 60
    while watched(port) != [True, True]:
        assert time.monotonic() < until_s, watched(port)
        time.sleep(0.01)


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


def test_a_reader_of_kv_that_vanishes_is_let_go() -> None:
    reader = Reader(TcpTransport(), MIB)
    with running_source("s1", MIB, "tcp") as source:
        handle = reader.read(reader.transport.connect(source.endpoint), Runs.of([(0, 0, 64)]))
        assert reader.wait(handle) is ReadState.DONE
        offer = source.endpoint.offer("tcp")
        assert offer is not None
        until_watched(int(offer.address.rpartition(":")[2]))
        reader.close()


def test_a_client_of_the_store_that_vanishes_is_let_go() -> None:
    with running_node() as node:
        client = patient(node.address, transport="stream")
        put(client, {key(): b"something"})
        until_watched(int(client.ask("GetNode", pb.GetNodeRequest()).stream_address.split(":")[1]))
        client.close()
