"""KV bytes over gRPC, the last resort: pieces of at most 1 MiB, on a channel and port of their own.

A few threads receive. Each takes its read's lock to put one piece where it belongs and leaves once
the read is over; whoever ends a read takes that lock too, so every fence holds at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from diptych.addresses import reachable_address
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
from diptych.connectors.transports.grpc_server import TOKEN_KEY, GrpcServer
from diptych.connectors.transports.tcp_wire import TOKEN_BYTES, TlsFiles, check_tls, tls_mark
from diptych.errors import TransferError
from diptych.proto import transfer_pb2, transfer_pb2_grpc
from diptych.rpc import CHANNEL_OPTIONS

_log = logging.getLogger(__name__)

_THREADS = 4
_ACTIVE_TICK_S = 1e-3

_FAILURES = {
    grpc.StatusCode.DEADLINE_EXCEEDED: ReadFailure.DEADLINE,
    grpc.StatusCode.CANCELLED: ReadFailure.CANCELLED,
    grpc.StatusCode.OUT_OF_RANGE: ReadFailure.REFUSED,
    grpc.StatusCode.NOT_FOUND: ReadFailure.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ReadFailure.REFUSED,
}


class GrpcPeer(Peer):
    """A source, and the channel to it."""

    def __init__(self, endpoint: Endpoint, channel: Any, token: bytes) -> None:
        super().__init__(endpoint)
        self.channel = channel
        self.stub = transfer_pb2_grpc.TransferStub(channel)  # type: ignore[no-untyped-call]
        self.metadata = ((TOKEN_KEY, token.hex()),)


class _GrpcRead(ReadHandle):
    """A read; `lock` is held to write a piece, and to end it."""

    __slots__ = ("call", "lock", "outcome", "over")
    lock: threading.Lock
    over: bool
    call: Any
    outcome: tuple[ReadFailure | None, str] | None


class GrpcTransport(Transport):
    """Reads by gRPC calls, a few at a time.

    Args:
        host, port: where a source listens; port 0 takes a free one.
        advertised_host: what peers are told instead of `host`.
        directory_url: through which they find this process; decides whether loopback will do.
    """

    name = "grpc"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised_host: str | None = None,
        directory_url: str | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._advertised_host, self._directory_url = advertised_host, directory_url
        self._tls = tls
        self._regions: dict[str, Memory] = {}
        self._token = os.urandom(TOKEN_BYTES)
        self._server: GrpcServer | None = None
        self._receivers = ThreadPoolExecutor(_THREADS, thread_name_prefix="kv-grpc")
        self._reads: set[_GrpcRead] = set()
        self._peers: set[GrpcPeer] = set()

    def register(self, region: str, memory: Memory) -> None:
        self._regions[region] = memory

    def offer(self) -> Offer:
        """Listens at the first call.

        Raises:
            ConfigError: the address cannot be bound, or no other host could reach it.
        """
        if self._server is None:
            self._server = GrpcServer(
                self._host, self._port, self._regions, self._token.hex(), self._tls
            )
        address = reachable_address(
            self._advertised_host or self._host, self._server.port, None, self._directory_url
        )
        mark = tls_mark(self._tls)
        return Offer(transport=self.name, address=address, token=self._token, payload=mark)

    def connect(self, endpoint: Endpoint) -> GrpcPeer:
        offer = endpoint.offer(self.name)
        if offer is None:
            raise TransferError("the peer does not serve gRPC")
        check_tls(offer, self._tls)
        if self._tls is None:
            channel = grpc.insecure_channel(offer.address, options=CHANNEL_OPTIONS)
        else:
            credentials = grpc.ssl_channel_credentials(*self._tls.pem())
            name = self._tls.server_name
            options = [("grpc.ssl_target_name_override", name)] if name else []
            channel = grpc.secure_channel(
                offer.address, credentials, options=[*CHANNEL_OPTIONS, *options]
            )
        peer = GrpcPeer(endpoint, channel, offer.token)
        self._peers.add(peer)
        return peer

    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        assert isinstance(peer, GrpcPeer)
        handle = _GrpcRead(peer, runs.num_bytes, len(runs), deadline_s)
        handle.lock, handle.over = threading.Lock(), False
        handle.call, handle.outcome = None, None
        memory = self._regions[into]
        if not handle.admit(runs, peer.region_bytes(region), memory.num_bytes):
            return handle
        if peer.gone:
            handle.fail(ReadFailure.PEER_GONE)
        elif not len(runs):
            handle.state = ReadState.DONE
        else:
            self._reads.add(handle)
            self._receivers.submit(_receive, handle, peer, region, runs, memory)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        assert isinstance(handle, _GrpcRead)
        if handle.ended:
            return handle.state
        if handle.outcome is not None:
            failure, detail = handle.outcome
            if failure is None:
                handle.state = ReadState.DONE
            else:
                handle.peer.gone |= failure is ReadFailure.PEER_GONE
                handle.fail(failure, detail)
            self._reads.discard(handle)
        elif time.monotonic() >= handle.deadline_s:
            self._end(handle, ReadFailure.DEADLINE)
        return handle.state

    def cancel(self, handle: ReadHandle) -> None:
        assert isinstance(handle, _GrpcRead)
        self._end(handle, ReadFailure.CANCELLED)

    def fence(self, peer: Peer) -> bool:
        # a read that ended here has its lock behind it; the others may write
        return not any(read.peer is peer and not read.ended for read in self._reads)

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, GrpcPeer)
        peer.gone = True
        for read in [read for read in self._reads if read.peer is peer]:
            self.cancel(read)
        if peer in self._peers:
            self._peers.discard(peer)
            peer.channel.close()

    def tick_s(self) -> float | None:
        return _ACTIVE_TICK_S if self._reads else None

    def close(self) -> None:
        for read in list(self._reads):
            self._end(read, ReadFailure.CLOSED)
        for peer in list(self._peers):
            self.disconnect(peer)
        self._receivers.shutdown(wait=True, cancel_futures=True)
        if self._server is not None:
            self._server.close()
            self._server = None

    def _end(self, handle: _GrpcRead, failure: ReadFailure) -> None:
        if handle.ended:
            return
        with handle.lock:
            handle.over = True
        if handle.call is not None:
            handle.call.cancel()
        handle.fail(failure)
        self._reads.discard(handle)


def _receive(handle: _GrpcRead, peer: GrpcPeer, region: str, runs: Runs, memory: Memory) -> None:
    """Make the call and put its pieces where they belong; on a receiving thread."""
    request = transfer_pb2.ReadRequest(
        region=region, offsets=runs.src.tolist(), lengths=runs.length.tolist()
    )
    targets = _Targets(runs, memory)
    try:
        with handle.lock:
            if handle.over:
                return
            left_s = max(0.0, handle.deadline_s - time.monotonic())
            handle.call = peer.stub.Read(request, timeout=left_s, metadata=peer.metadata)
        for piece in handle.call:
            with handle.lock:
                if handle.over:
                    return
                targets.put(memoryview(piece.data))
        handle.outcome = (None, "") if targets.full else (ReadFailure.TRUNCATED, "")
    except grpc.RpcError as error:
        failure = _FAILURES.get(error.code(), ReadFailure.PEER_GONE)
        handle.outcome = failure, str(error.details())
    except TransferError as error:
        handle.outcome = ReadFailure.PROTOCOL, error.message
        handle.call.cancel()
    except Exception as error:
        _log.exception("a gRPC read met an error")
        handle.outcome = ReadFailure.BACKEND, type(error).__name__


class _Targets:
    """Where the bytes of a stream of pieces go."""

    def __init__(self, runs: Runs, memory: Memory) -> None:
        self._memory = memory
        self._rooms: Iterator[tuple[int, int]] = zip(
            runs.dst.tolist(), runs.length.tolist(), strict=True
        )
        self._start, self._left = next(self._rooms, (0, 0))

    @property
    def full(self) -> bool:
        return self._left == 0

    def put(self, data: memoryview) -> None:
        """
        Raises:
            TransferError: there is no room for so much.
        """
        while data:
            if self.full:
                raise TransferError("the source sent more than was asked for")
            size = min(self._left, len(data))
            self._memory.store(self._start, data[:size])
            data = data[size:]
            self._start, self._left = self._start + size, self._left - size
            if not self._left:
                self._start, self._left = next(self._rooms, (0, 0))
