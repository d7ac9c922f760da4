"""The pool's memory, and the unix socket that hands it to processes of this host.

The memory is a sealed memfd: it has no name anywhere, so that nothing is left behind, and nobody
who maps it can shrink it under the others. The socket's name is abstract: not even a killed node
leaves a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
from typing import Self

from diptych.connectors.sealed_memory import SIZE_SEALS
from diptych.connectors.store_wire import HELLO_BYTES, POOL_SIZE, hello, socket_name
from diptych.errors import ConfigError
from diptych.log_limit import LogLimit

_log = logging.getLogger(__name__)

_DEADLINE_S = 2.0
_MAX_CLIENTS = 64


class MemoryPool:
    """`with MemoryPool(num_bytes) as pool:`; pages are taken from the host when first touched."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.fd = os.memfd_create("diptych-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, num_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            self._map = mmap.mmap(self.fd, num_bytes)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise ConfigError(f"cannot make a pool of {num_bytes} bytes: {error}") from error
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give the memory back once nobody maps it any more."""
        os.close(self.fd)
        # a slice that is still being sent keeps the mapping until it is done
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemorySocket:
    """`async with`: serves the pool's memfd at `address` to whoever knows the token."""

    def __init__(self, pool: MemoryPool, token: bytes) -> None:
        self._pool = pool
        self._token = token
        self._complaints = LogLimit(_log)
        self.address = f"@diptych-kv-{secrets.token_hex(16)}"
        self._task: asyncio.Task[None] | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        listener = self._listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(socket_name(self.address))
        listener.listen(_MAX_CLIENTS)
        self._task = asyncio.create_task(self._serve(listener), name="memory socket")
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [task for task in (self._task, *self._clients) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()

    async def _serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                self._complaints.warning("memory socket: %s", error)
                await asyncio.sleep(0.1)  # out of descriptors, say: wait until some are free
                continue
            client.setblocking(False)
            if len(self._clients) >= _MAX_CLIENTS:
                client.close()
                continue
            task = asyncio.create_task(self._hand_over(client))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    async def _hand_over(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        received = b""
        with client, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_DEADLINE_S):
                while len(received) < HELLO_BYTES:
                    part = await loop.sock_recv(client, HELLO_BYTES - len(received))
                    if not part:
                        return
                    received += part
            if hmac.compare_digest(received, hello(self._token)):
                # a few bytes into an empty buffer: never blocks
                socket.send_fds(client, [POOL_SIZE.pack(self._pool.num_bytes)], [self._pool.fd])
            else:
                self._complaints.warning("a process asked for the pool with a wrong token")
