"""What travels on a transfer connection, and the socket it travels on.

The reader begins with `HELLO` and its token, the source answers with one byte. Then:

    REQUEST  id, region (index in the sorted names), n     then n x (offset, length)
    ANSWER   id, status, bytes                             then the bytes of the runs, in order

one answer a request, in order. A request asks for at most `PIECE_BYTES` in at most `PIECE_RUNS`
runs. Little-endian. With TLS all of it goes inside.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diptych.connectors.transports.base import Offer
from diptych.errors import ConfigError, TransferError
from diptych.sockets import tune

MAGIC = b"DKT1"
TOKEN_BYTES = 32
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
WELCOME = b"\x01"
REQUEST = struct.Struct("<QHH")
RUN = struct.Struct("<QQ")
ANSWER = struct.Struct("<QBI")
PIECE_BYTES = 1 << 20
PIECE_RUNS = 256
OK = 0
REFUSED = 1
# how many buffers one system call takes; well under the kernel's 1024
IOV = 64


def tls_mark(tls: TlsFiles | None) -> bytes:
    """What an offer says of its encryption."""
    return b"tls" if tls else b""


def check_tls(offer: Offer, tls: TlsFiles | None) -> None:
    """
    Raises:
        TransferError: one side encrypts, the other does not.
    """
    if offer.payload != tls_mark(tls):
        raise TransferError("one side transfers with TLS, the other without")


class Wire(Protocol):
    """A non-blocking byte stream. Both calls return 0 where they would block."""

    def fileno(self) -> int: ...

    def send(self, views: Sequence[memoryview]) -> int:
        """Bytes taken of the views, in order. Raises OSError once the peer is gone."""
        ...

    def receive(self, views: Sequence[memoryview]) -> int:
        """Bytes put into the views, in order. Raises OSError at the end of the stream."""
        ...

    def close(self) -> None: ...


class PlainWire:
    """A TCP socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        tune(connection)
        self._socket = connection

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, views: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(views[:IOV])
        except BlockingIOError:
            return 0

    def receive(self, views: Sequence[memoryview]) -> int:
        try:
            count = self._socket.recvmsg_into(views[:IOV])[0]
        except BlockingIOError:
            return 0
        if not count:
            raise ConnectionError("the stream ended")
        return count

    def close(self) -> None:
        self._socket.close()


class TlsWire:
    """The same inside TLS; the handshake goes on by itself in the first calls."""

    def __init__(
        self, connection: socket.socket, context: ssl.SSLContext, server_name: str | None
    ) -> None:
        connection.setblocking(False)
        tune(connection)
        self._socket = context.wrap_socket(
            connection,
            server_side=server_name is None,
            server_hostname=server_name,
            do_handshake_on_connect=False,
        )
        self._ready = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, views: Sequence[memoryview]) -> int:
        try:
            self._shake_hands()
            return self._socket.send(views[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0

    def receive(self, views: Sequence[memoryview]) -> int:
        try:
            self._shake_hands()
            count = self._socket.recv_into(views[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return 0
        if not count:
            raise ConnectionError("the stream ended")
        return count

    def _shake_hands(self) -> None:
        if not self._ready:
            self._socket.do_handshake()
            self._ready = True

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files for mutual TLS: both sides show a certificate of the same authority.

    `server_name` is the name that a source's certificate must bear; its address if None.
    """

    certificate: Path
    key: Path
    authority: Path
    server_name: str | None = None

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key, certificate.

        Raises:
            ConfigError: a file cannot be read.
        """
        try:
            files = (self.authority, self.key, self.certificate)
            authority, key, certificate = (file.read_bytes() for file in files)
        except OSError as error:
            raise ConfigError(f"TLS files for transfers cannot be used: {error}") from error
        return authority, key, certificate

    def server_context(self) -> ssl.SSLContext:
        """Demands a client certificate.

        Raises:
            ConfigError: a file is missing or no certificate.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Checks the server's certificate and name.

        Raises:
            ConfigError: as `server_context`.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.certificate, self.key)
            context.load_verify_locations(self.authority)
        except OSError as error:
            raise ConfigError(f"TLS files for transfers cannot be used: {error}") from error
        context.verify_mode = ssl.CERT_REQUIRED
        return context


def advance(views: list[memoryview], count: int) -> None:
    """Drop `count` bytes from the front of the views, in place."""
    done = 0
    while done < len(views) and count >= len(views[done]):
        count -= len(views[done])
        done += 1
    del views[:done]
    if count:
        views[0] = views[0][count:]
