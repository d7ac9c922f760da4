"""What goes out on a stream: gathered from where it lies, a bounded piece in each turn of the loop.

An asyncio transport would copy what its socket does not take at once, and move it up after every
send; an object waits in the pool instead.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

# In one turn of the loop: below a millisecond for the other clients.
_PIECE_BYTES = 1 << 20
_MAX_PARTS = 64


class Outgoing:
    """The sending side of one connection.

    Args:
        fileno: the connection's descriptor; non-blocking; stays the caller's.
        due: takes what is to be sent next; nothing if nothing is due.
        ready: called when the socket takes bytes again; calls `flush`.
        failed: called when the connection is broken.
    """

    def __init__(
        self,
        fileno: int,
        due: Callable[[], Sequence[memoryview]],
        ready: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        # a descriptor of its own: a loop lets nobody else watch that of a transport
        self._socket = socket.socket(fileno=os.dup(fileno))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._due = due
        self._ready = ready
        self._failed = failed
        self._parts: deque[memoryview] = deque()
        self._num_bytes = 0  # of all parts
        self._more = False  # whether more may be due than was gathered
        self._watching = False
        self._closed = False

    def flush(self) -> None:
        """Send what is due; what the socket does not take now follows by itself."""
        if not self._watching:
            self._send()

    def close(self) -> None:
        """Drop what is not sent. Idempotent."""
        if not self._closed:
            self._closed = True
            self._watch(False)
            self._parts.clear()
            self._socket.close()

    def _writable(self) -> None:
        self._watch(False)
        self._ready()

    def _send(self) -> None:
        """One piece a turn of the loop."""
        if self._closed:
            return
        pieces = self._pieces()
        if not pieces:
            return
        try:
            sent = self._socket.sendmsg(pieces)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._failed()
            return
        self._drop(sent)
        self._watch(bool(self._parts) or self._more)

    def _pieces(self) -> list[memoryview]:
        self._more = True
        while self._num_bytes < _PIECE_BYTES and len(self._parts) < _MAX_PARTS:
            parts = self._due()
            if not parts:
                self._more = False
                break
            self._parts += parts
            self._num_bytes += sum(part.nbytes for part in parts)
        pieces: list[memoryview] = []
        room = _PIECE_BYTES
        for part in self._parts:
            if not room:
                break
            pieces.append(part[:room])
            room -= pieces[-1].nbytes
        return pieces

    def _drop(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        while num_bytes:
            part = self._parts.popleft()
            if part.nbytes > num_bytes:
                self._parts.appendleft(part[num_bytes:])
            num_bytes -= min(part.nbytes, num_bytes)

    def _watch(self, watching: bool) -> None:
        if watching and not self._watching:
            self._loop.add_writer(self._socket.fileno(), self._writable)
        elif self._watching and not watching:
            self._loop.remove_writer(self._socket.fileno())
        self._watching = watching
