"""The two ways a store client moves bytes: the mapped pool, and the byte stream (`store_wire`)."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

from diptych.connectors.sealed_memory import map_sealed
from diptych.connectors.store_move import Begun, Move, finish
from diptych.connectors.store_stream import StreamMover
from diptych.connectors.store_wire import POOL_SIZE, boot_id, hello, socket_name
from diptych.connectors.xxh3 import xxh3_64
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb

_log = logging.getLogger(__name__)

# what is left of a touch, its view, until when it may be begun
_Ending = Callable[[object, memoryview, float], int | None]

# One core hashes slower than memory is: an object a thread. Of a host's cores two engines may use
# so many each, and more than these gain nothing.
_MAX_HASHERS = 12
_SHARE_OF_CORES = 0.375
_THREADED_BYTES = 16 << 20


class Mover(Protocol):
    """Moves batches. Each result is the xxh3-64 of the bytes, or None for an object that was not
    moved: the time was over, or the node refused. Times are on the monotonic clock; no write into
    mapped memory begins after `begin_by`. The results of a write come in order, as each is there;
    its iterator is to be closed, after which nothing is written.

    Raises:
        OSError: the node is gone or too slow (TimeoutError); the mover is of no use any more.
        TransferError: the node does not keep to the protocol.

    Attributes:
        pool_bytes: where the node's objects lie: none is beyond it.
        has_threads: whether threads of its own compute checksums, on a host with cores to spare.
    """

    pool_bytes: int
    has_threads: bool

    def write(
        self, moves: Sequence[Move], until: float, begin_by: float
    ) -> Generator[int | None, None, None]: ...
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
        TransferError: `memory` is asked for and the node is on another host; or the node does not
            keep to the protocol.
    """
    try:
        return _open(node, transport, timeout_s)
    except (ValueError, OverflowError) as error:
        raise TransferError(f"it has an address that is none: {error}") from error


def _open(node: pb.StoreNode, transport: str, timeout_s: float) -> Mover:
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
    return StreamMover.connect(
        node.stream_address, node.access_token, timeout_s, pool_bytes=node.pool_bytes
    )


class MappedMover:
    """The node's pool, mapped. Threads may use it at once; on a large host it uses some itself."""

    def __init__(self, pool: mmap.mmap) -> None:
        self._view = memoryview(pool)
        self.pool_bytes = self._view.nbytes
        count = min(_MAX_HASHERS, int((os.cpu_count() or 1) * _SHARE_OF_CORES))
        self._threads = ThreadPoolExecutor(count, "kv-copy") if count > 1 else None
        self.has_threads = self._threads is not None

    @classmethod
    def connect(cls, address: str, token: bytes, timeout_s: float) -> MappedMover:
        """Fetch the memfd from the unix socket and map it.

        Raises:
            OSError: the socket gives none.
            TransferError: the node could shrink it under us, or it is smaller than it says.
        """
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(socket_name(address))
            connection.sendall(hello(token))
            data, fds, _, _ = socket.recv_fds(connection, POOL_SIZE.size, 1)
        try:
            if len(data) != POOL_SIZE.size or len(fds) != 1:
                raise ConnectionError("the store refused its memory")
            return cls(map_sealed(fds[0], POOL_SIZE.unpack(data)[0], "the store's memory"))
        finally:
            for fd in fds:
                os.close(fd)

    def write(
        self, moves: Sequence[Move], until: float, begin_by: float
    ) -> Generator[int | None, None, None]:
        return self._move(_written, moves, self._view, min(until, begin_by))

    def read(self, moves: Sequence[Move], until: float) -> list[int | None]:
        return list(self._move(_read, moves, self._view.toreadonly(), until))

    def pools(self) -> list[memoryview]:
        return [self._view]

    def _move(
        self, end: _Ending, moves: Sequence[Move], pool: memoryview, until: float
    ) -> Generator[int | None, None, None]:
        num_bytes = sum(move.num_bytes for move in moves)
        if self._threads is None or num_bytes < _THREADED_BYTES or len(moves) < 2:
            for move in moves:
                yield _one(end, move, pool, until)
            return
        begun: list[tuple[object, memoryview] | None] = []
        futures: list[Future[int | None]] = []
        try:
            # all before any thread is woken: who begins copies has the interpreter for himself
            for move in moves:
                begun.append(_begin(move, pool, until))
            for each in begun:
                futures.append(self._threads.submit(_end, end, each, until))
            for future in futures:
                yield future.result()
        finally:
            # an error of one must not leave others at work on room that is given back
            wait(futures)
            for each in begun[len(futures) :]:
                if each is not None and isinstance(each[0], Begun):
                    each[0].wait()

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the pool, read-only."""
        return self._view[offset : offset + num_bytes].toreadonly()

    def close(self) -> None:
        """The mapping goes with its last user: another thread may be copying."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)


def _begin(move: Move, pool: memoryview, until: float) -> tuple[object, memoryview] | None:
    """What is left of a move, with its view; None: it is too late for it."""
    if time.monotonic() >= until:
        return None
    view = pool[move.offset : move.offset + move.num_bytes]
    return move.touch(view), view


def _end(end: _Ending, begun: tuple[object, memoryview] | None, until: float) -> int | None:
    return None if begun is None else end(*begun, until)


def _one(end: _Ending, move: Move, pool: memoryview, until: float) -> int | None:
    if time.monotonic() >= until:
        return None
    with pool[move.offset : move.offset + move.num_bytes] as view:
        return end(move.touch(view), view, until)


def _written(left: object, view: memoryview, until: float) -> int | None:
    """The checksum of a write, of which this is left; None: it was too late to go on with it."""
    if not isinstance(left, Begun) and callable(left) and time.monotonic() >= until:
        return None
    finish(left)
    return xxh3_64(view)


def _read(left: object, view: memoryview, until: float) -> int:
    """The checksum of a read. A copy that goes on by itself does so meanwhile: both look at the
    same bytes, and the lease says afterwards that they stayed."""
    if not isinstance(left, Begun):
        finish(left)
    checksum = xxh3_64(view)
    if isinstance(left, Begun):
        left.wait()
    return checksum
