"""The engine process's end of the control socket: never waits, for one thread."""

from __future__ import annotations

import logging
import socket

from diptych.engine.control_messages import (
    FromControl,
    PeerLink,
    ToControl,
    decode_to_control,
    encode_control,
)
from diptych.engine.core_messages import take_frames
from diptych.errors import EngineError

_log = logging.getLogger(__name__)

_READ_BYTES = 256 << 10
MAX_UNSENT_BYTES = 4 << 20


class ControlPort:
    """Frames over a connected stream socket. What the peer does not read is dropped once it is too
    much: it would be repeated anyway."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._received = bytearray()
        self._unsent = bytearray()
        self.num_dropped = 0
        self.closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket is writable."""
        return bool(self._unsent)

    def receive(self) -> list[ToControl]:
        """The messages that have arrived whole; `closed` says whether the peer is gone, or has said
        what cannot be understood."""
        while not self.closed:
            try:
                read = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                read = b""
            if not read:
                self.close()
            self._received += read
            if len(read) < _READ_BYTES:
                break  # each further call would give the interpreter away
        try:
            return [decode_to_control(body) for body in take_frames(self._received)]
        except EngineError as error:
            # nothing after it can be believed, and it would come up again at every turn
            _log.error("the control socket is closed: %s", error.message)
            self._received.clear()
            self.close()
            return []

    def send(self, message: FromControl) -> None:
        """Send, or keep for `flush`."""
        if self.closed:
            return
        if not isinstance(message, PeerLink) and len(self._unsent) > MAX_UNSENT_BYTES:
            self.num_dropped += 1
            return
        self._unsent += encode_control(message)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the socket takes it."""
        while self._unsent and not self.closed:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                _log.debug("the control socket is gone: %s", error)
                self.close()
                return
            del self._unsent[:sent]

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        self._socket.close()
