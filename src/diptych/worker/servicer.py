"""The Worker service: admission by ticket, one stream per router, cancel, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any

from diptych.clock import Clock
from diptych.config import EngineConfig, WorkerConfig
from diptych.connectors.checks import goes_through_store
from diptych.connectors.tickets import TicketKeys, TicketVerifier
from diptych.errors import (
    AuthenticationError,
    CapacityError,
    DeadlineError,
    DiptychError,
    DrainingError,
    InvalidRequestError,
    NoStreamError,
    UnavailableError,
)
from diptych.fault_points import reach
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION
from diptych.tasks import until_first_ends
from diptych.worker.engine import Engine
from diptych.worker.frames import error_frames, load_to_proto, split_outputs
from diptych.worker.handoff_metrics import HandoffCollector
from diptych.worker.identity import ROLES, WorkerIdentity
from diptych.worker.metrics import WorkerMetrics
from diptych.worker.parse import ModelLimits, parse_submit
from diptych.worker.peers import PeerStreams, PeerTimes
from diptych.worker.requests import Owned, RequestTable
from diptych.worker.streams import StreamHub

logger = logging.getLogger(__name__)

# How long a stream may stay without its Hello.
HELLO_S = 5.0
# How long a drained worker tries to send its last frames.
_FLUSH_S = 2.0
_REAP_EVERY_S = 0.5


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """One engine's requests and streams. `pump` must run beside it."""

    def __init__(
        self,
        engine: Engine,
        identity: WorkerIdentity,
        metrics: WorkerMetrics,
        *,
        config: WorkerConfig,
        engine_config: EngineConfig,
        keys: TicketKeys | None,
        clock: Clock,
    ) -> None:
        self.draining = False
        self._engine = engine
        self._identity = identity
        self._metrics = metrics
        self._stores = goes_through_store(engine_config.kv_transfer_config)
        self._max_num_queued_reqs = engine_config.max_num_queued_reqs
        self._limits = ModelLimits(
            vocab_size=identity.vocab_size,
            max_model_len=engine.info.max_model_len,
            max_logprobs=engine_config.max_logprobs,
        )
        self._clock = clock
        self._failure: DiptychError | None = None
        self._table = RequestTable()
        self._changed = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()
        self._keys = keys
        self._tickets = TicketVerifier(keys, identity.incarnation, clock)
        self._hub = StreamHub(
            identity.incarnation,
            max_frames=config.max_frames_queued,
            grace_s=config.stream_grace_s,
            clock=clock,
            on_joined=self._tickets.router_joined,
            on_left=self._router_left,
        )
        hello = worker_pb2.HandoffHello(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            kv_namespace=engine.info.kv_namespace,
            protocol_version=PROTOCOL_VERSION,
            cards=engine.info.handoff_cards,
        )
        self._peers = PeerStreams(
            engine, hello, clock, PeerTimes(gone_s=config.stream_grace_s), keys
        )
        if self._peers.direct:
            metrics.add(
                HandoffCollector(
                    identity.model,
                    identity.worker_id,
                    self._peers,
                    engine.info.kv_bytes_per_token,
                )
            )

    # -- calls ------------------------------------------------------------------------------------

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: Any
    ) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            role=ROLES[self._identity.role],
            model=self._identity.model,
            kv_namespace=self._engine.info.kv_namespace,
            protocol_version=PROTOCOL_VERSION,
            max_model_len=self._engine.info.max_model_len,
            load=self.load(),
            draining=self.draining,
            address=self._identity.address,
            direct=self._peers.direct,
            handoff_links=self._peers.links(),
            stores=self._stores,
            follows=self._stores,
            kv_bytes_per_token=self._engine.info.kv_bytes_per_token,
        )

    async def Submit(
        self, request: worker_pb2.SubmitRequest, context: Any
    ) -> worker_pb2.SubmitResponse:
        try:
            await self._submit(request)
        except DiptychError as error:
            self._metrics.refused(type(error).__name__)
            raise
        self._metrics.submitted.inc()
        return worker_pb2.SubmitResponse(load=self.load())

    async def Stream(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> None:
        """Frames out, acks and cancels in, until either side ends it."""
        try:
            async with asyncio.timeout(HELLO_S):
                first = await anext(aiter(request_iterator), None)
        except TimeoutError:
            raise DeadlineError("no Hello came") from None
        hello = _checked_hello(first, self._keys, self._identity.incarnation)
        await until_first_ends(
            self._write(hello, context), self._read(hello.router_incarnation, request_iterator)
        )

    async def Handoff(
        self, request_iterator: AsyncIterator[worker_pb2.HandoffFrame], context: Any
    ) -> None:
        """A decode worker's way to this worker's engine, until either side ends it."""
        await self._peers.answer(request_iterator, context)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: Any
    ) -> worker_pb2.DrainResponse:
        """Where there are ticket keys, only for who holds them, and only in this life: a request
        that is heard and said again does nothing that was not wanted already."""
        ours = self._identity.incarnation
        if self._keys is not None and not (
            request.incarnation == ours and self._keys.verify_drain(request)
        ):
            raise AuthenticationError("the drain's signature does not hold")
        return worker_pb2.DrainResponse(num_left=await self.drain(request.deadline_ms / 1000))

    # -- what the process around it uses ----------------------------------------------------------

    async def pump(self) -> None:
        """Send each step's outputs on, until the engine is closed.

        Raises:
            EngineDeadError: the engine is gone; every stream and Submit gets the same error.
        """
        try:
            async for outputs in self._engine.outputs():
                self._metrics.observe(outputs)
                self._push(split_outputs(outputs, self._table))
        except DiptychError as error:
            self._failure = error
            self._hub.fail(error)
            raise

    async def pump_peers(self) -> None:
        """Send on what the engine says to its peers, until it is closed."""
        await self._peers.pump()

    async def keep_times(self) -> None:
        """End, again and again, requests that waited longer than their tickets allow."""
        while True:
            await self._clock.sleep(_REAP_EVERY_S)
            late = self._table.remove_late(self._clock.monotonic())
            if late:
                self._push(error_frames(late, "the ticket's time passed in the queue"))
                self._abort(late)

    async def drain(self, deadline_s: float) -> int:
        """Admit no more and wait for what runs, and for its last frames to be sent.

        Returns:
            Requests left at the deadline.
        """
        self.draining = True
        await self._wait_until(lambda: not len(self._table), deadline_s)
        await self._wait_until(lambda: self._hub.flushed, min(deadline_s, _FLUSH_S))
        return len(self._table)

    async def _wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Return when `holds` does, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not holds():
                    self._changed.clear()
                    await self._changed.wait()

    async def close(self) -> None:
        """Abort what is left, end the streams and stop the timers."""
        self._abort(self._table.remove_all())
        self._hub.fail(DrainingError(f"worker {self._identity.worker_id} has stopped"))
        await self._hub.close()
        await self._peers.close()
        await asyncio.gather(*self._aborts, return_exceptions=True)

    def load(self) -> worker_pb2.WorkerLoad:
        """The engine's load; requests that it has not seen yet count as waiting."""
        stats = self._metrics.stats
        load = load_to_proto(stats)
        load.num_waiting = max(stats.num_waiting, len(self._table) - stats.num_running)
        return load

    # -- inside -----------------------------------------------------------------------------------

    def _push(self, frames: dict[str, worker_pb2.WorkerFrame]) -> None:
        for router, frame in frames.items():
            self._hub.push(router, frame)
        self._changed.set()

    async def _submit(self, request: worker_pb2.SubmitRequest) -> None:
        ticket = request.ticket
        if self._failure is not None:
            raise self._failure
        if self.draining:
            raise DrainingError(f"worker {self._identity.worker_id} is draining")
        if ticket.router_incarnation not in self._hub:
            raise NoStreamError(f"router {ticket.router_incarnation!r} has no stream here")
        if self.load().num_waiting >= self._max_num_queued_reqs:
            raise CapacityError(f"worker {self._identity.worker_id} has a full queue")
        owned = Owned(ticket.request_id, ticket.epoch, ticket.router_incarnation)
        parsed = parse_submit(request, owned.engine_id, self._limits)
        meets = request.HasField("handoff_peer")
        if meets and not self._peers.direct:
            raise UnavailableError(f"worker {self._identity.worker_id} hands nothing over directly")
        # last, so that a repeat of this ticket is told that the first was accepted
        admitted = self._tickets.admit(ticket)
        reach("worker.admitted")
        older = self._table.add(owned, queued_until_s=admitted.deadline_s)
        if older is not None:
            self._abort([older])
        if meets and not request.handoff_out:
            # of a direct hand-off the decode worker opens the stream; to whom, the ticket vouches
            self._peers.want([request.handoff_peer])
        try:
            await self._engine.submit(parsed)
        except BaseException:
            # a caller that left may leave a request that the engine has taken
            if self._table.remove(owned.engine_id) is not None:
                self._abort([owned])
            raise

    async def _write(self, hello: worker_pb2.Hello, context: Any) -> None:
        async with contextlib.aclosing(self._hub.attach(hello, self.load())) as frames:
            async for frame in frames:
                await context.write(frame)
                self._changed.set()

    async def _read(self, router: str, messages: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "ack":
                    self._hub.ack(router, message.ack.sequence)
                    self._changed.set()
                case "cancel":
                    self._cancel(router, message.cancel)
                case "handoff_peers":
                    self._peers.want(message.handoff_peers.peers)
                case other:
                    raise InvalidRequestError(f"unexpected message {other!r} on the stream")

    def _cancel(self, router: str, cancel: worker_pb2.Cancel) -> None:
        if len(cancel.request_ids) != len(cancel.epochs):
            raise InvalidRequestError("a cancel needs one epoch per request", param="epochs")
        gone = []
        for request_id, epoch in zip(cancel.request_ids, cancel.epochs, strict=True):
            owned = self._table.cancel(router, request_id, epoch)
            if owned is None:
                self._metrics.unknown_cancels.inc()
            else:
                gone.append(owned)
        self._abort(gone)

    def _router_left(self, router: str) -> None:
        self._tickets.router_left(router)
        self._abort(self._table.remove_router(router))
        self._changed.set()

    def _abort(self, gone: Iterable[Owned]) -> None:
        """Free what these attempts hold in the engine. They have left the table."""
        ids = [owned.engine_id for owned in gone]
        if not ids:
            return
        self._metrics.aborted.inc(len(ids))
        self._changed.set()
        self._in_background(self._engine.abort(ids))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._aborts.add(task)
        task.add_done_callback(self._abort_done)

    def _abort_done(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("an abort did not reach the engine: %s", task.exception())


def _checked_hello(
    first: worker_pb2.RouterMessage | None, keys: TicketKeys | None, incarnation: str
) -> worker_pb2.Hello:
    """The stream's first message.

    Raises:
        InvalidRequestError: it is no Hello, or of a version that is not understood.
        AuthenticationError: none of our routers has said it, or not to this incarnation.
    """
    if first is None or first.WhichOneof("message") != "hello":
        raise InvalidRequestError("the first message of a stream must be a Hello")
    hello = first.hello
    if not hello.router_incarnation:
        raise InvalidRequestError("a Hello needs the router's incarnation")
    if abs(hello.protocol_version - PROTOCOL_VERSION) > 1:
        raise InvalidRequestError(
            f"protocol version {hello.protocol_version} is not within one of {PROTOCOL_VERSION}"
        )
    if keys is not None and not (hello.audience == incarnation and keys.verify_router(hello)):
        raise AuthenticationError("the Hello's signature does not hold")
    return hello
