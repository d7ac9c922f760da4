"""The engine process's end of the socket: blocking when idle, never in the way of a step."""

from __future__ import annotations

import select
import socket

from diptych.engine.core_messages import (
    FromEngine,
    ToEngine,
    decode_to_engine,
    encode_frame,
    take_frames,
)

_READ_BYTES = 1 << 20


class CoreChannel:
    """Frames over a connected stream socket.

    What is not read yet waits in the socket's buffers, whose size bounds it; a peer that does not
    read makes `send` wait.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setblocking(True)
        self._buffer = bytearray()
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """The messages that have arrived whole.

        Args:
            timeout_s: how long to wait for something to arrive; None waits for ever.

        Raises:
            EOFError: the peer has closed, or is gone.
        """
        timeout_ms = None if timeout_s is None else int(timeout_s * 1000)
        if self._poll.poll(timeout_ms):
            self._read()
        return [decode_to_engine(body) for body in take_frames(self._buffer)]

    def send(self, message: FromEngine) -> None:
        """Send one frame.

        Raises:
            EOFError: the peer is gone.
        """
        try:
            self._socket.sendall(encode_frame(message))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the service process is gone") from None

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        try:
            read = self._socket.recv(_READ_BYTES)
        except ConnectionResetError:
            read = b""
        if not read:
            raise EOFError("the service process is gone")
        self._buffer += read
