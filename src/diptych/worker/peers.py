"""A worker's streams to the workers that it hands KV to, or reads it from.

The decode worker calls, the prefill worker answers: each draws a challenge for the stream, and
tells the other how its memory is read, in its hello, only once the other has shown that it has the
ticket keys. From then on both ends are alike: what follows passes between the two engines unread. A
stream that breaks is opened again. A peer that stays away for `gone_s`, or comes back as another
incarnation, is reported to the engine as gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import grpc

from diptych.clock import Clock
from diptych.connectors.tickets import TicketKeys
from diptych.engine.control_messages import (
    Control,
    FromControl,
    HandoffFigures,
    PeerDown,
    PeerLink,
    PeerUp,
    ToControl,
)
from diptych.errors import (
    AuthenticationError,
    CapacityError,
    DeadlineError,
    DiptychError,
    InvalidRequestError,
    StaleTicketError,
    UnavailableError,
)
from diptych.proto import worker_pb2, worker_pb2_grpc
from diptych.rpc import PROTOCOL_VERSION, open_channel
from diptych.tasks import until_first_ends

logger = logging.getLogger(__name__)

MAX_PEERS = 256
MAX_QUEUED = 1024
NONCE_BYTES = 16
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimes:
    """Deadlines of the streams, in seconds: for a hello, and for a peer that stays away."""

    hello_s: float = 5.0
    gone_s: float = 5.0


class ControlledEngine(Protocol):
    """The engine's side of hand-offs."""

    def send_control(self, message: ToControl) -> None:
        """Pass a message on at once, without a promise."""
        ...

    def controls(self) -> AsyncIterator[FromControl]:
        """What the engine says to its peers and of them, until it is closed. For one reader."""
        ...


@dataclass(slots=True, eq=False)
class _Peer:
    """One incarnation of a worker. `ended` is its stream's: set, the stream is to end."""

    worker_id: str
    incarnation: str
    outgoing: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(MAX_QUEUED))
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    link: PeerLink | None = None


class PeerStreams:
    """All peers of one worker. `pump` must run beside it; `close` ends everything."""

    def __init__(
        self,
        engine: ControlledEngine,
        hello: worker_pb2.HandoffHello,
        clock: Clock,
        times: PeerTimes | None = None,
        keys: TicketKeys | None = None,
    ) -> None:
        """`hello` is what this worker says of itself; without cards it takes no part. With `keys`
        challenges and hellos are signed, and those of others must be."""
        self._keys = keys
        self._engine = engine
        self._hello = hello
        self._clock = clock
        self._times = times or PeerTimes()
        self._peers: dict[str, _Peer] = {}
        self._calls: dict[str, asyncio.Task[None]] = {}
        self._timers: set[asyncio.Task[None]] = set()
        self._closed = False
        self._is_mute = False
        self.num_dropped = 0
        self.figures = HandoffFigures()

    @property
    def direct(self) -> bool:
        """Whether this worker can take part in a direct hand-off, and its engine says something."""
        return bool(self._hello.cards) and not self._is_mute

    def __len__(self) -> int:
        """Peers that the engine knows of."""
        return len(self._peers)

    def links(self) -> list[worker_pb2.HandoffLink]:
        """Workers whose links were tested: how their memory can be read, or why not."""
        return [
            worker_pb2.HandoffLink(
                incarnation=peer.incarnation,
                transport=peer.link.transport,
                gb_per_s=peer.link.gb_per_s,
                failure=peer.link.failure,
            )
            for peer in self._peers.values()
            if peer.link is not None and (peer.link.usable or peer.link.failure)
        ]

    def want(self, peers: Iterable[worker_pb2.HandoffPeer]) -> None:
        """Open streams to these workers, unless they are there or being opened."""
        if not self.direct or self._closed:
            return
        for peer in peers:
            known = peer.incarnation in self._calls
            if known or not peer.address or len(self._calls) >= MAX_PEERS:
                continue
            task = asyncio.create_task(self._keep_calling(peer), name=f"peer {peer.worker_id}")
            self._calls[peer.incarnation] = task
            task.add_done_callback(partial(self._call_ended, peer.incarnation))

    def named_links(self) -> dict[str, PeerLink]:
        """Links that can be read, by worker id."""
        return {
            peer.worker_id: peer.link
            for peer in self._peers.values()
            if peer.link is not None and peer.link.usable
        }

    async def pump(self) -> None:
        """Pass on what the engine says, until it is closed."""
        async for message in self._engine.controls():
            if isinstance(message, HandoffFigures):
                self.figures = message
                continue
            peer = self._peers.get(message.peer)
            if peer is None:
                self.num_dropped += 1
            elif isinstance(message, Control):
                self._queue(peer, message.body)
            else:
                self._note_link(peer, message)
        # without its word no hand-off comes to an end: routers are told of other ways
        self._is_mute = True
        for peer in self._peers.values():
            peer.link = None

    async def answer(self, frames: AsyncIterator[worker_pb2.HandoffFrame], context: Any) -> None:
        """Serve one stream of a decode worker to its end.

        Raises:
            InvalidRequestError: the frames are no challenge and no hello, or do not fit.
            AuthenticationError: the hello is not one of ours.
            UnavailableError: this worker takes no part in direct hand-offs.
            CapacityError: too many peers.
        """
        if not self.direct:
            raise UnavailableError(f"worker {self._hello.worker_id} hands nothing over directly")
        coming = aiter(frames)
        ours = self._challenge()
        try:
            async with asyncio.timeout(self._times.hello_s):
                theirs = _challenge_of(await anext(coming, None))
                if self._keys is not None:
                    self._keys.sign_challenge(ours, theirs)
                await context.write(worker_pb2.HandoffFrame(challenge=ours))
                hello = self._checked(await anext(coming, None), ours, theirs)
        except TimeoutError:
            raise DeadlineError("no hello came") from None
        await context.write(worker_pb2.HandoffFrame(hello=self._signed_hello(theirs)))
        await self._run(hello, coming, context)

    async def close(self) -> None:
        """End every stream; the engine is told nothing more."""
        self._closed = True
        for peer in self._peers.values():
            peer.ended.set()
        tasks = [*self._calls.values(), *self._timers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._peers.clear()

    # -- one stream, either end -------------------------------------------------------------------

    async def _run(self, hello: worker_pb2.HandoffHello, frames: Any, call: Any) -> None:
        """Both ways of one stream until either ends, or another stream of the peer replaces it."""
        peer = self._join(hello)
        ended = peer.ended
        try:
            await until_first_ends(self._read(peer, frames), _write(peer, call), _wait(ended))
        finally:
            if not ended.is_set():
                self._left(peer)

    async def _read(self, peer: _Peer, frames: AsyncIterator[worker_pb2.HandoffFrame]) -> None:
        async for frame in frames:
            if frame.WhichOneof("frame") != "body":
                raise InvalidRequestError("only bodies may follow the hello")
            self._engine.send_control(Control(peer.incarnation, frame.body))

    def _join(self, hello: worker_pb2.HandoffHello) -> _Peer:
        """The peer of a hello; an earlier incarnation of the same worker is gone."""
        for other in list(self._peers.values()):
            if other.worker_id == hello.worker_id and other.incarnation != hello.incarnation:
                self._forget(other, "it restarted")
        peer = self._peers.get(hello.incarnation)
        if peer is None:
            peer = self._peers[hello.incarnation] = _Peer(hello.worker_id, hello.incarnation)
            logger.info("worker %s is a peer", hello.worker_id)
        peer.ended.set()
        peer.ended = asyncio.Event()
        self._engine.send_control(PeerUp(hello.incarnation, hello.cards))
        return peer

    def _left(self, peer: _Peer) -> None:
        """The peer's stream broke: it may return within its time."""
        if self._closed:
            return
        timer = asyncio.create_task(self._await_return(peer, peer.ended))
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)

    async def _await_return(self, peer: _Peer, ended: asyncio.Event) -> None:
        await self._clock.sleep(self._times.gone_s)
        if not ended.is_set():
            self._forget(peer, "its stream did not come back")

    def _forget(self, peer: _Peer, reason: str) -> None:
        logger.warning("worker %s is a peer no more: %s", peer.worker_id, reason)
        del self._peers[peer.incarnation]
        peer.ended.set()
        self._engine.send_control(PeerDown(peer.incarnation))

    def _queue(self, peer: _Peer, body: bytes) -> None:
        """What does not fit is dropped: the engines repeat."""
        try:
            peer.outgoing.put_nowait(body)
        except asyncio.QueueFull:
            self.num_dropped += 1

    def _note_link(self, peer: _Peer, link: PeerLink) -> None:
        peer.link = link
        if link.usable:
            gb_per_s = f"{link.gb_per_s:.2f} GB/s"
            logger.info("%s can be read over %s: %s", peer.worker_id, link.transport, gb_per_s)
        elif link.failure:
            logger.warning("worker %s cannot be read: %s", peer.worker_id, link.failure)

    def _challenge(self) -> worker_pb2.HandoffChallenge:
        """For one stream."""
        return worker_pb2.HandoffChallenge(
            nonce=secrets.token_bytes(NONCE_BYTES), incarnation=self._hello.incarnation
        )

    def _signed_hello(self, theirs: worker_pb2.HandoffChallenge) -> worker_pb2.HandoffHello:
        """For who has sent that challenge."""
        if self._keys is None:
            return self._hello
        hello = worker_pb2.HandoffHello()
        hello.CopyFrom(self._hello)
        self._keys.sign_hello(hello, theirs)
        return hello

    def _checked(
        self,
        frame: worker_pb2.HandoffFrame | None,
        ours: worker_pb2.HandoffChallenge,
        theirs: worker_pb2.HandoffChallenge,
    ) -> worker_pb2.HandoffHello:
        """The hello that a frame must be.

        Raises:
            InvalidRequestError: it is none, or its worker and this one cannot hand over.
            AuthenticationError: none of the ticket keys has signed it for this stream.
            CapacityError: there are too many peers already.
        """
        if frame is None or frame.WhichOneof("frame") != "hello":
            raise InvalidRequestError("the second frame of a hand-off stream must be a hello")
        hello = frame.hello
        if self._keys is not None and not self._keys.verify_hello(hello, ours):
            raise AuthenticationError("the hello's signature does not hold")
        if hello.incarnation != theirs.incarnation:
            raise InvalidRequestError("the hello is of another incarnation than the challenge")
        if not (hello.worker_id and hello.incarnation and hello.cards):
            raise InvalidRequestError("a hello needs a worker id, an incarnation and cards")
        if hello.kv_namespace != self._hello.kv_namespace:
            raise InvalidRequestError("the two workers' KV has nothing in common")
        if abs(hello.protocol_version - PROTOCOL_VERSION) > 1:
            raise InvalidRequestError(
                f"protocol version {hello.protocol_version} is not within one of {PROTOCOL_VERSION}"
            )
        if hello.incarnation not in self._peers and len(self._peers) >= MAX_PEERS:
            raise CapacityError(f"{MAX_PEERS} workers hand over here already")
        return hello

    # -- the calling end --------------------------------------------------------------------------

    async def _keep_calling(self, peer: worker_pb2.HandoffPeer) -> None:
        """Hold a stream to a worker until it is gone for good."""
        backoff_s = _FIRST_BACKOFF_S
        heard_at, problem = self._clock.monotonic(), ""
        async with open_channel(peer.address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
            while self._clock.monotonic() - heard_at < self._times.gone_s:
                opened_at = self._clock.monotonic()
                try:
                    greeted, problem = await self._call(stub, peer)
                    if greeted:
                        heard_at, backoff_s = self._clock.monotonic(), _FIRST_BACKOFF_S
                except StaleTicketError as error:
                    logger.info("%s", error.message)
                    if (known := self._peers.get(peer.incarnation)) is not None:
                        self._forget(known, "it restarted")
                    return
                await self._clock.sleep(backoff_s * (0.5 + self._clock.random().random()))
                if self._clock.monotonic() - opened_at < _MAX_BACKOFF_S:
                    backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
        where = f"worker {peer.worker_id} at {peer.address}"
        logger.warning("%s cannot hand over to this one: %s", where, problem)

    def _call_ended(self, incarnation: str, task: asyncio.Task[None]) -> None:
        del self._calls[incarnation]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a hand-off stream failed", exc_info=error)

    async def _call(self, stub: Any, peer: worker_pb2.HandoffPeer) -> tuple[bool, str]:
        """One stream from opening to end: whether hellos were exchanged, and why it ended.

        Raises:
            StaleTicketError: another incarnation answers there.
        """
        call = stub.Handoff()
        greeted, problem = False, "it closed the stream"
        frames = _frames(call)
        try:
            async with asyncio.timeout(self._times.hello_s):
                hello = await self._exchange(peer, call, frames)
            greeted = True
            await self._run(hello, frames, call)
        except StaleTicketError:
            raise
        except (grpc.aio.AioRpcError, DiptychError, asyncio.InvalidStateError, TimeoutError) as e:
            problem = _brief(e)
            logger.debug("hand-off stream to %s: %s", peer.worker_id, problem)
        finally:
            call.cancel()
        return greeted, problem

    async def _exchange(
        self, peer: worker_pb2.HandoffPeer, call: Any, frames: AsyncIterator[Any]
    ) -> worker_pb2.HandoffHello:
        """The other side's hello, for ours, which is said once our challenge has been answered.

        Raises:
            StaleTicketError: another incarnation answers there.
            InvalidRequestError, AuthenticationError, CapacityError: as `_checked`.
        """
        ours = self._challenge()
        await call.write(worker_pb2.HandoffFrame(challenge=ours))
        theirs = _challenge_of(await anext(frames, None))
        if self._keys is not None and not self._keys.verify_challenge(theirs, ours):
            raise AuthenticationError("the challenge's signature does not hold")
        if theirs.incarnation != peer.incarnation:
            raise StaleTicketError(f"worker {peer.worker_id} restarted")
        await call.write(worker_pb2.HandoffFrame(hello=self._signed_hello(theirs)))
        return self._checked(await anext(frames, None), ours, theirs)


def _challenge_of(frame: worker_pb2.HandoffFrame | None) -> worker_pb2.HandoffChallenge:
    """The challenge of a stream's first frame.

    Raises:
        InvalidRequestError: it is none.
    """
    if frame is None or frame.WhichOneof("frame") != "challenge":
        raise InvalidRequestError("the first frame of a hand-off stream must be a challenge")
    if len(frame.challenge.nonce) != NONCE_BYTES:
        raise InvalidRequestError(f"a challenge has {NONCE_BYTES} bytes")
    return frame.challenge


async def _write(peer: _Peer, call: Any) -> None:
    while True:
        body = await peer.outgoing.get()
        await call.write(worker_pb2.HandoffFrame(body=body))


async def _wait(ended: asyncio.Event) -> None:
    await ended.wait()
    raise UnavailableError("another stream took this one's place, or the worker stops")


async def _frames(call: Any) -> AsyncIterator[worker_pb2.HandoffFrame]:
    """What a call that is written to says."""
    while (frame := await call.read()) is not grpc.aio.EOF:
        yield frame


def _brief(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return str(error.details())
    return str(error) or type(error).__name__
