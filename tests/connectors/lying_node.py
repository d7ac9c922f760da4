"""A store node that lies: real sockets, answers as a test wants them."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

from diptych.connectors.store_wire import HELLO_BYTES, POOL_SIZE, socket_name


class MemoryGiver:
    """A unix socket that hands a descriptor to everybody, and says that it has `num_bytes`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.address = f"@diptych-test-{os.urandom(8).hex()}"
        self._fd = fd
        self._num_bytes = num_bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(socket_name(self.address))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client, suppress(OSError):
                    client.recv(HELLO_BYTES)
                    socket.send_fds(client, [POOL_SIZE.pack(self._num_bytes)], [self._fd])

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)
