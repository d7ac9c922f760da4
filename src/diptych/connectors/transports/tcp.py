"""The raw TCP byte stream: requests for runs of bytes, answers received where they belong.

A read is cut into pieces of at most 1 MiB, of which a few are under way at a time, so that reads
share a connection fairly and one that is given up costs little: its last pieces are received into
scratch memory. Bytes reach the target only in this thread's own receive calls: every fence holds
at once. A connection that is silent though it owes bytes is closed, and its reads fail.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections import deque

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
from diptych.connectors.transports.tcp_pieces import Piece, cut
from diptych.connectors.transports.tcp_server import TcpServer
from diptych.connectors.transports.tcp_wire import (
    ANSWER,
    MAGIC,
    OK,
    TOKEN_BYTES,
    WELCOME,
    PlainWire,
    TlsFiles,
    TlsWire,
    Wire,
    advance,
    check_tls,
    tls_mark,
)
from diptych.errors import TransferError

_WINDOW_BYTES = 8 << 20
_TURN_BYTES = 8 << 20


class TcpTransport(Transport):
    """Reads over TCP, with TLS where files for it are given.

    Args:
        host, port: where a source listens; port 0 takes a free one.
        advertised_host: what peers are told instead of `host`.
        directory_url: through which they find this process; decides whether loopback will do.
        stall_s: a connection that owes bytes and sends none for so long is given up.
    """

    name = "tcp"

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertised_host: str | None = None,
        directory_url: str | None = None,
        tls: TlsFiles | None = None,
        stall_s: float = 5.0,
    ) -> None:
        self._host, self._port = host, port
        self._advertised_host, self._directory_url = advertised_host, directory_url
        self._tls = tls
        self._server_tls = tls.server_context() if tls else None
        self._client_tls = tls.client_context() if tls else None
        self._server_name = tls.server_name if tls else None
        self._stall_s = stall_s
        self._regions: dict[str, Memory] = {}
        self._token = os.urandom(TOKEN_BYTES)
        self._epoll = select.epoll()
        self._server: TcpServer | None = None
        self._peers: dict[int, TcpPeer] = {}

    def register(self, region: str, memory: Memory) -> None:
        self._regions[region] = memory

    def offer(self) -> Offer:
        """Listens at the first call.

        Raises:
            ConfigError: the address cannot be bound, or no other host could reach it.
        """
        if self._server is None:
            self._server = TcpServer(
                self._host, self._port, self._regions, self._token, self._epoll, self._server_tls
            )
        address = reachable_address(
            self._advertised_host or self._host, self._server.port, None, self._directory_url
        )
        mark = tls_mark(self._tls)
        return Offer(transport=self.name, address=address, token=self._token, payload=mark)

    def connect(self, endpoint: Endpoint) -> TcpPeer:
        offer = endpoint.offer(self.name)
        if offer is None:
            raise TransferError("the peer does not serve TCP")
        check_tls(offer, self._tls)
        peer = TcpPeer(endpoint, self._stall_s)
        host, _, port = offer.address.rpartition(":")
        try:
            connection = _connect(host.strip("[]"), int(port))
            if self._client_tls is None:
                peer.open(PlainWire(connection), offer.token)
            else:
                name = self._server_name or host.strip("[]")
                peer.open(TlsWire(connection, self._client_tls, name), offer.token)
        except (OSError, ValueError) as error:
            peer.lose(ReadFailure.PEER_GONE, f"it cannot be reached: {error}")
        else:
            self._peers[peer.fd] = peer
            self._epoll.register(peer.fd, select.EPOLLIN | select.EPOLLOUT)
        return peer

    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        assert isinstance(peer, TcpPeer)
        handle = ReadHandle(peer, runs.num_bytes, len(runs), deadline_s)
        memory = self._regions[into]
        if not handle.admit(runs, peer.region_bytes(region), memory.num_bytes):
            return handle
        if peer.gone:
            handle.fail(ReadFailure.PEER_GONE, peer.why)
        else:
            peer.add(handle, cut(handle, runs, memory, sorted(peer.endpoint.regions).index(region)))
            self._turn(peer)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        assert isinstance(handle.peer, TcpPeer)
        if not handle.ended:
            if time.monotonic() >= handle.deadline_s:
                handle.peer.give_up(handle, ReadFailure.DEADLINE)
            else:
                self._turn(handle.peer)
        return handle.state

    def cancel(self, handle: ReadHandle) -> None:
        assert isinstance(handle.peer, TcpPeer)
        handle.peer.give_up(handle, ReadFailure.CANCELLED)

    def fence(self, peer: Peer) -> bool:
        # only our own receive calls write, and they are over when this is asked
        return True

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, TcpPeer)
        peer.lose(ReadFailure.CANCELLED, "disconnected")
        self._peers.pop(peer.fd, None)

    def progress(self) -> None:
        ready = dict(self._epoll.poll(0))
        if self._server is not None:
            self._server.progress(ready)
        for fd, peer in list(self._peers.items()):
            if fd in ready or peer.stopped_early:
                self._turn(peer)

    def waitables(self) -> list[int]:
        return [self._epoll.fileno()]

    def tick_s(self) -> float | None:
        if any(peer.stopped_early for peer in self._peers.values()):
            return 0.0
        return None if self._server is None else self._server.tick_s()

    def close(self) -> None:
        if self._epoll.closed:
            return
        for peer in list(self._peers.values()):
            peer.lose(ReadFailure.CLOSED)
        self._peers.clear()
        if self._server is not None:
            self._server.close()
        self._epoll.close()

    def _turn(self, peer: TcpPeer) -> None:
        """Send and receive what can be; watch for what cannot."""
        if peer.gone:
            return
        try:
            peer.turn()
        except TransferError as error:
            peer.lose(ReadFailure.PROTOCOL, error.message)
        except OSError as error:
            peer.lose(peer.how_lost(error), str(error))
        if peer.gone:
            self._peers.pop(peer.fd, None)
            return
        self._epoll.modify(peer.fd, select.EPOLLIN | (select.EPOLLOUT if peer.wants_out else 0))


class TcpPeer(Peer):
    """One source, and the pieces of reads that are under way from it."""

    def __init__(self, endpoint: Endpoint, stall_s: float) -> None:
        super().__init__(endpoint)
        self.why = ""
        self.fd = -1
        # the rest may lie in TLS's own buffer, of which no descriptor tells
        self.stopped_early = False
        self._wire: Wire | None = None
        self._stall_s = stall_s
        self._heard_s = time.monotonic()
        self._welcome = memoryview(bytearray(len(WELCOME)))
        self._is_welcome = False
        self._out: list[memoryview] = []
        self._to_ask: deque[Piece] = deque()
        self._asked: deque[Piece] = deque()
        self._asked_bytes = 0
        self._left: dict[ReadHandle, int] = {}
        self._header = memoryview(bytearray(ANSWER.size))
        self._header_got = 0
        self._views: list[memoryview] | None = None
        self._next_id = 0

    def open(self, wire: Wire, token: bytes) -> None:
        self._wire = wire
        self.fd = wire.fileno()
        self._out = [memoryview(MAGIC + token)]

    @property
    def wants_out(self) -> bool:
        return bool(self._out)

    def add(self, handle: ReadHandle, pieces: list[Piece]) -> None:
        """Queue a read's pieces."""
        if not pieces:
            handle.state = ReadState.DONE
            return
        if not self._left:
            self._heard_s = time.monotonic()
        self._left[handle] = len(pieces)
        self._to_ask.extend(pieces)

    def give_up(self, handle: ReadHandle, failure: ReadFailure) -> None:
        """End one read; what of it is under way goes to scratch memory."""
        if self._left.pop(handle, None) is None:
            return
        handle.fail(failure)
        self._to_ask = deque(piece for piece in self._to_ask if piece.handle is not handle)
        receiving = self._views is not None
        for index, piece in enumerate(self._asked):
            if piece.handle is handle:
                piece.drop()
                if index == 0 and receiving:
                    self._views = piece.scratch(sum(map(len, self._views or ())))

    def lose(self, failure: ReadFailure, why: str = "") -> None:
        """The connection is over: all its reads fail."""
        if self.gone:
            return
        self.gone, self.why = True, why
        for handle in self._left:
            handle.fail(failure, why)
        self._left.clear()
        self._to_ask.clear()
        self._asked.clear()
        self._views = None
        if self._wire is not None:
            self._wire.close()

    def how_lost(self, error: OSError) -> ReadFailure:
        """TRUNCATED where the stream ended inside an answer."""
        inside = self._header_got or self._views is not None
        ended = isinstance(error, ConnectionError)
        return ReadFailure.TRUNCATED if inside and ended else ReadFailure.PEER_GONE

    def turn(self) -> None:
        """Raises OSError once the connection is over, TransferError for bytes out of place."""
        assert self._wire is not None
        self._ask()
        while self._out:
            count = self._wire.send(self._out)
            if not count:
                break
            advance(self._out, count)
        received = 0
        while received < _TURN_BYTES:
            count = self._wire.receive(self._wanted())
            if not count:
                break
            received += count
            self._took(count)
            self._ask()
        self.stopped_early = received >= _TURN_BYTES
        now = time.monotonic()
        if received or not self._left:
            self._heard_s = now
        elif now - self._heard_s > self._stall_s:
            raise TimeoutError(f"it sent nothing for {self._stall_s:g} s")

    def _ask(self) -> None:
        """Ask for more, as far as the window goes."""
        while self._is_welcome and self._to_ask and self._asked_bytes < _WINDOW_BYTES:
            piece = self._to_ask.popleft()
            self._next_id += 1
            piece.id = self._next_id
            self._asked.append(piece)
            self._asked_bytes += piece.num_bytes
            self._out.append(memoryview(piece.request()))

    def _wanted(self) -> list[memoryview]:
        if not self._is_welcome:
            return [self._welcome]
        return self._views or [self._header[self._header_got :]]

    def _took(self, count: int) -> None:
        if not self._is_welcome:
            if bytes(self._welcome) != WELCOME:
                raise TransferError("the source does not speak this protocol")
            self._is_welcome = True
        elif self._views:
            advance(self._views, count)
            if not self._views:
                self._end_piece()
        else:
            self._header_got += count
            if self._header_got == ANSWER.size:
                self._begin_piece()

    def _begin_piece(self) -> None:
        piece_id, status, num_bytes = ANSWER.unpack(self._header)
        piece = self._asked[0] if self._asked else None
        if piece is None or piece.id != piece_id:
            raise TransferError("the source answered what was not asked")
        if status != OK:
            self._header_got = 0
            self._next_piece()
            self.give_up(piece.handle, ReadFailure.REFUSED)
        elif num_bytes != piece.num_bytes:
            raise TransferError("the source sent another size than was asked for")
        else:
            self._views = piece.views()

    def _end_piece(self) -> None:
        self._views, self._header_got = None, 0
        piece = self._next_piece()
        if piece.handle in self._left:
            piece.deliver()
            self._left[piece.handle] -= 1
            if not self._left[piece.handle]:
                del self._left[piece.handle]
                piece.handle.state = ReadState.DONE

    def _next_piece(self) -> Piece:
        piece = self._asked.popleft()
        self._asked_bytes -= piece.num_bytes
        return piece


def _connect(host: str, port: int) -> socket.socket:
    """Begin to connect. A source that advertises a name costs a look-up here."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        with contextlib.suppress(BlockingIOError):
            connection.connect(address)
        return connection
    except BaseException:
        connection.close()
        raise
