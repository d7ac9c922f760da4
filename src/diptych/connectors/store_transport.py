"""The two ways a store client moves bytes: the mapped pool, and the byte stream (`store_wire`)."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

from diptych.connectors.sealed_memory import map_sealed
from diptych.connectors.store_move import Move
from diptych.connectors.store_stream import StreamMover
from diptych.connectors.store_wire import POOL_SIZE, boot_id, hello, socket_name
from diptych.connectors.xxh3 import xxh3_64
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb

_log = logging.getLogger(__name__)

# One core copies and hashes slower than memory is: an object a thread. More than these gain
# nothing, and fewer where the host has not four cores for each.
_MAX_COPIERS = 8
_THREADED_BYTES = 16 << 20


class Mover(Protocol):
    """Moves batches. Each result is the xxh3-64 of the bytes, or None for an object that was not
    moved: the time was over, or the node refused. Times are on the monotonic clock; no write into
    mapped memory begins after `begin_by`. A read's `touch` may only begin to take the bytes: what
    it returns is called for the end, while the view holds, after the checksum.

    Raises:
        OSError: the node is gone or too slow (TimeoutError); the mover is of no use any more.
        TransferError: the node does not keep to the protocol.

    Attributes:
        pool_bytes: where the node's objects lie: none is beyond it.
    """

    pool_bytes: int

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
        count = min(_MAX_COPIERS, (os.cpu_count() or 1) // 4)
        self._threads = ThreadPoolExecutor(count, "kv-copy") if count > 1 else None

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

    def write(self, moves: Sequence[Move], until: float, begin_by: float) -> list[int | None]:
        return self._all(self._write, moves, self._view, min(until, begin_by))

    def read(self, moves: Sequence[Move], until: float) -> list[int | None]:
        return self._all(self._read, moves, self._view.toreadonly(), until)

    def pools(self) -> list[memoryview]:
        return [self._view]

    def _all(
        self,
        one: Callable[[Move, memoryview], int],
        moves: Sequence[Move],
        pool: memoryview,
        until: float,
    ) -> list[int | None]:
        def in_time(move: Move) -> int | None:
            if time.monotonic() >= until:
                return None
            with pool[move.offset : move.offset + move.num_bytes] as view:
                return one(move, view)

        num_bytes = sum(move.num_bytes for move in moves)
        if self._threads is None or num_bytes < _THREADED_BYTES or len(moves) < 2:
            return [in_time(move) for move in moves]
        futures = [self._threads.submit(in_time, move) for move in moves]
        # an error of one must not leave others at work on room that is given back
        wait(futures)
        return [future.result() for future in futures]

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Bytes of the pool, read-only."""
        return self._view[offset : offset + num_bytes].toreadonly()

    @staticmethod
    def _write(move: Move, view: memoryview) -> int:
        move.touch(view)
        return xxh3_64(view)

    @staticmethod
    def _read(move: Move, view: memoryview) -> int:
        """A copy that goes on by itself goes on meanwhile: both look at the same bytes, and the
        lease says afterwards that they stayed."""
        end = move.touch(view)
        checksum = xxh3_64(view)
        if callable(end):
            end()
        return checksum

    def close(self) -> None:
        """The mapping goes with its last user: another thread may be copying."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
