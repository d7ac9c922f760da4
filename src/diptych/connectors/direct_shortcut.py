"""Messages straight from engine to engine of one host, past the services and their stream.

The stream between the services stays the way: whatever the shortcut cannot take goes there, and
who is a peer is said there alone. Each engine receives datagrams on an abstract unix socket; its
address and token are in its cards, which only authenticated peers see. A datagram is the receiver's
token, the sender's name and one message.
"""

from __future__ import annotations

import hmac
import logging
import os
import socket
import time
from collections.abc import Callable

import msgspec

from diptych.connectors.store_wire import TOKEN_BYTES, boot_id, socket_name

_log = logging.getLogger(__name__)

NAME_BYTES = 16
_HEADER_BYTES = TOKEN_BYTES + NAME_BYTES
# a COMMIT of a million tokens has a megabyte, and takes the stream
MAX_BYTES = 128 << 10
# any process of the host can find the address: each of its datagrams costs a turn of the thread
MAX_REFUSED, REFUSED_S = 4096, 10.0


class ShortcutCard(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine receives datagrams, and from whom its own come."""

    boot_id: str
    address: str
    token: bytes
    name: bytes


class Shortcut:
    """One engine's socket, and the peers that can be reached past the stream. One thread's.

    It closes for good where strangers send without end, or two peers claim one name: peers see that
    nobody is there, and take the stream.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        address = f"@diptych-control-{os.getpid()}-{os.urandom(8).hex()}"
        self._socket.bind(socket_name(address))
        self.card = ShortcutCard(
            boot_id=boot_id(),
            address=address,
            token=os.urandom(TOKEN_BYTES),
            name=os.urandom(NAME_BYTES),
        )
        self._targets: dict[str, ShortcutCard] = {}
        self._peers: dict[bytes, str] = {}
        self._buffer = bytearray(_HEADER_BYTES + MAX_BYTES + 1)
        self._num_lately, self._lately_s = 0, monotonic()
        self.num_sent = 0
        self.num_refused = 0

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def meet(self, peer: str, card: ShortcutCard | None) -> None:
        """The peer may send from now on, and is sent to where it is on this host."""
        self.part(peer)
        if self.closed or card is None or not card.boot_id == self.card.boot_id != "":
            return
        if card.name in self._peers:
            # whoever it is whose name that is would be taken for the other
            _log.warning("two peers have one name: hand-offs' messages take the stream")
            self.close()
        else:
            self._targets[peer] = card
            self._peers[card.name] = peer

    def part(self, peer: str) -> None:
        """Nothing of it is taken any more."""
        self._targets.pop(peer, None)
        for name in [name for name, known in self._peers.items() if known == peer]:
            del self._peers[name]

    def send(self, peer: str, body: bytes) -> bool:
        """Whether the message is with the peer; never waits."""
        card = self._targets.get(peer)
        if card is None or len(body) > MAX_BYTES:
            return False
        try:
            self._socket.sendto(
                card.token + self.card.name + body, socket.MSG_DONTWAIT, socket_name(card.address)
            )
        except BlockingIOError:
            return False
        except OSError as error:
            # it is gone, or in another network namespace
            _log.debug("a peer of this host cannot be reached: %s", error)
            self._targets.pop(peer)
            return False
        self.num_sent += 1
        return True

    def receive(self) -> tuple[str, bytes] | None:
        """The next message and its peer, where there is one; what strangers send is dropped."""
        if self.closed:
            return None
        try:
            count = self._socket.recv_into(self._buffer)
        except OSError:
            return None
        header, body = bytes(self._buffer[:_HEADER_BYTES]), bytes(self._buffer[_HEADER_BYTES:count])
        token_is_right = hmac.compare_digest(header[:TOKEN_BYTES], self.card.token)
        peer = self._peers.get(header[TOKEN_BYTES:])
        if not token_is_right or peer is None or count > _HEADER_BYTES + MAX_BYTES:
            self._refuse()
            return None
        return peer, body

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        self._targets.clear()
        self._peers.clear()

    def _refuse(self) -> None:
        self.num_refused += 1
        now = self._monotonic()
        if now - self._lately_s >= REFUSED_S:
            self._num_lately, self._lately_s = 0, now
        self._num_lately += 1
        if self._num_lately > MAX_REFUSED:
            _log.warning("strangers send without end: hand-offs' messages take the stream")
            self.close()
