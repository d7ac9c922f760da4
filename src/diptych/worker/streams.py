"""The streams of all routers: each step's frames go out, gone routers are let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from diptych.clock import Clock
from diptych.connectors.tickets import MAX_ROUTERS
from diptych.errors import CapacityError, DiptychError, UnavailableError
from diptych.proto import worker_pb2
from diptych.worker.stream_state import PairState, StreamState

logger = logging.getLogger(__name__)


class _Pair:
    """A pair's state, and the event that wakes its stream."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.wake = asyncio.Event()


class StreamHub:
    """All pairs of this worker.

    `on_joined(router)` is called when a pair begins, `on_left(router)` when it is forgotten, after
    its grace, at its bound or at a gap (then it begins anew at once): its requests are to be
    aborted.
    """

    def __init__(
        self,
        incarnation: str,
        *,
        max_frames: int,
        grace_s: float,
        clock: Clock,
        on_joined: Callable[[str], None],
        on_left: Callable[[str], None],
    ) -> None:
        self._incarnation = incarnation
        self._max_frames = max_frames
        self._grace_s = grace_s
        self._clock = clock
        self._on_joined = on_joined
        self._on_left = on_left
        self._pairs: dict[str, _Pair] = {}
        self._timers: set[asyncio.Task[None]] = set()
        self._failure: DiptychError | None = None

    def __contains__(self, router: str) -> bool:
        return router in self._pairs

    def __len__(self) -> int:
        return len(self._pairs)

    @property
    def flushed(self) -> bool:
        """Whether no router's stream has anything left to send."""
        return all(pair.state.flushed for pair in self._pairs.values())

    async def attach(
        self, hello: worker_pb2.Hello, load: worker_pb2.WorkerLoad
    ) -> AsyncGenerator[worker_pb2.WorkerFrame]:
        """The frames for one stream of a router, until it is closed.

        Raises:
            CapacityError: too many routers have streams here.
            UnavailableError: another stream replaced this one, or the router was dropped.
            EngineDeadError: the engine is gone.
        """
        router = hello.router_incarnation
        pair = self._pairs.get(router)
        if pair is None and len(self._pairs) >= MAX_ROUTERS:
            raise CapacityError(f"{MAX_ROUTERS} routers have streams here already")
        if pair is None:
            pair = self._pairs[router] = self._new_pair()
            self._on_joined(router)
        answer = pair.state.hello(hello.worker_incarnation, hello.last_sequence)
        generation = pair.state.generation
        pair.wake.set()  # ends the stream that this one replaces
        if answer.gap:
            logger.warning("router %s cannot resume from %d", router, hello.last_sequence)
            self._on_left(router)
            self._on_joined(router)
        answer.load.CopyFrom(load)
        try:
            yield answer
            async for frame in self._frames(router, pair, generation):
                yield frame
        finally:
            self._detach(router, pair, generation)

    def push(self, router: str, frame: worker_pb2.WorkerFrame) -> None:
        """A step's frame for a router; one that is not known is ignored."""
        pair = self._pairs.get(router)
        if pair is None:
            return
        pair.state.push(frame)
        pair.wake.set()
        if pair.state.state is PairState.DROPPED:
            logger.warning("router %s is dropped: it takes no frames", router)
            self._forget(router, pair)

    def ack(self, router: str, sequence: int) -> None:
        """The router has received frames up to `sequence`."""
        pair = self._pairs.get(router)
        if pair is not None:
            pair.state.ack(sequence)
            pair.wake.set()  # a full window has room again

    def fail(self, error: DiptychError) -> None:
        """End every stream with `error`, now and from now on."""
        self._failure = error
        for pair in self._pairs.values():
            pair.wake.set()

    async def close(self) -> None:
        """Stop the grace timers."""
        for timer in self._timers:
            timer.cancel()
        await asyncio.gather(*self._timers, return_exceptions=True)

    def _new_pair(self) -> _Pair:
        return _Pair(
            StreamState(self._incarnation, max_frames=self._max_frames, grace_s=self._grace_s)
        )

    async def _frames(
        self, router: str, pair: _Pair, generation: int
    ) -> AsyncIterator[worker_pb2.WorkerFrame]:
        while True:
            pair.wake.clear()
            if self._failure is not None:
                raise self._failure
            if pair.state.generation != generation:
                raise UnavailableError(f"router {router} has opened another stream")
            if pair.state.state is PairState.DROPPED:
                raise UnavailableError(f"router {router} was dropped: it took no frames")
            frame = pair.state.next_frame(generation)
            if frame is None:
                await pair.wake.wait()
            else:
                yield frame

    def _detach(self, router: str, pair: _Pair, generation: int) -> None:
        if self._pairs.get(router) is not pair:
            return
        pair.state.detach(generation, self._clock.monotonic())
        if pair.state.state is PairState.DETACHED:
            timer = asyncio.create_task(self._expire(router, pair))
            self._timers.add(timer)
            timer.add_done_callback(self._timers.discard)

    async def _expire(self, router: str, pair: _Pair) -> None:
        await self._clock.sleep(self._grace_s)
        if self._pairs.get(router) is pair and pair.state.expired(self._clock.monotonic()):
            logger.warning("router %s is gone for %s s", router, self._grace_s)
            self._forget(router, pair)

    def _forget(self, router: str, pair: _Pair) -> None:
        del self._pairs[router]
        pair.wake.set()
        self._on_left(router)
