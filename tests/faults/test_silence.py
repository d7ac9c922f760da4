"""A peer that vanishes without a word is noticed by both ends of its connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import RpcServer, Service, open_channel
from tests.e2e.cluster import free_port
from tests.faults.proxy import Proxy

pytestmark = [pytest.mark.faults, pytest.mark.anyio, pytest.mark.timeout(300)]


class Talking(worker_pb2_grpc.WorkerServicer):
    """Answers go on until the client is gone."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def Stream(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        try:
            while True:
                yield worker_pb2.WorkerFrame(sequence=1)
                await asyncio.sleep(0.01)
        finally:
            self.left.set()


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stream_that_falls_silent_ends_at_both_ends() -> None:
    """Also while an answer to one of gRPC's own pings is due: it measures the line as it is used,
    and keepalive waited behind that for a minute."""
    add, talking = worker_pb2_grpc.add_WorkerServicer_to_server, Talking()
    async with RpcServer("127.0.0.1", 0, [Service("diptych.v1.Worker", add, talking)]) as server:
        listen = ("127.0.0.1", free_port())
        with Proxy(listen, ("127.0.0.1", server.port)) as proxy:
            async with open_channel(f"127.0.0.1:{listen[1]}") as channel:
                call = worker_pb2_grpc.WorkerStub(channel).Stream()
                for _ in range(100):
                    await call.read()
                proxy.dropping = True
                async with asyncio.timeout(45):  # after 20, by options
                    with pytest.raises(grpc.RpcError) as caught:
                        await read_to_the_end(call)
                    await talking.left.wait()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
