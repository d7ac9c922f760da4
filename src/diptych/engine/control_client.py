"""The service process's end of the control socket. For one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

from diptych.engine.control_messages import (
    Control,
    FromControl,
    ToControl,
    decode_from_control,
    encode_control,
)
from diptych.engine.core_messages import PREFIX_BYTES, frame_length
from diptych.errors import EngineError

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 4 << 20
MAX_QUEUED = 4096


class ControlClient:
    """Sends without waiting, and queues what the engine sends. Both ways drop `Control` messages
    that nobody takes."""

    def __init__(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[FromControl | None] = asyncio.Queue(MAX_QUEUED)
        self.num_dropped = 0

    async def open(self, connection: socket.socket) -> None:
        """Take a connected socket over."""
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader), name="engine-control")

    def send(self, message: ToControl) -> None:
        """Nothing happens where the engine is gone."""
        if self._writer is None or self._writer.is_closing():
            return
        unsent = self._writer.transport.get_write_buffer_size()
        if isinstance(message, Control) and unsent > MAX_UNSENT_BYTES:
            self.num_dropped += 1
            return
        self._writer.write(encode_control(message))

    async def messages(self) -> AsyncIterator[FromControl]:
        """In order, until the engine is gone or closed. For one reader."""
        while (message := await self._queue.get()) is not None:
            yield message

    async def close(self) -> None:
        """Idempotent."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._end()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                prefix = await reader.readexactly(PREFIX_BYTES)
                self._put(decode_from_control(await reader.readexactly(frame_length(prefix))))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except EngineError as error:
            logger.error("control frames of the engine cannot be read: %s", error.message)
        self._end()

    def _put(self, message: FromControl) -> None:
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.num_dropped += 1

    def _end(self) -> None:
        while True:
            try:
                self._queue.put_nowait(None)
                return
            except asyncio.QueueFull:
                self._queue.get_nowait()
