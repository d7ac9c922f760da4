"""What a stranger can make us log, and how often."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket

import pytest

from diptych.connectors.store_wire import HELLO_BYTES, socket_name
from diptych.log_limit import LogLimit
from diptych.services.kvstore.memory import MemoryPool, MemorySocket
from diptych.services.kvstore.stream import StreamServer

_log = logging.getLogger(__name__)


@pytest.fixture(autouse=True)
def an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slowly a test runs, its lines come within what counts as once."""
    monkeypatch.setattr("diptych.log_limit._EVERY_S", 3600.0)


class NoPlaces:
    def writable(self, put_id: int) -> tuple[int, int] | None:
        return None

    def readable(self, lease_id: int) -> tuple[int, int] | None:
        return None


def test_a_flood_of_lines_is_one_and_the_next_says_how_many_there_were(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = LogLimit(_log)
    for number in range(100):
        limit.warning("number %d", number)
    assert [r.getMessage() for r in caplog.records] == ["number 0"]
    limit._next_at_s = 0.0
    limit.warning("number %d", 100)
    limit._next_at_s = 0.0
    limit.warning("number %d", 101)
    messages = [r.getMessage() for r in caplog.records[1:]]
    assert messages == ["number 100 (99 like it were not logged)", "number 101"]


@pytest.mark.anyio
async def test_wrong_tokens_on_the_stream_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    pool = memoryview(bytearray(4096))
    async with StreamServer("127.0.0.1", 0, NoPlaces(), pool, b"t" * 32) as server:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"w" * HELLO_BYTES)
            await _until_end(reader)
            writer.close()
    assert caplog.text.count("wrong token") == 1


@pytest.mark.anyio
async def test_wrong_tokens_on_the_memory_socket_are_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with MemoryPool(4096) as pool:
        async with MemorySocket(pool, b"t" * 32) as memory:
            for _ in range(20):
                client = socket.socket(socket.AF_UNIX)
                client.connect(socket_name(memory.address))
                reader, writer = await asyncio.open_unix_connection(sock=client)
                writer.write(b"w" * HELLO_BYTES)
                await _until_end(reader)
                writer.close()
    assert caplog.text.count("wrong token") == 1


async def _until_end(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(60):
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
