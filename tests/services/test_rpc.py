"""Errors arrive as they were raised, health and reflection answer, a used port is named."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from diptych import errors
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import RpcServer, Service, error_from_rpc, open_channel

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]
NAME = "diptych.v1.Worker"


class FailingWorker(worker_pb2_grpc.WorkerServicer):
    """Raises what it is given."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.WorkerInfo:
        if self.error is not None:
            raise self.error
        self.began.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return worker_pb2.WorkerInfo()

    async def Stream(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        async for _ in request_iterator:
            break
        yield worker_pb2.WorkerFrame(sequence=1)
        assert self.error is not None
        raise self.error


def served(worker: FailingWorker, port: int = 0, idle_s: float | None = None) -> RpcServer:
    add = worker_pb2_grpc.add_WorkerServicer_to_server
    return RpcServer("127.0.0.1", port, [Service(NAME, add, worker)], idle_s=idle_s)


async def error_of_call(error: Exception) -> grpc.RpcError:
    async with served(FailingWorker(error)) as server, open_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        return caught.value


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("temperature is negative", param="temperature"),
        errors.DrainingError("draining"),
        errors.NoStreamError("open the stream first"),
        errors.DuplicateRequestError("seen"),
        errors.CapacityError("the queue is full"),
        errors.EngineDeadError("the engine is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_arrives_as_it_was_raised(error: errors.DiptychError) -> None:
    caught = await error_of_call(error)
    again = error_from_rpc(caught)
    assert caught.code().name == error.grpc_status
    assert (type(again), again.message, again.param) == (type(error), error.message, error.param)


async def test_bytes_that_are_no_message_are_invalid() -> None:
    async with served(FailingWorker()) as server, open_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(f"/{NAME}/Acquire")(b"\xff\xff\xff", timeout=60)
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(f"/{NAME}/GetInfo")(b"\xff\xff\xff", timeout=60)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unexpected_error_is_internal_and_keeps_its_text_to_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR, logger="diptych.rpc"):
        caught = await error_of_call(KeyError("the secret prompt"))
    assert caught.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in caught.details()
    assert "KeyError" in caplog.text
    assert "GetInfo" in caplog.text
    assert "secret" not in caplog.text


async def test_a_stream_ends_with_the_error_after_what_was_sent() -> None:
    worker = FailingWorker(errors.StaleTicketError("other incarnation"))
    async with served(worker) as server, open_channel(server.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).Stream(iter([worker_pb2.RouterMessage()]))
        assert (await call.read()).sequence == 1
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
    assert isinstance(error_from_rpc(caught.value), errors.StaleTicketError)


async def test_a_call_whose_time_is_over_ends_its_handler() -> None:
    worker = FailingWorker()
    async with served(worker) as server, open_channel(server.address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        for timeout_s in (0.2, 1.0, 5.0, 25.0):  # of a slow machine it may never get there
            with pytest.raises(grpc.RpcError) as caught:
                await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=timeout_s)
            assert isinstance(error_from_rpc(caught.value), errors.DeadlineError)
            if worker.began.is_set():
                break
        await asyncio.wait_for(worker.cancelled.wait(), 60)


async def test_no_server_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with open_channel(address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await worker_pb2_grpc.WorkerStub(channel).GetInfo(
                worker_pb2.GetInfoRequest(), timeout=60
            )
    assert isinstance(error_from_rpc(caught.value), errors.UnavailableError)


async def test_health_follows_set_serving() -> None:
    async with served(FailingWorker()) as server, open_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving in (False, True, False):
            await server.set_serving(serving)
            for name in ("", NAME):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
                assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serving


async def test_reflection_lists_the_services() -> None:
    async with served(FailingWorker()) as server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request]), timeout=60):
            names = {s.name for s in answer.list_services_response.service}
    assert names >= {NAME, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_a_port_in_use_is_named() -> None:
    async with served(FailingWorker()) as first:
        with pytest.raises(errors.ConfigError, match=f"{first.port}.*in use"):
            await served(FailingWorker(), first.port).start()


def num_connections(port: int) -> int:
    """That the port's end has not closed."""
    tables = [Path(f"/proc/self/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.read_text().splitlines()[1:]]
    open_states = ("01", "08")  # established, and closed by the other end alone
    return sum(row[1].endswith(f":{port:04X}") and row[3] in open_states for row in rows)


async def test_a_connection_ends_though_a_call_of_its_closed_channel_is_not_freed() -> None:
    """Calls are in cycles: the collector may free one minutes after its channel was closed."""
    worker = FailingWorker(errors.DrainingError("draining"))
    async with served(worker, idle_s=1.0) as server:
        async with open_channel(server.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
            with pytest.raises(grpc.RpcError):
                await call
            assert num_connections(server.port) == 1
        async with asyncio.timeout(60):
            while num_connections(server.port):
                await asyncio.sleep(0.1)
    assert call.done()


async def test_a_connection_with_a_call_does_not_end() -> None:
    worker = FailingWorker()
    async with served(worker, idle_s=0.5) as server, open_channel(server.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        await asyncio.wait_for(worker.began.wait(), 60)
        await asyncio.sleep(2)
        assert num_connections(server.port) == 1
        assert not call.done()
        call.cancel()
