"""A store client's end of the byte stream (`store_wire`).

The sender's core is what bounds a stream: a kernel's copy of each byte, and its packets. So nothing
else happens there that need not: bytes are sent from where they lie and received where they shall
lie, a thread of its own computes the checksums meanwhile, and the reader is woken by half megabytes
(decision 0016).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import xxhash

from diptych.connectors.store_move import Move
from diptych.connectors.store_wire import ANSWER, FRAME, READ, WELCOME, WRITE, hello, wake_bytes
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb

# Below this the hand-over to a thread costs more than the checksum.
_THREADED_BYTES = 512 << 10
# One is gathered or received while the checksum of the other is computed.
_NUM_ROOMS = 2


class Checksums:
    """The xxh3-64 of each object of a batch, in order; large ones by a thread, meanwhile."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._sums: list[int | Future[int] | None] = []
        self._futures: list[Future[int]] = []

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, view: memoryview) -> Future[int] | None:
        """The next object. Its bytes must stay until the future is done, if there is one."""
        future = None
        if view.nbytes >= _THREADED_BYTES:
            with contextlib.suppress(RuntimeError):  # closed meanwhile, which the socket will say
                future = self._threads.submit(xxhash.xxh3_64_intdigest, view)
        if future is None:
            self._sums.append(xxhash.xxh3_64_intdigest(view))
        else:
            self._sums.append(future)
            self._futures.append(future)
        return future

    def skip(self) -> None:
        """The next object was not moved."""
        self._sums.append(None)

    def void(self, position: int) -> None:
        """The object at this position was not moved after all."""
        self._sums[position] = None

    def settle(self) -> None:
        """Wait until nothing reads bytes any more."""
        wait(self._futures)

    def results(self) -> list[int | None]:
        """All of them; None for what was not moved."""
        return [sum_.result() if isinstance(sum_, Future) else sum_ for sum_ in self._sums]


class Rooms:
    """Memory for objects that have no place of their own on this side; rooms take turns."""

    def __init__(self) -> None:
        self._rooms = [bytearray() for _ in range(_NUM_ROOMS)]
        self._users: list[Future[int] | None] = [None] * _NUM_ROOMS
        self._turn = 0

    def next(self, num_bytes: int) -> memoryview:
        """A room that nothing reads any more."""
        self._turn = (self._turn + 1) % _NUM_ROOMS
        user = self._users[self._turn]
        if user is not None:
            wait([user])
            self._users[self._turn] = None
        if len(self._rooms[self._turn]) < num_bytes:
            self._rooms[self._turn] = bytearray(num_bytes)
        return memoryview(self._rooms[self._turn])[:num_bytes]

    def busy_with(self, user: Future[int] | None) -> None:
        """What still reads the room given last."""
        self._users[self._turn] = user


class StreamMover:
    """One connection to the node's byte stream. Threads take turns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._rooms = Rooms()
        self._threads = ThreadPoolExecutor(1, "kv-checksum")
        self._wake_bytes = 1

    @classmethod
    def connect(cls, address: str, token: bytes, timeout_s: float) -> StreamMover:
        """Connect to `host:port` and show the token."""
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(hello(token))
            if connection.recv(1) != WELCOME:
                raise ConnectionError("the store's stream refused the connection")
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    def write(self, moves: Sequence[Move], until: float, begin_by: float) -> list[int | None]:
        # the node itself refuses what comes too late
        with self._turn(until) as checksums:
            for move in moves:
                if time.monotonic() >= until:
                    break
                self._write(move, checksums, until)
            for position in range(len(checksums)):
                if self._answer(until)[0] != pb.ITEM_STATUS_OK:
                    checksums.void(position)
        return checksums.results() + [None] * (len(moves) - len(checksums))

    def _write(self, move: Move, checksums: Checksums, until: float) -> None:
        head = FRAME.pack(WRITE, move.id, move.num_bytes)
        if move.bytes is not None:
            checksums.add(move.bytes)
            self._send_both(head, move.bytes, until)
            return
        view = self._rooms.next(move.num_bytes)
        move.touch(view)
        self._rooms.busy_with(checksums.add(view))
        self._send_both(head, view, until)

    def read(self, moves: Sequence[Move], until: float) -> list[int | None]:
        with self._turn(until) as checksums:
            frames = [FRAME.pack(READ, move.id, move.num_bytes) for move in moves]
            self._send(b"".join(frames), until)
            for move in moves:
                status, num_bytes = self._answer(until)
                if status != pb.ITEM_STATUS_OK:
                    checksums.skip()
                    continue
                if num_bytes != move.num_bytes:
                    raise TransferError("the store's stream sent another size than was asked for")
                self._read(move, checksums, until)
        return checksums.results()

    def _read(self, move: Move, checksums: Checksums, until: float) -> None:
        if move.bytes is not None:
            self._receive(move.bytes, until)
            checksums.add(move.bytes)
            return
        view = self._rooms.next(move.num_bytes)
        self._receive(view, until)
        self._rooms.busy_with(checksums.add(view))
        with view.toreadonly() as readonly:
            move.touch(readonly)

    def pools(self) -> list[memoryview]:
        return []

    def close(self) -> None:
        self._connection.close()
        self._threads.shutdown(wait=False)

    @contextlib.contextmanager
    def _turn(self, until: float) -> Iterator[Checksums]:
        """Hold the connection; whatever interrupts a batch leaves it out of step, so it ends."""
        if not self._lock.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError("the store's stream is busy")
        checksums = Checksums(self._threads)
        try:
            yield checksums
        except BaseException:
            self._connection.close()
            raise
        finally:
            # the caller's memory is its own again once this is left
            checksums.settle()
            self._lock.release()

    def _answer(self, until: float) -> tuple[int, int]:
        answer = bytearray(ANSWER.size)
        self._receive(memoryview(answer), until)
        status, num_bytes = ANSWER.unpack(answer)
        return status, num_bytes

    def _send(self, data: bytes | memoryview, until: float) -> None:
        self._connection.settimeout(_left(until))
        self._connection.sendall(data)

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
