"""An engine that computes nothing, and a router's end of the worker contract."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from diptych.clock import Clock, SystemClock
from diptych.config import EngineConfig, WorkerConfig
from diptych.connectors.tickets import TicketIssuer, TicketKeys
from diptych.engine.control_messages import FromControl, ToControl
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, FinishReason
from diptych.errors import DiptychError
from diptych.observe import new_registry
from diptych.proto import common_pb2, worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION, RpcServer, Service, open_channel
from diptych.worker.identity import WorkerIdentity
from diptych.worker.metrics import WorkerMetrics
from diptych.worker.servicer import WorkerServicer


@dataclass(frozen=True)
class FakeInfo:
    kv_namespace: str = "ab" * 32
    max_model_len: int = 64
    num_kv_blocks: int = 64
    handoff_cards: bytes = b""
    kv_bytes_per_token: int = 64


class FakeEngine:
    """Keeps what it was given; the test says what comes out."""

    def __init__(self, info: FakeInfo | None = None) -> None:
        self.info = info or FakeInfo()
        self.heard: list[ToControl] = []
        self._controls: asyncio.Queue[FromControl | None] = asyncio.Queue()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self._queue: asyncio.Queue[EngineCoreOutputs | DiptychError | None] = asyncio.Queue()

    async def submit(self, request: EngineCoreRequest) -> None:
        self.requests[request.request_id] = request

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def emit(
        self,
        request_id: str,
        position: int,
        tokens: list[int],
        reason: FinishReason = FinishReason.UNSPECIFIED,
    ) -> None:
        self._queue.put_nowait(
            EngineCoreOutputs(
                request_ids=[request_id],
                first_positions=[position],
                token_counts=[len(tokens)],
                token_ids=tokens,
                finish_reasons=[reason],
                stop_token_ids=[-1],
                num_cached_tokens=[0],
            )
        )

    def end(self, error: DiptychError | None = None) -> None:
        self._queue.put_nowait(error)
        self._controls.put_nowait(None)

    def send_control(self, message: ToControl) -> None:
        self.heard.append(message)

    def say(self, message: FromControl) -> None:
        """What the engine sends to its peers, or says of them."""
        self._controls.put_nowait(message)

    async def controls(self) -> AsyncIterator[FromControl]:
        while (message := await self._controls.get()) is not None:
            yield message

    async def close(self) -> None:
        self.end()

    async def outputs(self) -> AsyncIterator[EngineCoreOutputs]:
        while (item := await self._queue.get()) is not None:
            if isinstance(item, DiptychError):
                raise item
            yield item


class SteppedClock(SystemClock):
    """One that the test puts forward."""

    ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


@dataclass
class Served:
    """A worker in this process."""

    engine: FakeEngine
    servicer: WorkerServicer
    address: str
    pump: asyncio.Task[None]
    metrics: WorkerMetrics
    registry: CollectorRegistry


@contextlib.asynccontextmanager
async def serve(
    *,
    keys: TicketKeys | None = None,
    grace_s: float = 60.0,
    max_frames: int = 1024,
    max_queued: int = 1024,
    worker_id: str = "w",
    incarnation: str = "w1",
    role: str = "decode",
    info: FakeInfo | None = None,
    port: int = 0,
    clock: Clock | None = None,
) -> AsyncIterator[Served]:
    engine = FakeEngine(info)
    identity = WorkerIdentity(
        worker_id=worker_id,
        incarnation=incarnation,
        role=role,
        address="w:1",
        admin_address="w:2",
        model="tiny",
        vocab_size=100,
    )
    registry = new_registry()
    metrics = WorkerMetrics(registry, "tiny", "w")
    servicer = WorkerServicer(
        engine,
        identity,
        metrics,
        config=WorkerConfig(stream_grace_s=grace_s, max_frames_queued=max_frames),
        engine_config=EngineConfig(max_num_queued_reqs=max_queued),
        keys=keys,
        clock=clock or SystemClock(),
    )
    pump = asyncio.create_task(servicer.pump())
    beside = [
        asyncio.create_task(servicer.keep_times()),
        asyncio.create_task(servicer.pump_peers()),
    ]
    add = worker_pb2_grpc.add_WorkerServicer_to_server
    service = Service("diptych.v1.Worker", add, servicer)
    async with RpcServer("127.0.0.1", port, [service], stop_grace_s=0.1) as server:
        try:
            yield Served(engine, servicer, server.address, pump, metrics, registry)
        finally:
            await servicer.close()
            engine.end()
            for task in beside:
                task.cancel()
            await asyncio.gather(pump, *beside, return_exceptions=True)


class FakeRouter:
    """One router incarnation: a channel, a stream, tickets."""

    def __init__(self, channel: Any, name: str = "r1", keys: TicketKeys | None = None) -> None:
        self.name = name
        self.stub = worker_pb2_grpc.WorkerStub(channel)
        self.keys = keys or TicketKeys.drawn()
        self.issuer = TicketIssuer(self.keys, name)
        self.worker = "w1"
        self.call: Any = None
        self.incarnation = ""
        self.last = 0

    async def open(self) -> worker_pb2.WorkerFrame:
        """Open or resume the stream; returns the answer to the Hello."""
        info = await self.stub.GetInfo(worker_pb2.GetInfoRequest())
        hello = worker_pb2.Hello(
            router_incarnation=self.name,
            protocol_version=PROTOCOL_VERSION,
            worker_incarnation=self.incarnation,
            last_sequence=self.last,
            audience=info.incarnation,
        )
        self.keys.sign_router(hello)
        self.call = self.stub.Stream()
        await self.call.write(worker_pb2.RouterMessage(hello=hello))
        answer = await self.read()
        self.incarnation, self.last = answer.incarnation, answer.sequence
        return answer

    async def read(self) -> worker_pb2.WorkerFrame:
        frame = await asyncio.wait_for(self.call.read(), 60)
        assert isinstance(frame, worker_pb2.WorkerFrame), "the stream has ended"
        self.last = frame.sequence
        return frame

    async def ack(self) -> None:
        await self.call.write(worker_pb2.RouterMessage(ack=worker_pb2.Ack(sequence=self.last)))

    async def cancel(self, *requests: tuple[str, int]) -> None:
        message = worker_pb2.Cancel(
            request_ids=[r for r, _ in requests], epochs=[e for _, e in requests]
        )
        await self.call.write(worker_pb2.RouterMessage(cancel=message))

    def request(
        self, request_id: str, epoch: int = 1, ttl_ms: int = 60_000, **more: Any
    ) -> worker_pb2.SubmitRequest:
        peer = more["handoff_peer"].incarnation if "handoff_peer" in more else ""
        ours, theirs = ("prefill", "decode") if more.get("handoff_out") else ("decode", "prefill")
        incarnations = {f"{ours}_incarnation": self.worker, f"{theirs}_incarnation": peer}
        ticket = self.issuer.issue(request_id, epoch=epoch, ttl_ms=ttl_ms, **incarnations)
        fields: dict[str, Any] = {
            "prompt_token_ids": [1, 2, 3],
            "sampling": common_pb2.SamplingParams(seed=1, max_tokens=8),
            **more,
        }
        return worker_pb2.SubmitRequest(ticket=ticket, **fields)

    async def submit(self, request_id: str, epoch: int = 1, **more: Any) -> None:
        await self.stub.Submit(self.request(request_id, epoch, **more), timeout=60)


@contextlib.asynccontextmanager
async def router_of(
    served: Served, name: str = "r1", keys: TicketKeys | None = None
) -> AsyncIterator[FakeRouter]:
    """A router with an open stream."""
    async with open_channel(served.address) as channel:
        router = FakeRouter(channel, name, keys)
        await router.open()
        yield router


async def until(holds: Any, timeout_s: float = 60.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(timeout_s):
        while not holds():
            await asyncio.sleep(0.01)
