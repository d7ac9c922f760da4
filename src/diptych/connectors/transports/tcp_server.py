"""The source's side of the TCP transport: answers requests straight out of the regions."""

from __future__ import annotations

import hmac
import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping

from diptych.addresses import check_bindable
from diptych.connectors.transports.base import Memory
from diptych.connectors.transports.tcp_wire import (
    ANSWER,
    HELLO_BYTES,
    IOV,
    MAGIC,
    OK,
    PIECE_BYTES,
    PIECE_RUNS,
    REFUSED,
    REQUEST,
    RUN,
    WELCOME,
    PlainWire,
    TlsWire,
    Wire,
    advance,
)
from diptych.log_limit import LogLimit

_log = logging.getLogger(__name__)

_HELLO_DEADLINE_S = 5.0
_MAX_CLIENTS = 256
# requests of one reader that are taken before it must read answers
_MAX_QUEUED = 64
_TURN_BYTES = 8 << 20
_BACKLOG = 64


class TcpServer:
    """Listens and serves without a thread: `progress` does what can be done."""

    def __init__(
        self,
        host: str,
        port: int,
        regions: Mapping[str, Memory],
        token: bytes,
        epoll: select.epoll,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Bind; `port` is known afterwards.

        Raises:
            ConfigError: the address cannot be bound.
        """
        check_bindable(host, port)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self.sent_bytes = 0
        self._regions = regions
        self._token = token
        self._epoll = epoll
        self._tls = tls
        self._clients: dict[int, _Client] = {}
        self._complaints = LogLimit(_log)
        epoll.register(self._listener, select.EPOLLIN)

    def progress(self, ready: Mapping[int, int]) -> None:
        """Serve the descriptors that epoll named."""
        # a hello that came in time counts, however late we are; who sent none makes room first
        for fd in ready.keys() & self._clients.keys():
            self._serve(self._clients[fd])
        now = time.monotonic()
        for client in [c for c in self._strangers if now >= c.deadline_s]:
            self._drop(client)
        if self._listener.fileno() in ready:
            self._accept()

    def tick_s(self) -> float | None:
        """Until the next of those that have not said who they are must go; None: there are none."""
        first_s = min((client.deadline_s for client in self._strangers), default=None)
        return None if first_s is None else max(0.0, first_s - time.monotonic())

    @property
    def _strangers(self) -> list[_Client]:
        return [client for client in self._clients.values() if not client.welcome]

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._clients) >= _MAX_CLIENTS:
            self._complaints.warning("more than %d readers over TCP: one is refused", _MAX_CLIENTS)
            connection.close()
            return
        wire = PlainWire(connection) if self._tls is None else TlsWire(connection, self._tls, None)
        self._clients[wire.fileno()] = _Client(wire, self._regions)
        self._epoll.register(wire.fileno(), select.EPOLLIN)

    def _serve(self, client: _Client) -> None:
        try:
            client.take_requests(self._token)
            self.sent_bytes += client.send_answers(_TURN_BYTES)
        except (OSError, _ProtocolError) as error:
            if isinstance(error, _ProtocolError):
                self._complaints.warning("a reader over TCP is cut off: %s", error)
            self._drop(client)
            return
        owes = select.EPOLLOUT if client.owes else 0
        wanted = (0 if client.full else select.EPOLLIN) | owes
        self._epoll.modify(client.wire.fileno(), wanted)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.wire.fileno()]
        client.wire.close()


class _ProtocolError(Exception):
    """A reader does not keep to the protocol."""


class _Client:
    """One reader's connection."""

    def __init__(self, wire: Wire, regions: Mapping[str, Memory]) -> None:
        self.wire = wire
        self.welcome = False
        self.deadline_s = time.monotonic() + _HELLO_DEADLINE_S
        self.out: list[memoryview] = []
        self._regions = [memory for _, memory in sorted(regions.items())]
        self._buffer = memoryview(bytearray(REQUEST.size + PIECE_RUNS * RUN.size))
        self._got = 0
        self._queued: deque[tuple[int, int, list[tuple[int, int]]]] = deque()

    @property
    def full(self) -> bool:
        return len(self._queued) >= _MAX_QUEUED

    @property
    def owes(self) -> bool:
        """Whether answers are left to send: the budget may have ended between two of them."""
        return bool(self.out or self._queued)

    def take_requests(self, token: bytes) -> None:
        while not self.full:
            needed = self._needed()
            if self._got < needed:
                count = self.wire.receive([self._buffer[self._got : needed]])
                if not count:
                    return
                self._got += count
            elif not self.welcome:
                self._greet(token)
            elif self._needed() == self._got:
                self._queue_request()

    def _needed(self) -> int:
        """Bytes of the current message, as far as they are known."""
        if not self.welcome:
            return HELLO_BYTES
        if self._got < REQUEST.size:
            return REQUEST.size
        num_runs = REQUEST.unpack(self._buffer[: REQUEST.size])[2]
        if not 0 < num_runs <= PIECE_RUNS:
            raise _ProtocolError(f"it asked for {num_runs} runs at once")
        return int(REQUEST.size + num_runs * RUN.size)

    def _greet(self, token: bytes) -> None:
        if not hmac.compare_digest(bytes(self._buffer[:HELLO_BYTES]), MAGIC + token):
            raise _ProtocolError("it came with a wrong token")
        self.welcome, self._got = True, 0
        self.out.append(memoryview(WELCOME))

    def _queue_request(self) -> None:
        read_id, region, _ = REQUEST.unpack(self._buffer[: REQUEST.size])
        runs = list(RUN.iter_unpack(self._buffer[REQUEST.size : self._got]))
        self._got = 0
        self._queued.append((read_id, region, runs))

    def send_answers(self, budget: int) -> int:
        """Send at most about `budget` bytes; the rest waits for its turn."""
        sent = 0
        while sent < budget:
            if not self.out:
                if not self._queued:
                    return sent
                self.out = self._answer(*self._queued.popleft())
            count = self.wire.send(self.out[:IOV])
            if not count:
                return sent
            sent += count
            advance(self.out, count)
        return sent

    def _answer(self, read_id: int, region: int, runs: list[tuple[int, int]]) -> list[memoryview]:
        memory = self._regions[region] if region < len(self._regions) else None
        total = sum(length for _, length in runs)
        inside = memory is not None and all(
            offset + length <= memory.num_bytes for offset, length in runs
        )
        if memory is None or not inside or total > PIECE_BYTES:
            return [memoryview(ANSWER.pack(read_id, REFUSED, 0))]
        header = memoryview(ANSWER.pack(read_id, OK, total))
        view = memory.view
        if view is not None:
            return [header, *(view[offset : offset + length] for offset, length in runs)]
        staged, at = memoryview(bytearray(total)), 0
        for offset, length in runs:
            memory.load(offset, staged[at : at + length])
            at += length
        return [header, staged]
