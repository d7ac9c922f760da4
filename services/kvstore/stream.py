"""The byte stream: puts and gets for clients that cannot map the pool (`store_wire`).

Received bytes go from the socket straight into the pool, sent ones straight out of it: what the
socket does not take at once waits in the pool (`sending.py`), not in a copy. A write goes on only
while its reservation is open, chunk by chunk, so that it never touches bytes that already belong to
another object; a read that outlives its lease is found by its reader, who verifies the lease
afterwards.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections import deque
from typing import Protocol, Self, cast

from diptych.addresses import check_bindable
from diptych.connectors.store_wire import (
    ANSWER,
    FRAME,
    HELLO_BYTES,
    READ,
    WELCOME,
    WRITE,
    hello,
    wake_bytes,
)
from diptych.log_limit import LogLimit
from diptych.services.kvstore.object_types import Status
from diptych.services.kvstore.sending import Outgoing
from diptych.sockets import tune

_log = logging.getLogger(__name__)

_HELLO_DEADLINE_S = 5.0
_MAX_CLIENTS = 256
_MAX_ANSWERS_QUEUED = 1024
_SCRATCH_BYTES = 64 << 10


class Places(Protocol):
    """What the stream needs of the object table: (offset, bytes) while it may be touched."""

    def writable(self, put_id: int) -> tuple[int, int] | None: ...
    def readable(self, lease_id: int) -> tuple[int, int] | None: ...


class StreamServer:
    """`async with StreamServer(...)`; `port` is known once started.

    Raises:
        ConfigError: on entering, if the address cannot be bound; names the port.
    """

    def __init__(
        self, host: str, port: int, places: Places, pool: memoryview, token: bytes
    ) -> None:
        self.host = host
        self.port = port
        self.received_bytes = 0
        self.sent_bytes = 0
        # of all connections: a stranger may open any number
        self.complaints = LogLimit(_log)
        self._places = places
        self._pool = pool
        self._token = token
        self._server: asyncio.Server | None = None
        self._clients: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        check_bindable(self.host, self.port)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, self.host, self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            for client in list(self._clients):
                client.abort()
            await self._server.wait_closed()
            self._server = None

    def _connection(self) -> asyncio.BufferedProtocol:
        return _Connection(self, self._places, self._pool, hello(self._token), self._clients)


class _Connection(asyncio.BufferedProtocol):
    """One client. Incoming bytes are a header (hello or frame) or the payload of a write."""

    def __init__(
        self,
        server: StreamServer,
        places: Places,
        pool: memoryview,
        greeting: bytes,
        peers: set[_Connection],
    ) -> None:
        self._server = server
        self._places = places
        self._pool = pool
        self._greeting = greeting
        self._peers = peers
        self._welcome = False
        self._header = memoryview(bytearray(max(HELLO_BYTES, FRAME.size)))
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._got = 0  # bytes of the current header or payload
        self._put_id = 0
        self._place: tuple[int, int] | None = None  # of the current write; None once it is refused
        self._left: int | None = None  # bytes of payload to come; None while a header is read
        self._status = Status.OK
        # in the order of the frames: the answer to a write, or (lease id, bytes) to be read
        self._answers: deque[bytes | tuple[int, int]] = deque()
        self._reading_paused = False
        self._wake_bytes = 1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._socket = transport.get_extra_info("socket")
        tune(self._socket)
        self._out = Outgoing(
            self._socket.fileno(), self._next_parts, self._send_answers, self.abort
        )
        self._peers.add(self)
        loop = asyncio.get_running_loop()
        self._hello_timer = loop.call_later(_HELLO_DEADLINE_S, self.abort)
        if len(self._peers) > _MAX_CLIENTS:
            self._server.complaints.warning(
                "more than %d stream clients: one is refused", _MAX_CLIENTS
            )
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._hello_timer.cancel()
        self._peers.discard(self)
        self._answers.clear()
        self._out.close()

    def abort(self) -> None:
        self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._left is None:
            wanted = FRAME.size if self._welcome else HELLO_BYTES
            return self._header[self._got : wanted]
        if self._place is not None and self._places.writable(self._put_id) != self._place:
            self._place, self._status = None, Status.EXPIRED
        if self._place is None:
            return self._scratch[: self._left]
        start = self._place[0] + self._got
        return self._pool[start : start + self._left]

    def buffer_updated(self, num_bytes: int) -> None:
        self._got += num_bytes
        if self._left is not None:
            self._server.received_bytes += num_bytes
            self._left -= num_bytes
            if not self._left:
                self._end_write()
            self._wake_at(wake_bytes(self._left or 0))
        elif not self._welcome:
            if self._got == HELLO_BYTES:
                self._greet()
        elif self._got == FRAME.size:
            self._got = 0
            self._frame(*FRAME.unpack(self._header[: FRAME.size]))

    def _greet(self) -> None:
        self._hello_timer.cancel()
        if not hmac.compare_digest(bytes(self._header[:HELLO_BYTES]), self._greeting):
            self._server.complaints.warning("a stream client came with a wrong token")
            self.abort()
            return
        self._welcome = True
        self._got = 0
        self._answers.append(WELCOME)
        self._send_answers()

    def _frame(self, op: int, id_: int, num_bytes: int) -> None:
        if op == READ:
            self._answers.append((id_, num_bytes))
            self._send_answers()
        elif op == WRITE and 0 < num_bytes <= len(self._pool):
            self._begin_write(id_, num_bytes)
        else:
            self._server.complaints.warning("a stream client sent op %d of %d bytes", op, num_bytes)
            self.abort()

    def _begin_write(self, put_id: int, num_bytes: int) -> None:
        """What is refused is read all the same, and dropped, to stay in step with the client."""
        self._put_id, self._left = put_id, num_bytes
        self._place = self._places.writable(put_id)
        self._status = Status.EXPIRED if self._place is None else Status.OK
        if self._place is not None and self._place[1] != num_bytes:
            self._place, self._status = None, Status.INVALID

    def _end_write(self) -> None:
        self._left = None
        self._got = 0
        self._answers.append(ANSWER.pack(self._status, 0))
        self._send_answers()

    def _send_answers(self) -> None:
        """Send what is due, in order, as fast as the client takes it."""
        self._out.flush()
        full = len(self._answers) > _MAX_ANSWERS_QUEUED
        if full and not self._reading_paused:
            self._transport.pause_reading()
        elif self._reading_paused and not full:
            self._transport.resume_reading()
        self._reading_paused = full

    def _next_parts(self) -> list[memoryview]:
        """The next answer; an object's bytes stay where they lie."""
        if not self._answers:
            return []
        answer = self._answers.popleft()
        if isinstance(answer, bytes):
            return [memoryview(answer)]
        lease_id, num_bytes = answer
        place = self._places.readable(lease_id)
        if place is None or place[1] != num_bytes:
            status = Status.EXPIRED if place is None else Status.INVALID
            return [memoryview(ANSWER.pack(status, 0))]
        self._server.sent_bytes += num_bytes
        head = memoryview(ANSWER.pack(Status.OK, num_bytes))
        # a lease that ends meanwhile is found by the reader, who verifies it afterwards
        return [head, self._pool[place[0] : place[0] + num_bytes]]

    def _wake_at(self, num_bytes: int) -> None:
        """Be told of so many bytes at once."""
        if num_bytes != self._wake_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wake_bytes = num_bytes
