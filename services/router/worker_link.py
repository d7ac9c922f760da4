"""The router's end of one worker: its stream, its state, and the requests that it runs.

One stream carries the outputs of all requests of this router. A stream that breaks is resumed by
(incarnation, sequence); when that fails for `resume_s`, or the worker comes back as another
incarnation, or its frames have a gap, the requests that it ran are reported as lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from diptych.clock import Clock
from diptych.connectors.tickets import TicketKeys
from diptych.errors import (
    AuthenticationError,
    DeadlineError,
    DiptychError,
    EngineError,
    NoStreamError,
    UnavailableError,
)
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION, error_from_rpc, open_channel
from diptych.services.router.frames import read_frame
from diptych.services.router.routable import Role
from diptych.services.router.route import Entry
from diptych.services.router.worker_calls import brief, check_info, finish

logger = logging.getLogger(__name__)

_ACK_EVERY_FRAMES = 16
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_LINK_POLL_S = 0.1
_MAX_CANCELS_KEPT = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """Deadlines of one link, in seconds; `link_test_s` bounds the wait for tests of the
    worker's own links to others."""

    poll_s: float = 1.0
    call_s: float = 2.0
    submit_s: float = 10.0
    resume_s: float = 1.0
    silence_s: float = 5.0
    link_test_s: float = 10.0


class Listener(Protocol):
    """Who runs a request on a worker. Both calls return at once."""

    def on_entry(self, worker_key: str, entry: Entry) -> None:
        """The worker says something about the request."""
        ...

    def on_lost(self, worker_key: str, reason: str) -> None:
        """The worker will say no more about it."""
        ...


@dataclass(slots=True)
class _Running:
    listener: Listener
    epoch: int
    num_tokens: int


class WorkerLink:
    """One worker as this router sees it. `async with` opens and closes it.

    `on_change` is called whenever the worker becomes usable or stops being so.
    """

    def __init__(
        self,
        address: str,
        *,
        router_incarnation: str,
        clock: Clock,
        keys: TicketKeys | None = None,
        times: LinkTimes | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self.info = worker_pb2.WorkerInfo()
        self.load = worker_pb2.WorkerLoad()
        self._router_incarnation = router_incarnation
        self._clock = clock
        self._keys = keys
        self._times = times or LinkTimes()
        self._on_change = on_change
        self._running: dict[str, _Running] = {}
        self._cancels: dict[str, int] = {}
        self._cancels_sent: dict[str, int] = {}  # the last ones, on this stream and before
        self._peers: dict[str, worker_pb2.HandoffPeer] = {}
        self._peers_sent: set[str] = set()
        self._readable: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._hurry = asyncio.Event()
        self._met_at = clock.monotonic()
        self._streaming = False
        self._greeted_incarnation = ""
        self._last_sequence = 0
        self._acked_sequence = 0
        self._submitting: set[tuple[str, int]] = set()
        self._heard_at = clock.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._session: asyncio.Task[None] | None = None
        self._refused = False
        self._channel: Any = None
        self._stub: Any = None

    @property
    def key(self) -> str:
        """Names this life of the worker."""
        return f"{self.info.worker_id}/{self.info.incarnation}"

    @property
    def role(self) -> Role:
        return Role(self.info.role)

    @property
    def kv_namespace(self) -> str:
        return self.info.kv_namespace

    @property
    def incarnation(self) -> str:
        return self.info.incarnation

    @property
    def direct(self) -> bool:
        """Whether its memory can be read, or it can read another's."""
        return self.info.direct

    @property
    def stores(self) -> bool:
        """Whether its KV can go through a store, or come from one."""
        return self.info.stores

    @property
    def follows(self) -> bool:
        """Whether it can load KV from the store while that is being stored."""
        return self.info.follows

    def reads(self, incarnation: str) -> float | None:
        """GB/s of its link to that worker; None until the link has passed its test."""
        return self._readable.get(incarnation)

    @property
    def tests_links(self) -> bool:
        """Whether it was told lately of workers and has not said yet whether it can read them."""
        late = self._clock.monotonic() - self._met_at >= self._times.link_test_s
        return not late and self.has_untested_links

    @property
    def has_untested_links(self) -> bool:
        """Whether it has not said of all workers that it was told of whether it can read them."""
        known = {link.incarnation for link in self.info.handoff_links}
        return self.direct and not known.issuperset(self._peers)

    def meet(self, peers: Collection[worker_pb2.HandoffPeer]) -> None:
        """Have the worker open links to these, whom it may be asked to read from."""
        if not self._peers.keys() >= {peer.incarnation for peer in peers}:
            self._met_at = self._clock.monotonic()
            self._hurry.set()
        self._peers = {peer.incarnation: peer for peer in peers}
        if self._peers.keys() != self._peers_sent:
            self._wake.set()

    @property
    def peer(self) -> worker_pb2.HandoffPeer:
        """The worker as the other half of a direct hand-off knows it."""
        return worker_pb2.HandoffPeer(
            worker_id=self.info.worker_id, incarnation=self.incarnation, address=self.address
        )

    @property
    def connected(self) -> bool:
        """Whether its stream is open."""
        return self._streaming

    @property
    def ready(self) -> bool:
        """Whether requests may be sent there now."""
        return self._streaming and not self.info.draining

    @property
    def num_in_flight(self) -> int:
        """Requests of this router that it runs."""
        return len(self._running)

    @property
    def num_tokens_in_flight(self) -> int:
        """Prompt tokens still to be computed: the larger of what it says and what we know."""
        ours = sum(running.num_tokens for running in self._running.values())
        return max(self.load.num_pending_tokens, ours)

    @property
    def kv_usage(self) -> float:
        """Share of its KV blocks in use."""
        return self.load.kv_usage

    @property
    def kv_bytes_per_token(self) -> int:
        """Of its KV; 0 where it is not known."""
        return self.info.kv_bytes_per_token

    @property
    def num_requests(self) -> int:
        """Requests it has, of all routers: the larger of what it says and what we know."""
        reported = self.load.num_running + self.load.num_waiting + len(self._submitting)
        return max(reported, len(self._running))

    def submit(
        self, request: worker_pb2.SubmitRequest, listener: Listener
    ) -> Coroutine[Any, Any, None]:
        """Queue a request; what the worker says of it goes to `listener` until it is forgotten. It
        counts as load from this call on, before it is awaited.

        Raises:
            DiptychError: (when awaited) the worker refused, or did not answer in time. Whether it
                may all the same run the request is settled by a cancel.
        """
        ticket = request.ticket
        if self._streaming:
            num_tokens = len(request.prompt_token_ids)
            self._running[ticket.request_id] = _Running(listener, ticket.epoch, num_tokens)
        self._submitting.add((ticket.request_id, ticket.epoch))
        return self._submit(request, was_streaming=self._streaming)

    async def _submit(self, request: worker_pb2.SubmitRequest, *, was_streaming: bool) -> None:
        request_id, epoch = request.ticket.request_id, request.ticket.epoch
        accepted = False
        try:
            if not was_streaming:
                raise UnavailableError(f"worker {self.address} has no stream")
            response = await finish(self._stub.Submit(request, timeout=self._times.submit_s))
            self.load = response.load
            accepted = True
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None
        finally:
            self._submitting.discard((request_id, epoch))
            if not accepted:
                self.cancel(request_id, epoch)

    def cancel(self, request_id: str, epoch: int) -> None:
        """End a request there and forget it. Idempotent."""
        self.forget(request_id, epoch)
        self._cancels[request_id] = max(epoch, self._cancels.get(request_id, 0))
        self._wake.set()

    def forget(self, request_id: str, epoch: int) -> None:
        """The request is over: its listener hears no more."""
        self._submitting.discard((request_id, epoch))
        running = self._running.get(request_id)
        if running is not None and running.epoch <= epoch:
            del self._running[request_id]

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self.address)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self._tasks = [
            asyncio.create_task(self._keep_streaming(), name=f"stream {self.address}"),
            asyncio.create_task(self._keep_polling(), name=f"poll {self.address}"),
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._set_streaming(False)
        self._lose_all("the router closes its link")
        await self._channel.close()

    async def _keep_streaming(self) -> None:
        """Open the stream again and again; report requests as lost when that takes too long."""
        backoff_s = _FIRST_BACKOFF_S
        broken_at: float | None = None
        while True:
            was_open = await self._run_session()
            now = self._clock.monotonic()
            if was_open or broken_at is None:
                broken_at, backoff_s = now, _FIRST_BACKOFF_S
            if now - broken_at >= self._times.resume_s:
                self._lose_all(f"worker {self.address} is gone")
            await self._clock.sleep(backoff_s * (0.5 + self._clock.random().random()))
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S, self._times.resume_s)

    async def _run_session(self) -> bool:
        """One stream from opening to end, as a task that silence may cancel. True if it opened."""
        session = asyncio.create_task(self._stream_once(), name=f"session {self.address}")
        self._session = session
        try:
            await asyncio.wait([session])
        finally:
            session.cancel()
            await asyncio.gather(session, return_exceptions=True)
        was_open = self._streaming
        self._set_streaming(False)
        error = None if session.cancelled() else session.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            self._note_refusal(error)
        if isinstance(error, grpc.aio.AioRpcError | DiptychError | asyncio.InvalidStateError):
            logger.debug("stream of %s: %s", self.address, brief(error))
        elif error is not None:
            logger.error("stream of %s", self.address, exc_info=error)
        return was_open

    def _note_refusal(self, error: grpc.aio.AioRpcError) -> None:
        """A worker that does not take us for a router stays away until the keys are right."""
        refused = isinstance(error_from_rpc(error), AuthenticationError)
        if refused and not self._refused:
            logger.warning("worker %s has other ticket keys than this router", self.address)
        self._refused = refused

    async def _stream_once(self) -> None:
        """Open a stream and serve it to its end."""
        await self._poll()
        call = self._stub.Stream()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(self._hello())
            async with asyncio.timeout(self._times.call_s):
                answer = await call.read()
            if answer is grpc.aio.EOF:
                return
            self._on_answer(answer)
            writer = asyncio.create_task(self._write(call), name=f"write {self.address}")
            while (frame := await call.read()) is not grpc.aio.EOF:
                self._on_frame(frame)
        except TimeoutError:
            raise DeadlineError(f"worker {self.address} does not answer a Hello") from None
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    def _hello(self) -> worker_pb2.RouterMessage:
        hello = worker_pb2.Hello(
            router_incarnation=self._router_incarnation,
            protocol_version=PROTOCOL_VERSION,
            worker_incarnation=self._greeted_incarnation,
            last_sequence=self._last_sequence,
            audience=self.info.incarnation,
        )
        if self._keys is not None:
            self._keys.sign_router(hello)
        return worker_pb2.RouterMessage(hello=hello)

    def _on_answer(self, answer: worker_pb2.WorkerFrame) -> None:
        """The first frame of a stream: from where it goes on."""
        if answer.incarnation != self.info.incarnation:
            raise NoStreamError(f"worker {self.address} restarted in between")
        if answer.gap or answer.sequence != self._last_sequence:
            self._lose_all(f"outputs of worker {self.address} are lost")
        self._last_sequence = self._acked_sequence = answer.sequence
        self._greeted_incarnation = answer.incarnation
        self._set_streaming(True)
        logger.info("worker %s (%s) is connected", self.address, self.role.name.lower())

    def _on_frame(self, frame: worker_pb2.WorkerFrame) -> None:
        if frame.sequence <= self._last_sequence:
            return
        expected, self._last_sequence = self._last_sequence + 1, frame.sequence
        try:
            if frame.sequence != expected:
                raise EngineError(f"frame {frame.sequence} came where {expected} was due")
            entries = read_frame(frame)
        except DiptychError as error:
            self._lose_all(f"worker {self.address} cannot be followed: {error.message}")
            return
        self._heard_at = self._clock.monotonic()
        if frame.HasField("load"):
            self.load = frame.load
        key = self.key
        for request_id, entry in entries:
            running = self._running.get(request_id)
            if running is not None:
                running.num_tokens = 0
                running.listener.on_entry(key, entry)
        if self._last_sequence - self._acked_sequence >= _ACK_EVERY_FRAMES:
            self._wake.set()

    async def _write(self, call: Any) -> None:
        """Send cancels and peers at once, acknowledgements with them or when many frames came."""
        self._peers_sent = set()
        # what went into a stream that broke may not have come out of it
        self._cancels = {**self._cancels_sent, **self._cancels}
        self._cancels_sent.clear()
        while True:
            self._wake.clear()
            if self._peers.keys() != self._peers_sent:
                self._peers_sent = set(self._peers)
                peers = worker_pb2.HandoffPeers(peers=self._peers.values())
                await call.write(worker_pb2.RouterMessage(handoff_peers=peers))
            if self._cancels:
                await self._write_cancels(call)
            if self._last_sequence > self._acked_sequence:
                self._acked_sequence = self._last_sequence
                await call.write(
                    worker_pb2.RouterMessage(ack=worker_pb2.Ack(sequence=self._last_sequence))
                )
            await self._wake.wait()

    async def _write_cancels(self, call: Any) -> None:
        cancels, self._cancels = self._cancels, {}
        self._cancels_sent |= cancels
        for request_id in list(self._cancels_sent)[:-_MAX_CANCELS_KEPT]:
            del self._cancels_sent[request_id]
        await call.write(
            worker_pb2.RouterMessage(
                cancel=worker_pb2.Cancel(request_ids=list(cancels), epochs=list(cancels.values()))
            )
        )

    async def _keep_polling(self) -> None:
        """Ask for the worker's state; a worker that is silent for too long is lost."""
        while True:
            await self._pause()
            self._wake.set()
            with contextlib.suppress(grpc.aio.AioRpcError, DiptychError):
                await self._poll()
            if self._clock.monotonic() - self._heard_at > self._times.silence_s:
                if self._session is not None:
                    self._session.cancel()
                self._lose_all(f"worker {self.address} is silent")

    async def _pause(self) -> None:
        """Until the worker is asked again: soon, where links are being tested."""
        if self.tests_links:
            await self._clock.sleep(min(_LINK_POLL_S, self._times.poll_s))
            return
        self._hurry.clear()
        waits = [
            asyncio.ensure_future(self._clock.sleep(self._times.poll_s)),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _poll(self) -> None:
        call = self._stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=self._times.call_s)
        info = await finish(call)
        self._check(info)
        self._heard_at = self._clock.monotonic()
        if info.incarnation != self.info.incarnation:
            self._lose_all(f"worker {self.address} restarted")
            self._set_streaming(False)
            self._last_sequence = self._acked_sequence = 0
            self._greeted_incarnation = ""
            self._cancels.clear()
            self._cancels_sent.clear()
        changed = info.draining != self.info.draining or info.role != self.info.role
        self.info, self.load = info, info.load
        self._readable = {k.incarnation: k.gb_per_s for k in info.handoff_links if not k.failure}
        if any(self.reads(incarnation) is None for incarnation in self._peers):
            # said again: it gives a peer up that cannot be reached for a while
            self._peers_sent.clear()
            self._wake.set()
        if changed:
            self._on_change()

    def _check(self, info: worker_pb2.WorkerInfo) -> None:
        """Say once of a worker that it cannot be one; it is asked again like any that is away."""
        try:
            check_info(info)
        except EngineError as error:
            if not self._refused:
                self._refused = True
                logger.warning("worker %s gets no requests: %s", self.address, error.message)
            raise

    def _set_streaming(self, streaming: bool) -> None:
        if streaming != self._streaming:
            self._streaming = streaming
            self._on_change()

    def _lose_all(self, reason: str) -> None:
        running, self._running = self._running, {}
        key = self.key
        if running:
            logger.warning("%s: %d requests go elsewhere", reason, len(running))
        for request_id, request in running.items():
            # should the worker live on, it must not compute for nobody
            self._cancels[request_id] = request.epoch
            request.listener.on_lost(key, reason)
