"""A store client's end of the byte stream (`store_wire`).

Two copies of the kernel and its packets bound a stream. Besides them each byte is looked at once,
for its checksum: bytes that lie together are sent from there, and received where they shall lie
(decision 0016).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence

import xxhash

from diptych.connectors.store_move import Move, finish
from diptych.connectors.store_wire import ANSWER, FRAME, READ, WELCOME, WRITE, hello, wake_bytes
from diptych.connectors.xxh3 import xxh3_64
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb
from diptych.sockets import tune

# Objects are looked at and sent by parts of so much: a core's cache holds it.
_PART_BYTES = 512 << 10


class StreamMover:
    """One connection to the node's byte stream. Threads take turns."""

    has_threads = False

    def __init__(self, connection: socket.socket, pool_bytes: int) -> None:
        self.pool_bytes = pool_bytes
        self._connection = connection
        self._lock = threading.Lock()
        self._scratch = bytearray()
        self._wake_bytes = 1

    @classmethod
    def connect(
        cls, address: str, token: bytes, timeout_s: float, *, pool_bytes: int
    ) -> StreamMover:
        """Connect to `host:port` and show the token.

        Raises:
            OSError: nobody answers there, or the token is refused.
            ValueError, OverflowError: that is no address.
        """
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        try:
            tune(connection)
            connection.sendall(hello(token))
            if connection.recv(1) != WELCOME:
                raise ConnectionError("the store's stream refused the connection")
        except BaseException:
            connection.close()
            raise
        return cls(connection, pool_bytes)

    def write(
        self, moves: Sequence[Move], until: float, begin_by: float
    ) -> Generator[int | None, None, None]:
        # the node itself refuses what comes too late
        yield from self._write(moves, until)

    def _write(self, moves: Sequence[Move], until: float) -> list[int | None]:
        checksums: list[int | None] = []
        with self._turn(until):
            for move in moves:
                if time.monotonic() >= until:
                    break
                view = move.bytes
                if view is None:
                    view = self._room(move.num_bytes)
                    finish(move.touch(view))
                head = FRAME.pack(WRITE, move.id, move.num_bytes)
                checksums.append(self._send_object(head, view, until))
            for position in range(len(checksums)):
                if self._answer(until)[0] != pb.ITEM_STATUS_OK:
                    checksums[position] = None
        return checksums + [None] * (len(moves) - len(checksums))

    def read(self, moves: Sequence[Move], until: float) -> list[int | None]:
        checksums: list[int | None] = []
        with self._turn(until):
            frames = [FRAME.pack(READ, move.id, move.num_bytes) for move in moves]
            self._send(b"".join(frames), until)
            for move in moves:
                status, num_bytes = self._answer(until)
                if status != pb.ITEM_STATUS_OK:
                    checksums.append(None)
                    continue
                if num_bytes != move.num_bytes:
                    raise TransferError("the store's stream sent another size than was asked for")
                view = self._room(num_bytes) if move.bytes is None else move.bytes
                self._receive(view, until)
                if move.bytes is None:
                    with view.toreadonly() as readonly:
                        finish(move.touch(readonly))
                checksums.append(xxh3_64(view))
        return checksums

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        self._connection.close()

    @contextlib.contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        """Hold the connection; whatever interrupts a batch leaves it out of step, so it ends."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError("the store's stream is busy")
        try:
            yield
        except BaseException:
            self._connection.close()
            raise
        finally:
            self._lock.release()

    def _room(self, num_bytes: int) -> memoryview:
        if len(self._scratch) < num_bytes:
            try:
                self._scratch = bytearray(num_bytes)
            except (MemoryError, OverflowError) as error:
                raise TransferError(f"an object of {num_bytes} bytes has no room here") from error
        return memoryview(self._scratch)[:num_bytes]

    def _answer(self, until: float) -> tuple[int, int]:
        answer = bytearray(ANSWER.size)
        self._receive(memoryview(answer), until)
        status, num_bytes = ANSWER.unpack(answer)
        return status, num_bytes

    def _send(self, data: bytes | memoryview, until: float) -> None:
        self._connection.settimeout(_left(until))
        self._connection.sendall(data)

    def _send_object(self, head: bytes, data: memoryview, until: float) -> int:
        """Send an object, part by part; returns its checksum. Each part is sent right after it was
        looked at: it is in the cache, and the node goes on while the next one is looked at."""
        checksum = xxhash.xxh3_64()
        for at in range(0, data.nbytes, _PART_BYTES):
            part = data[at : at + _PART_BYTES]
            checksum.update(part)
            if at:
                self._send(part, until)
            else:
                self._send_both(head, part, until)
        return checksum.intdigest()

    def _send_both(self, head: bytes, data: memoryview, until: float) -> None:
        """Two pieces in one call: a packet for the head alone would wake the node for nothing."""
        self._connection.settimeout(_left(until))
        sent = self._connection.sendmsg([head, data])
        if sent < len(head):
            self._connection.sendall(head[sent:])
            sent = len(head)
        self._send(data[sent - len(head) :], until)

    def _receive(self, view: memoryview, until: float) -> None:
        while view:
            self._wake_at(wake_bytes(view.nbytes))
            self._connection.settimeout(_left(until))
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the store's stream ended")
            view = view[count:]

    def _wake_at(self, num_bytes: int) -> None:
        """Wait for so many bytes at once; never for more than are certain to come."""
        if num_bytes != self._wake_bytes:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wake_bytes = num_bytes


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the store's stream is too slow")
    return left
