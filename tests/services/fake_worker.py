"""A worker's gRPC side with scripted tokens: it speaks worker.proto, resumes streams, and dies when
told to. Position p of every output is `script[p]`; the last token of the script ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from diptych.proto import common_pb2, worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION, RpcServer, Service

PREFILL, DECODE, AGGREGATED = 1, 2, 3
STOP, LENGTH, ERROR = 1, 2, 4


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """`async with` serves it. What it was told is in `submits` and `cancels`."""

    def __init__(
        self, worker_id: str, role: int, script: list[int], *, model: str = "tiny"
    ) -> None:
        self.worker_id, self.role, self.script, self.model = worker_id, role, script, model
        self.life = 1
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.num_asked = 0  # for its state
        self.cancels: list[tuple[str, int]] = []
        self.deaf = False  # what the router says to its streams does not arrive
        self.refuse: grpc.StatusCode | None = None
        self.pause_at: int | None = None  # position before which every request waits
        self.resume = asyncio.Event()
        self.commits = True
        self.num_stored: int | None = None  # tokens of the prompt, if not all
        self.stored = asyncio.Event()  # the commit waits for it
        self.stored.set()
        self.leaves_to_store = False  # the KV of a pair
        self.direct = False
        self.stores = True
        self.follows = False
        self.failure = ""  # of all its links
        self.reads: list[FakeWorker] = []  # whose memory it can read, tested
        self.peers: list[str] = []  # incarnations that the router told it of
        self.handoff_failure = ""  # why it cannot read, if so
        self.max_model_len = 1024
        self.port = 0
        self._server: RpcServer | None = None
        self._reset()

    def _reset(self) -> None:
        self._frames: list[worker_pb2.WorkerFrame] = []
        self._grew = asyncio.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._epochs: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> set[str]:
        """Requests that it still computes."""
        return {name for name, task in self._tasks.items() if not task.done()}

    async def __aenter__(self) -> FakeWorker:
        add = worker_pb2_grpc.add_WorkerServicer_to_server
        service = Service("diptych.v1.Worker", add, self)
        self._server = RpcServer("127.0.0.1", self.port, [service], stop_grace_s=0)
        await self._server.start()
        self.port = self._server.port
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def die(self) -> None:
        """The process is gone, with all it knew."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._server is not None:
            await self._server.stop()
        self._server = None

    async def restart(self) -> None:
        """The same address, another incarnation."""
        await self.die()
        self.life += 1
        self._reset()
        await self.__aenter__()

    async def break_streams(self) -> None:
        """Every stream ends; the process lives on."""
        async with self._grew:
            self._breaks += 1
            self._grew.notify_all()

    _breaks = 0

    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.WorkerInfo:
        self.num_asked += 1
        return worker_pb2.WorkerInfo(
            worker_id=self.worker_id,
            incarnation=f"{self.worker_id}-{self.life}",
            role=self.role,
            model=self.model,
            kv_namespace="ns",
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self.max_model_len,
            address=self.address,
            direct=self.direct,
            stores=self.stores,
            follows=self.follows,
            handoff_links=[
                worker_pb2.HandoffLink(
                    incarnation=f"{w.worker_id}-{w.life}",
                    transport="shm",
                    gb_per_s=1.0,
                    failure=self.failure,
                )
                for w in self.reads
            ],
        )

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: Any
    ) -> worker_pb2.SubmitResponse:
        self.submits.append(request)
        if self.refuse is not None:
            await context.abort(self.refuse, "refused by the script")
        request_id, epoch = request.ticket.request_id, request.ticket.epoch
        if request_id in self._tasks:
            self._tasks[request_id].cancel()  # an attempt is replaced by the next
        self._epochs[request_id] = epoch
        self._tasks[request_id] = asyncio.create_task(self._run(request))
        return worker_pb2.SubmitResponse(load=worker_pb2.WorkerLoad())

    async def Stream(self, messages: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerFrame]:
        hello = (await anext(messages)).hello
        incarnation = f"{self.worker_id}-{self.life}"
        known = hello.worker_incarnation in ("", incarnation)
        sent = hello.last_sequence if known else len(self._frames)
        yield worker_pb2.WorkerFrame(sequence=sent, incarnation=incarnation, gap=not known)
        reader = asyncio.create_task(self._read(messages))
        breaks = self._breaks
        try:
            while True:
                async with self._grew:
                    while len(self._frames) <= sent and self._breaks == breaks:
                        await self._grew.wait()
                if self._breaks != breaks:
                    return
                sent += 1
                yield self._frames[sent - 1]
        finally:
            reader.cancel()

    async def _read(self, messages: Any) -> None:
        async for message in messages:
            if self.deaf:
                continue
            if message.HasField("handoff_peers"):
                self.peers = [peer.incarnation for peer in message.handoff_peers.peers]
            if message.HasField("cancel"):
                pairs = zip(message.cancel.request_ids, message.cancel.epochs, strict=True)
                for request_id, epoch in pairs:
                    self.cancels.append((request_id, epoch))
                    # one that comes late is not of the attempt that runs now
                    if self._epochs.get(request_id, epoch + 1) <= epoch:
                        self._tasks[request_id].cancel()

    async def _run(self, request: worker_pb2.SubmitRequest) -> None:
        limit = request.sampling.max_tokens
        first = len(request.output_token_ids)
        if request.HasField("handoff_peer") and not request.handoff_out:
            if self.handoff_failure:
                await self.say(request, first, [], finish=ERROR, failure=self.handoff_failure)
                return
            first += 1  # its peer samples the first one
        for position in range(first, min(len(self.script), limit)):
            if position == self.pause_at:
                await self.resume.wait()
            ends = 0
            if position + 1 == len(self.script):
                ends = STOP
            elif position + 1 == limit:
                ends = LENGTH
            await self.say(request, position, [self.script[position]], finish=ends)
            if request.handoff_out:
                await self.stored.wait()
                if self.commits and not ends:
                    await self.say(request, position + 1, [], commit=True)
                return

    async def say(
        self,
        request: worker_pb2.SubmitRequest,
        position: int,
        token_ids: list[int],
        *,
        finish: int = 0,
        commit: bool = False,
        failure: str = "",
        epoch: int | None = None,
    ) -> None:
        """Send one frame with one entry."""
        frame = worker_pb2.WorkerFrame(
            sequence=len(self._frames) + 1,
            incarnation=f"{self.worker_id}-{self.life}",
            request_ids=[request.ticket.request_id],
            epochs=[request.ticket.epoch if epoch is None else epoch],
            first_positions=[position],
            token_counts=[len(token_ids)],
            token_ids=token_ids,
            finish_reasons=[finish],
            stop_token_ids=[token_ids[-1] if finish == STOP else -1],
            num_cached_tokens=[0],
            load=worker_pb2.WorkerLoad(),
        )
        extra = worker_pb2.EntryExtra(entry=0)
        if commit:
            extra.commit.CopyFrom(_commit(request, leaves_to_store=self.leaves_to_store))
            if self.num_stored is not None:
                extra.commit.num_tokens = extra.commit.objects[0].end_token = self.num_stored
        if failure:
            extra.handoff_failed = failure
        if token_ids and request.sampling.HasField("logprobs"):
            extra.logprobs.CopyFrom(_logprobs(token_ids, request.sampling.logprobs))
        if position == 0 and request.sampling.HasField("prompt_logprobs"):
            later = list(request.prompt_token_ids)[1:]
            extra.prompt_logprobs.CopyFrom(_logprobs(later, request.sampling.prompt_logprobs))
        if len(extra.ListFields()) > 0:
            frame.extras.append(extra)
        async with self._grew:
            self._frames.append(frame)
            self._grew.notify_all()


def _commit(request: worker_pb2.SubmitRequest, *, leaves_to_store: bool) -> worker_pb2.KvCommit:
    num_tokens = len(request.prompt_token_ids)
    page = worker_pb2.KvObject(key=b"k" * 32, start_token=0, end_token=num_tokens)
    direct = request.HasField("handoff_peer")
    return worker_pb2.KvCommit(
        epoch=request.ticket.epoch,
        kv_namespace="ns",
        num_tokens=num_tokens,
        objects=[] if direct else [page],
        connector="DirectConnector" if direct and not leaves_to_store else "StoreConnector",
        num_cached_tokens=3,
    )


def _logprobs(token_ids: list[int], count: int) -> common_pb2.PackedLogprobs:
    """Token t has probability e^-0.5 and rank 1; the alternatives follow, each e^-1 less likely."""
    packed = common_pb2.PackedLogprobs(width=count + 1, ranks=[1] * len(token_ids))
    for token_id in token_ids:
        others = [(token_id + place) % 300 for place in range(1, count)]
        packed.token_ids.extend([token_id, *([token_id] if count else []), *others])
        rest = [-0.5 - place for place in range(count)]
        packed.logprobs.extend([-0.5, *rest])
    return packed
