"""The floor under a store's byte stream: the same bytes through a bare socket, and nothing else.

No keys, no index, no checksums, no framing: a blocking TCP connection of this host, the bytes sent
from where they lie and received where they shall lie. What a store takes beyond this is its own.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray

_PUT, _GET, _DONE = b"p", b"g", b"."


class SocketFloor:
    """As a `Subject`; the other process keeps one set of bytes and no names."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def put(self, keys: Sequence[bytes], source: NDArray[np.uint8]) -> None:
        self._begin(_PUT, source)
        for row in source:
            self._connection.sendall(row.data)
        if self._connection.recv(1) != _DONE:
            raise ConnectionError("the bare socket ended")

    def get(self, keys: Sequence[bytes], target: NDArray[np.uint8]) -> None:
        self._begin(_GET, target)
        for row in target:
            _receive(self._connection, row.data)

    def forget(self, keys: Sequence[bytes]) -> None:
        return

    def _begin(self, op: bytes, buffer: NDArray[np.uint8]) -> None:
        count, num_bytes = buffer.shape
        head = b"".join(n.to_bytes(8, "little") for n in (count, num_bytes))
        self._connection.sendall(op + head)


@contextlib.contextmanager
def running_floor(num_bytes: int) -> Iterator[SocketFloor]:
    """A process that receives, keeps and sends back up to so many bytes."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, num_bytes))
    process.start()
    try:
        with socket.create_connection(("127.0.0.1", ours.recv())) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield SocketFloor(connection)
    finally:
        process.terminate()
        process.join()
        ours.close()
        theirs.close()


def _serve(started: Connection, num_bytes: int) -> None:
    memory = memoryview(bytearray(num_bytes))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        started.send(listener.getsockname()[1])
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = bytearray(17)
    with connection:
        while _receive(connection, memoryview(head)):
            count, size = (int.from_bytes(head[at : at + 8], "little") for at in (1, 9))
            for at in range(count):
                room = memory[at * size : (at + 1) * size]
                if head[:1] == _PUT:
                    _receive(connection, room)
                else:
                    connection.sendall(room)
            if head[:1] == _PUT:
                connection.sendall(_DONE)


def _receive(connection: socket.socket, view: memoryview) -> bool:
    """Fill the view; False where the connection ends."""
    while view:
        count = connection.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True
