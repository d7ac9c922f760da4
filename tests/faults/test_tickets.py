"""Tickets that are forged, replayed or expired get nothing, and clocks that step change nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from diptych.connectors.tickets import TicketIssuer, TicketKeys
from diptych.proto import common_pb2, worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION
from tests.faults.clients import QUESTIONS
from tests.faults.deployment import Deployment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900), pytest.mark.anyio]

WORKER = "prefill-0"


class Impostor:
    """A router of our own at a worker: its stream is open, its tickets are its own affair."""

    def __init__(self, system: Deployment, stub: Any, incarnation: str) -> None:
        self.stub = stub
        self.incarnation = incarnation
        self.name = f"impostor-{time.monotonic_ns()}"
        self.keys = TicketKeys.load(system.directory / "ticket-keys")
        self.issuer = TicketIssuer(self.keys, self.name)
        self.frames: list[worker_pb2.WorkerFrame] = []

    def request(
        self, name: str, *, epoch: int = 1, ttl_ms: int = 60_000
    ) -> worker_pb2.SubmitRequest:
        ticket = self.issuer.issue(
            name, epoch=epoch, ttl_ms=ttl_ms, prefill_incarnation=self.incarnation
        )
        return worker_pb2.SubmitRequest(
            ticket=ticket,
            prompt_token_ids=QUESTIONS[0].prompt,
            sampling=common_pb2.SamplingParams(max_tokens=2, seed=1, ignore_eos=True),
        )

    async def refused(self, request: worker_pb2.SubmitRequest) -> str:
        """What the worker says to it."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.stub.Submit(request, timeout=60)
        assert caught.value.code() in (
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.ALREADY_EXISTS,
        )
        return str(caught.value.details())

    async def ended(self, name: str) -> str:
        """The error that a request ended with; empty if it ended well."""
        async with asyncio.timeout(60):
            while True:
                for frame in self.frames:
                    for at, request_id in enumerate(frame.request_ids):
                        if request_id == name and frame.finish_reasons[at]:
                            return "".join(e.error for e in frame.extras if e.entry == at)
                await asyncio.sleep(0.01)


@asynccontextmanager
async def impostor(system: Deployment) -> AsyncIterator[Impostor]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{system.ports[WORKER]}") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        made = Impostor(system, stub, info.incarnation)
        call = stub.Stream()
        hello = worker_pb2.Hello(
            router_incarnation=made.name,
            protocol_version=PROTOCOL_VERSION,
            audience=info.incarnation,
        )
        made.keys.sign_router(hello)
        await call.write(worker_pb2.RouterMessage(hello=hello))
        await call.read()

        async def read() -> None:
            while (frame := await call.read()) is not grpc.aio.EOF:
                made.frames.append(frame)

        reader = asyncio.create_task(read())
        try:
            yield made
        finally:
            reader.cancel()
            call.cancel()
            await asyncio.gather(reader, return_exceptions=True)


async def test_a_forged_ticket_is_refused(system: Deployment) -> None:
    async with impostor(system) as router:
        forged = router.request("forged")
        forged.ticket.request_id = "another"
        assert "signature" in await router.refused(forged)
        forged = router.request("forged")
        forged.ticket.signature = bytes(32)
        assert "signature" in await router.refused(forged)
        router.issuer = TicketIssuer(TicketKeys.drawn(), router.name)
        assert "signature" in await router.refused(router.request("forged"))


async def test_a_replayed_ticket_is_refused(system: Deployment) -> None:
    async with impostor(system) as router:
        request = router.request("once")
        await router.stub.Submit(request, timeout=60)
        assert not await router.ended("once")
        assert "was admitted" in await router.refused(request)
        later = router.request("once", epoch=2)
        await router.stub.Submit(later, timeout=60)
        assert await router.refused(request)


async def test_a_ticket_for_an_earlier_life_of_the_worker_is_refused(system: Deployment) -> None:
    async with impostor(system) as router:
        router.incarnation = "0" * 32
        assert "another incarnation" in await router.refused(router.request("stale"))


async def test_a_ticket_that_expires_in_the_queue_ends_with_an_error(system: Deployment) -> None:
    """Another request holds the engine, so that this one waits however soon it came there."""
    async with impostor(system) as router:
        with system.pausing(WORKER, "engine.step") as pause:
            await router.stub.Submit(router.request("first"), timeout=60)
            await asyncio.to_thread(pause.reached)
            await router.stub.Submit(router.request("late", ttl_ms=200), timeout=60)
            assert "time passed" in await router.ended("late")
            pause.release()
        assert not await router.ended("first")


@pytest.mark.parametrize("step_s", [-86_400.0, 86_400.0], ids=["back", "ahead"])
def test_a_stepped_wall_clock_changes_no_answer(system: Deployment, step_s: float) -> None:
    for service in system.services.values():
        (service.points / "wall_step").write_text(str(step_s))
    try:
        for question in QUESTIONS:
            system.check_right(question)
            system.check_right(question, router=1)
        time.sleep(2)  # longer than leases, heartbeats and liveness
        for question in QUESTIONS:
            system.check_right(question)
    finally:
        for service in system.services.values():
            (service.points / "wall_step").unlink()
