"""Shared memory on one host: the source's memfd, mapped read-only by the reader.

The source listens on an abstract unix socket. Whoever shows the offer's token gets, as ancillary
data, one read-only descriptor per region that is a memfd. The connection stays open: its end tells
the reader that the source is gone, mapped pages or not. A read is a copy by the reader's own
thread, a slice at a time, so nothing can write once it stopped: every fence holds at once.
"""

from __future__ import annotations

import hmac
import logging
import mmap
import os
import select
import socket
import time

import msgspec
import numpy as np
from numpy.typing import NDArray

from diptych.connectors.sealed_memory import map_sealed
from diptych.connectors.store_wire import TOKEN_BYTES, boot_id, socket_name
from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Memory,
    Offer,
    Peer,
    ReadFailure,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.errors import TransferError
from diptych.log_limit import LogLimit

_log = logging.getLogger(__name__)

_SLICE_BYTES = 8 << 20
_MAX_REGIONS = 8
_MAX_MESSAGE = 4096
_MAX_CLIENTS = 256
_HELLO_DEADLINE_S = 5.0


class ShmPeer(Peer):
    """A source on this host. `views` is None until its descriptors have come."""

    def __init__(self, endpoint: Endpoint, connection: socket.socket) -> None:
        super().__init__(endpoint)
        self.connection = connection
        self.views: dict[str, NDArray[np.uint8]] | None = None


class _ShmRead(ReadHandle):
    """A read, with how far it came."""

    __slots__ = ("at", "into", "region", "runs")
    region: str
    runs: Runs
    into: Memory
    at: int


class ShmTransport(Transport):
    """Reads by copying from mappings of the sources' memory."""

    name = "shm"

    def __init__(self) -> None:
        self._regions: dict[str, Memory] = {}
        self._token = os.urandom(TOKEN_BYTES)
        self._epoll = select.epoll()
        self._listener: socket.socket | None = None
        self._address = ""
        self._clients: dict[int, tuple[socket.socket, float | None]] = {}
        self._reads: set[_ShmRead] = set()
        self._peers: set[ShmPeer] = set()
        self._boot_id = boot_id()
        self._complaints = LogLimit(_log)

    def register(self, region: str, memory: Memory) -> None:
        self._regions[region] = memory

    def offer(self) -> Offer | None:
        memories = self._regions.values()
        if not (self._boot_id and memories) or any(memory.fd is None for memory in memories):
            return None  # the test would pass with the regions that have one
        if self._listener is None:
            self._listen()
        return Offer(transport=self.name, address=self._address, token=self._token)

    def supports(self, endpoint: Endpoint, region: str = KV) -> bool:
        here = endpoint.boot_id == self._boot_id != ""
        return here and endpoint.devices.get(region) == "cpu" and super().supports(endpoint, region)

    def connect(self, endpoint: Endpoint) -> ShmPeer:
        offer = endpoint.offer(self.name)
        if offer is None:
            raise TransferError("the peer shares no memory")
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        peer = ShmPeer(endpoint, connection)
        self._peers.add(peer)
        try:
            # a unix socket takes both at once, or not at all
            connection.connect(socket_name(offer.address))
            connection.send(offer.token)
        except OSError as error:
            self._lose(peer, f"its socket cannot be reached: {error}")
        else:
            self._epoll.register(connection, select.EPOLLIN)
        return peer

    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        assert isinstance(peer, ShmPeer)
        handle = _ShmRead(peer, runs.num_bytes, len(runs), deadline_s)
        handle.region, handle.runs, handle.at = region, runs.split(_SLICE_BYTES), 0
        handle.into = self._regions[into]
        if not handle.admit(runs, peer.region_bytes(region), handle.into.num_bytes):
            return handle
        if peer.gone:
            handle.fail(ReadFailure.PEER_GONE)
        else:
            self._reads.add(handle)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        assert isinstance(handle, _ShmRead)
        assert isinstance(handle.peer, ShmPeer)
        if not handle.ended:
            self._hear(handle.peer)
        if handle.ended:
            self._reads.discard(handle)
        elif time.monotonic() >= handle.deadline_s:
            self._end(handle, ReadFailure.DEADLINE)
        elif handle.peer.views is not None:
            self._advance(handle, handle.peer)
        return handle.state

    def cancel(self, handle: ReadHandle) -> None:
        assert isinstance(handle, _ShmRead)
        self._end(handle, ReadFailure.CANCELLED)

    def fence(self, peer: Peer) -> bool:
        # a copy runs only inside poll, on the thread that asks
        return True

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, ShmPeer)
        for handle in [read for read in self._reads if read.peer is peer]:
            self.cancel(handle)
        self._lose(peer, "disconnected")
        self._peers.discard(peer)

    def progress(self) -> None:
        ready = {fd for fd, _ in self._epoll.poll(0)}
        # a hello that came in time counts, however late we are; who sent none makes room first
        for fd in ready & self._clients.keys():
            self._greet(fd)
        now = time.monotonic()
        for fd, deadline_s in self._strangers():
            if now >= deadline_s:
                self._drop_client(fd)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept()
        for peer in list(self._peers):
            self._hear(peer)

    def waitables(self) -> list[int]:
        return [self._epoll.fileno()]

    def tick_s(self) -> float | None:
        if any(self._ready(read) for read in self._reads):
            return 0.0
        first_s = min((deadline_s for _, deadline_s in self._strangers()), default=None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    def close(self) -> None:
        if self._epoll.closed:
            return
        for handle in list(self._reads):
            self._end(handle, ReadFailure.CLOSED)
        for peer in list(self._peers):
            self.disconnect(peer)
        for fd in list(self._clients):
            self._drop_client(fd)
        if self._listener is not None:
            self._listener.close()
        self._epoll.close()

    # --- reading

    def _ready(self, read: _ShmRead) -> bool:
        assert isinstance(read.peer, ShmPeer)
        return read.peer.views is not None

    def _hear(self, peer: ShmPeer) -> None:
        """Take the descriptors when they come, and notice the end of the source."""
        if peer.gone:
            return
        try:
            data, fds, _, _ = socket.recv_fds(peer.connection, _MAX_MESSAGE, _MAX_REGIONS)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(peer, str(error))
            return
        try:
            if not data or peer.views is not None:
                self._lose(peer, "its socket ended")
            else:
                peer.views = _map(data, fds)
        except (OSError, TransferError, ValueError, RecursionError) as error:
            self._lose(peer, f"its memory cannot be mapped: {error}")
        finally:
            for fd in fds:
                os.close(fd)

    def _advance(self, handle: _ShmRead, peer: ShmPeer) -> None:
        assert peer.views is not None
        source = peer.views.get(handle.region)
        if source is None or len(source) < peer.region_bytes(handle.region):
            self._end(handle, ReadFailure.REFUSED, f"{handle.region} is not shared")
            return
        runs, into, left = handle.runs, handle.into, _SLICE_BYTES
        while handle.at < len(runs) and left > 0:
            at = handle.at
            src, dst, length = int(runs.src[at]), int(runs.dst[at]), int(runs.length[at])
            into.store(dst, source[src : src + length].data)
            handle.at, left = at + 1, left - length
        if handle.at == len(runs):
            handle.state = ReadState.DONE
            self._reads.discard(handle)

    def _end(self, handle: _ShmRead, failure: ReadFailure, detail: str = "") -> None:
        handle.fail(failure, detail)
        self._reads.discard(handle)

    def _lose(self, peer: ShmPeer, why: str) -> None:
        """The source is gone, or let go: nothing of it stays mapped."""
        if peer.gone:
            return
        peer.gone = True
        peer.views = None
        peer.connection.close()
        for handle in [read for read in self._reads if read.peer is peer]:
            self._end(handle, ReadFailure.PEER_GONE, why)

    # --- serving

    def _strangers(self) -> list[tuple[int, float]]:
        """Who has not shown the token yet, with when it must go."""
        return [(fd, due) for fd, (_, due) in self._clients.items() if due is not None]

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        self._address = f"@diptych-kv-{os.getpid()}-{os.urandom(8).hex()}"
        listener.bind(socket_name(self._address))
        listener.listen(64)
        listener.setblocking(False)
        self._epoll.register(listener, select.EPOLLIN)
        self._listener = listener

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        client.setblocking(False)
        if len(self._clients) >= _MAX_CLIENTS:
            self._complaints.warning(
                "more than %d readers of this memory: one is refused", _MAX_CLIENTS
            )
            client.close()
            return
        self._clients[client.fileno()] = client, time.monotonic() + _HELLO_DEADLINE_S
        self._epoll.register(client, select.EPOLLIN)

    def _greet(self, fd: int) -> None:
        """The first message is the token; a second one, or the end, ends the connection."""
        client, deadline_s = self._clients[fd]
        try:
            data = client.recv(TOKEN_BYTES)
            if deadline_s is None or not hmac.compare_digest(data, self._token):
                if data:
                    self._complaints.warning("a reader of this memory came with a wrong token")
                self._drop_client(fd)
                return
            self._send_regions(client)
            self._clients[fd] = client, None
        except OSError:
            self._drop_client(fd)

    def _send_regions(self, client: socket.socket) -> None:
        shared = [(n, m.num_bytes, m.fd) for n, m in self._regions.items() if m.fd is not None]
        # read-only ones: no reader can write here, whatever it does
        fds = [os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC) for _, _, fd in shared]
        try:
            names = msgspec.msgpack.encode([(name, size) for name, size, _ in shared])
            socket.send_fds(client, [names], fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _drop_client(self, fd: int) -> None:
        client, _ = self._clients.pop(fd)
        client.close()


def _map(data: bytes, fds: list[int]) -> dict[str, NDArray[np.uint8]]:
    """The regions as read-only arrays.

    Raises:
        TransferError: sizes and descriptors do not fit, or a region could shrink under us.
    """
    regions = msgspec.msgpack.decode(data, type=list[tuple[str, int]])
    if len(regions) != len(fds):
        raise TransferError(f"{len(regions)} regions came with {len(fds)} descriptors")
    views = {}
    for (name, num_bytes), fd in zip(regions, fds, strict=True):
        mapped = map_sealed(fd, num_bytes, f"region {name}", mmap.ACCESS_READ)
        views[name] = np.frombuffer(mapped, np.uint8)
    return views
