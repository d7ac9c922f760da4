"""The control socket beside the engine's: it never waits, and drops what nobody takes."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator

import pytest

from diptych.engine import control_client, control_port
from diptych.engine.control_client import ControlClient
from diptych.engine.control_messages import (
    Control,
    PeerDown,
    PeerLink,
    PeerUp,
    encode_control,
)
from diptych.engine.control_port import ControlPort


@pytest.fixture
def ends() -> Iterator[tuple[ControlPort, socket.socket]]:
    ours, theirs = socket.socketpair()
    port = ControlPort(ours)
    yield port, theirs
    port.close()
    theirs.close()


def test_messages_come_whole_however_they_are_cut(
    ends: tuple[ControlPort, socket.socket],
) -> None:
    port, theirs = ends
    sent = [PeerUp("p", b"cards"), Control("p", b"x" * 5000), PeerDown("p")]
    data = b"".join(map(encode_control, sent))
    got = []
    for at in range(0, len(data), 701):
        theirs.sendall(data[at : at + 701])
        got += port.receive()
    assert got == sent
    assert port.receive() == []
    theirs.close()
    assert port.receive() == []
    assert port.closed
    port.send(Control("p", b"nobody hears it"))


def test_what_the_service_does_not_read_is_dropped_but_not_news_of_links(
    ends: tuple[ControlPort, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_port, "MAX_UNSENT_BYTES", 1 << 16)
    port, theirs = ends
    for _ in range(2000):
        port.send(Control("p", b"y" * 1000))
    assert port.num_dropped
    assert port.has_unsent
    port.send(PeerLink("p", True, "shm", 9.0))
    received = bytearray()
    while port.has_unsent:
        received += theirs.recv(1 << 20)
        port.flush()
    received += theirs.recv(1 << 20)
    assert received.endswith(encode_control(PeerLink("p", True, "shm", 9.0)))
    assert len(received) < 2000 * 1000


@pytest.mark.parametrize(
    "rubbish",
    [struct.pack("<I", 1 << 31), struct.pack("<I", 3) + b"abc"],
    ids=["a length that cannot be", "no message"],
)
def test_what_cannot_be_understood_ends_the_connection(
    ends: tuple[ControlPort, socket.socket], rubbish: bytes
) -> None:
    """Not the turn in which it came, nor every turn after it: deadlines are looked at in each."""
    port, theirs = ends
    theirs.sendall(encode_control(PeerDown("p1")))
    assert port.receive() == [PeerDown("p1")]
    theirs.sendall(rubbish + encode_control(PeerDown("p2")))
    assert port.receive() == []
    assert port.closed
    assert port.receive() == []
    port.send(PeerLink("p", False))
    assert theirs.recv(64) == b""


@pytest.mark.anyio
async def test_the_services_end_sends_without_waiting_and_ends_with_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "MAX_UNSENT_BYTES", 1 << 16)
    ours, theirs = socket.socketpair()
    client = ControlClient()
    client.send(Control("p", b"before it is open"))
    await client.open(ours)
    port = ControlPort(theirs)
    for _ in range(3000):
        client.send(Control("p", b"z" * 1000))
    client.send(PeerDown("p"))
    assert 0 < client.num_dropped < 3000
    port.send(Control("p", b"answer"))
    messages = client.messages()
    assert await anext(messages) == Control("p", b"answer")
    got = []
    async with asyncio.timeout(60):
        while PeerDown("p") not in got:
            got += port.receive()
            await asyncio.sleep(0)
    assert len(got) == 3001 - client.num_dropped
    port.close()
    assert [message async for message in messages] == []
    await client.close()
    client.send(PeerDown("p"))
