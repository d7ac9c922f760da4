"""A forwarding proxy on the way of bytes: flips them, delays them, or drops them."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

_PIECE_BYTES = 64 << 10


class Proxy:
    """`with Proxy(listen, target):` forwards connections; settings take effect at once.

    Attributes:
        flip_after: flips a bit of one byte in `flip_size` bytes or larger pieces that go towards
            the client, or, with `flip_up`, towards the target. None: nothing is flipped.
        delay_s: each piece waits so long.
        dropping: nothing gets through; connections stay open.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int]) -> None:
        self.delay_s = 0.0
        self.dropping = False
        self.flip_down = False
        self.flip_up = False
        self.num_flipped = 0
        self._target = target
        self._server = socket.create_server(listen)
        self._open: list[socket.socket] = [self._server]
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
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._accepting.join(5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            try:
                target = socket.create_connection(self._target, 5)
            except OSError:
                client.close()
                continue
            target.settimeout(None)
            self._open += [client, target]
            for source, sink, up in ((client, target, True), (target, client, False)):
                threading.Thread(target=self._forward, args=(source, sink, up), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                if self.delay_s:
                    time.sleep(self.delay_s)
                while self.dropping:
                    time.sleep(0.01)
                sink.sendall(self._hurt(piece, up))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _hurt(self, piece: bytes, up: bool) -> bytes:
        """One flipped bit in the middle of a large piece: of KV, not of a header."""
        if not (self.flip_up if up else self.flip_down) or len(piece) < 4096:
            return piece
        self.num_flipped += 1
        raw = bytearray(piece)
        raw[len(raw) // 2] ^= 1
        return bytes(raw)
