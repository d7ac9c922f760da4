"""A forwarding proxy on the way of bytes: flips them, delays them, slows them, or drops them."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

Address = tuple[str, int]
_PIECE_BYTES = 64 << 10
_LOOK_S = 0.01
_LISTENS = "0A"  # as the kernel names the state


class Proxy:
    """`with Proxy(listen, target):` forwards connections; settings take effect at once.

    Attributes:
        flip_down, flip_up: flips a bit of one byte in each large piece that goes towards the
            client, or towards the target; `num_flipped` counts them.
        delay_s: each piece waits so long.
        bytes_per_s: of each connection and direction.
        dropping: nothing gets through; connections stay open, and new ones are taken.
        dropping_of: the same for the connections of these processes alone.
    """

    def __init__(self, listen: Address | str, target: Address | str) -> None:
        """Each is a host and a port, or the path of a unix socket."""
        self.delay_s = 0.0
        self.bytes_per_s = math.inf
        self.dropping = False
        self.dropping_of: frozenset[int] = frozenset()
        self.flip_down = False
        self.flip_up = False
        self.num_flipped = 0
        self._target = target
        self._server = _listening(listen)
        self._open: list[socket.socket] = [self._server]
        self._closed = False
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every connection, and listen no more."""
        self._closed = True
        for each in self._open:
            _close(each)
        self._accepting.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, address = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(client, address), daemon=True).start()

    def _join(self, client: socket.socket, address: Address) -> None:
        """Connect one client to the target; both directions run until either ends."""
        owner = owner_of(address) if address else None

        def stopped() -> bool:
            return (self.dropping or owner in self.dropping_of) and not self._closed

        while stopped():
            time.sleep(_LOOK_S)
        try:
            target = self._connected()
        except OSError:
            _close(client)
            return
        self._open += [client, target]
        for source, sink, up in ((client, target, True), (target, client, False)):
            wanted = (source, sink, up, stopped)
            threading.Thread(target=self._forward, args=wanted, daemon=True).start()

    def _connected(self) -> socket.socket:
        if isinstance(self._target, str):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self._target)
            return connection
        connection = socket.create_connection(self._target, 5)
        connection.settimeout(None)
        return connection

    def _forward(
        self, source: socket.socket, sink: socket.socket, up: bool, stopped: Callable[[], bool]
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                time.sleep(self.delay_s + len(piece) / self.bytes_per_s)
                while stopped():
                    time.sleep(_LOOK_S)
                sink.sendall(self._hurt(piece, up))
        for each in (source, sink):
            _close(each)

    def _hurt(self, piece: bytes, up: bool) -> bytes:
        """One flipped bit in the middle of a large piece: of KV, not of a header."""
        if not (self.flip_up if up else self.flip_down) or len(piece) < 4096:
            return piece
        self.num_flipped += 1
        raw = bytearray(piece)
        raw[len(raw) // 2] ^= 1
        return bytes(raw)


def _listening(address: Address | str) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_server(address)
    made = socket.socket(socket.AF_UNIX)
    made.bind(address)
    made.listen()
    return made


def listening_ports(pid: int) -> list[int]:
    """Ports on 127.0.0.1 at which a process of this network accepts connections."""
    sockets = _sockets_of(pid)
    found = []
    for local, _, state, inode in _connections():
        if state == _LISTENS and inode in sockets and local[0] == "127.0.0.1":
            found.append(local[1])
    return found


def owner_of(address: Address) -> int | None:
    """The process whose end of a connection has this address; None where it is gone already."""
    for local, _, _, inode in _connections():
        if local == address and inode != "0":
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit() and inode in _sockets_of(int(entry.name)):
                    return int(entry.name)
    return None


def _sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets; none where it may not be looked at."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")
                if link.startswith("socket:["):
                    found.add(link[8:-1])
    return found


def _connections() -> list[tuple[Address, Address, str, str]]:
    """(local, remote, state, inode) of the TCP sockets of this network, mapped IPv4 as IPv4."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                found.append((_address(words[1]), _address(words[2]), words[3], words[9]))
    return found


def _address(text: str) -> Address:
    """The kernel's words of an address are in the host's order; the last is that of IPv4."""
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)[-4:][::-1]
    return socket.inet_ntoa(raw), int(port, 16)


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
