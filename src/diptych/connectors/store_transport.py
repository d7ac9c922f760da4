"""The two ways a store client moves bytes: the mapped pool, and the byte stream (`store_wire`)."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import xxhash

from diptych.connectors.store_wire import (
    ANSWER,
    FRAME,
    POOL_SIZE,
    READ,
    WELCOME,
    WRITE,
    boot_id,
    hello,
    socket_name,
)
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb

_log = logging.getLogger(__name__)

# One core copies and hashes slower than memory is; more than these gain nothing.
_MAX_COPIERS = 4
_THREADED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Move:
    """One object on its way. `id` is that of the put or lease; `touch` writes or reads the view."""

    id: int
    offset: int
    num_bytes: int
    touch: Callable[[memoryview], object]


class Mover(Protocol):
    """Moves batches. Each result is the xxh3-64 of the bytes, or None for an object that was not
    moved: the time was over, or the node refused. Times are on the monotonic clock; no write into
    mapped memory begins after `begin_by`.

    Raises:
        OSError: the node is gone or too slow (TimeoutError); the mover is of no use any more.
        TransferError: the node does not keep to the protocol.
    """

    def write(self, moves: Sequence[Move], until: float, begin_by: float) -> list[int | None]: ...
    def read(self, moves: Sequence[Move], until: float) -> list[int | None]: ...
    def pools(self) -> list[memoryview]:
        """What of the node's memory is mapped, whole and writable."""
        ...

    def close(self) -> None: ...


def open_mover(node: pb.StoreNode, transport: str, timeout_s: float) -> Mover:
    """Map the pool where the node is on this host, else connect to its stream.

    Args:
        transport: auto, memory or stream.

    Raises:
        OSError: the node cannot be reached that way.
        TransferError: `memory` is asked for and the node is on another host.
    """
    here = bool(node.memory_socket) and node.boot_id == boot_id() != ""
    if transport == "memory" and not here:
        raise TransferError("the store's memory cannot be mapped: it is on another host")
    if here and transport != "stream":
        try:
            return MappedMover.connect(node.memory_socket, node.access_token, timeout_s)
        except OSError as error:
            if transport == "memory":
                raise
            # another container of the same host, with a network of its own
            _log.info("the store's memory cannot be mapped (%s); using its stream", error)
    return StreamMover.connect(node.stream_address, node.access_token, timeout_s)


class MappedMover:
    """The node's pool, mapped. Threads may use it at once; on a large host it uses some itself."""

    def __init__(self, pool: mmap.mmap) -> None:
        self._view = memoryview(pool)
        count = min(_MAX_COPIERS, (os.cpu_count() or 1) // 4)
        self._threads = ThreadPoolExecutor(count, "kv-copy") if count > 1 else None

    @classmethod
    def connect(cls, address: str, token: bytes, timeout_s: float) -> MappedMover:
        """Fetch the memfd from the unix socket and map it."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(socket_name(address))
            connection.sendall(hello(token))
            data, fds, _, _ = socket.recv_fds(connection, POOL_SIZE.size, 1)
        try:
            if len(data) != POOL_SIZE.size or len(fds) != 1:
                raise ConnectionError("the store refused its memory")
            return cls(mmap.mmap(fds[0], POOL_SIZE.unpack(data)[0]))
        finally:
            for fd in fds:
                os.close(fd)

    def write(self, moves: Sequence[Move], until: float, begin_by: float) -> list[int | None]:
        return self._touch_all(moves, self._view, min(until, begin_by))

    def read(self, moves: Sequence[Move], until: float) -> list[int | None]:
        view = self._view.toreadonly()
        return self._touch_all(moves, view, until)

    def pools(self) -> list[memoryview]:
        return [self._view]

    def _touch_all(self, moves: Sequence[Move], pool: memoryview, until: float) -> list[int | None]:
        num_bytes = sum(move.num_bytes for move in moves)
        if self._threads is None or num_bytes < _THREADED_BYTES or len(moves) < 2:
            return [self._touch(move, pool, until) for move in moves]
        futures = [self._threads.submit(self._touch, move, pool, until) for move in moves]
        # an error of one must not leave others at work on room that is given back
        wait(futures)
        return [future.result() for future in futures]

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the pool, read-only."""
        return self._view[offset : offset + num_bytes].toreadonly()

    def _touch(self, move: Move, pool: memoryview, until: float) -> int | None:
        if time.monotonic() >= until:
            return None
        with pool[move.offset : move.offset + move.num_bytes] as view:
            move.touch(view)
            return xxhash.xxh3_64_intdigest(view)

    def close(self) -> None:
        """The mapping goes with its last user: another thread may be copying."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)


class StreamMover:
    """One connection to the node's byte stream. Threads take turns."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._scratch = bytearray()

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
        checksums: list[int | None] = []
        with self._turn(until):
            for move in moves:
                if time.monotonic() >= until:
                    break
                with self._room(move.num_bytes) as view:
                    move.touch(view)
                    checksums.append(xxhash.xxh3_64_intdigest(view))
                    self._send_both(FRAME.pack(WRITE, move.id, move.num_bytes), view, until)
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
                with self._room(num_bytes) as view:
                    self._receive(view, until)
                    with view.toreadonly() as readonly:
                        move.touch(readonly)
                    checksums.append(xxhash.xxh3_64_intdigest(view))
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
            self._scratch = bytearray(num_bytes)
        return memoryview(self._scratch)[:num_bytes]

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
            self._connection.settimeout(_left(until))
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("the store's stream ended")
            view = view[count:]


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("the store's stream is too slow")
    return left
