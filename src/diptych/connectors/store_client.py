"""A client of one KV-store node: synchronous, thread-safe, used from transfer threads.

On the node's own host the client maps the pool and copies in its own process; elsewhere the bytes
take the byte stream. Calls go in batches. Nothing here waits without a deadline, and while the
store is known to be down nothing waits at all: a lost store makes requests slower, not wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import grpc

from diptych.connectors.store_answers import one_each
from diptych.connectors.store_breaker import CircuitBreaker
from diptych.connectors.store_move import not_again
from diptych.connectors.store_pipeline import Pipeline
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult, copy_bytes
from diptych.connectors.store_session import (
    ControlCalls,
    OutOfTimeError,
    Sink,
    StoreSession,
    Written,
)
from diptych.connectors.store_transport import open_mover
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb
from diptych.proto import kvstore_pb2_grpc

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_BATCH_ITEMS = 256
# What a stream takes is seen by others a batch at a time; the next one is sent while the node
# publishes. What is written to mapped memory is published in between.
_BATCH_BYTES = 128 << 20
_MAPPED_BYTES = 1 << 30
# Without bytes behind them keys go in larger batches: what a node takes at once.
_BATCH_KEYS = 4096

# Clients of one process share their connection to a node: those of an engine's scheduler and of its
# worker, of which the scheduler's may ask for the first time after hours.
_CHANNEL_OPTIONS = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # of an attempt: less, and a node that gets no time to run for so long is never reached
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # a store that moved to another address behind its name (another pod, say) is found in seconds
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]


class StoreClient:
    """Puts and gets objects in batches. Threads may share it.

    Args:
        address: host:port of the node's gRPC server.
        timeout_s: deadline of a call that brings none, all its batches together.
        call_timeout_s: deadline of each control message within.
        transport: auto (mapped memory on one host, else the byte stream), memory or stream.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float = 5.0,
        call_timeout_s: float = 2.0,
        transport: str = "auto",
    ) -> None:
        self.address = address
        self._timeout_s = timeout_s
        self._transport = transport
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        stub = kvstore_pb2_grpc.KvStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._calls = ControlCalls(stub, call_timeout_s)
        self._lock = threading.Lock()
        self._session: StoreSession | None = None
        self._breaker = CircuitBreaker(time.monotonic)
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether a call would be tried now; False for a while after a failure."""
        return not (self._closed or self._breaker.is_open)

    def reset(self) -> None:
        """The node has been started anew: try it at once."""
        with self._lock:
            self._drop_session()
            self._breaker.reset()

    def put_many(
        self, items: Sequence[PutItem], timeout_s: float | None = None, tenant: str = ""
    ) -> list[PutResult]:
        """Store objects, prefix first; results in order. A store that is lost makes the items
        UNAVAILABLE, at once while it is known to be lost; it raises nothing. What an item's `write`
        raises is raised."""
        until = self._until(timeout_s)
        results: list[PutResult] = []
        line = Pipeline(
            list(_put_batches(items, _MAPPED_BYTES if self.pools() else _BATCH_BYTES)),
            lambda session, batch: session.ask_put(batch, tenant, until),
        )
        before: Written | None = None
        for batch in line.batches:
            written = self._attempt(
                lambda s: s.put(line.current, line.answer(s), until, line.meanwhile(s)), until
            )
            results += self._finish(before, until)
            lost = [PutResult(Outcome.UNAVAILABLE)] * len(batch)
            before = written or Written(lost, [], [], [])
            line.advance()
        return results + self._finish(before, until)

    def _finish(self, written: Written | None, until: float) -> list[PutResult]:
        """The results of a batch that the node is publishing while the next one is written."""
        if written is None:
            return []
        done = self._attempt(lambda _: written.finish(), until)
        return done or [PutResult(Outcome.UNAVAILABLE)] * len(written.results)

    def get_many(
        self,
        keys: Sequence[bytes],
        sink: Sink,
        timeout_s: float | None = None,
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[GetResult]:
        """Read objects; results in order. `sink(i, view)` copies object i out of a read-only view
        that ends with the call, or returns what is left of that (`Move.touch`). What it took is
        valid only if result i is OK: lease and checksum are verified after the read. A lost store
        is as in `put_many`; what `sink` raises is raised.

        With `wait_s` the objects are being stored: of a batch of which none is there the node waits
        so long for one; and as long as one comes and it `goes_on`, the others are asked for again.
        """
        return self._get(keys, sink, None, timeout_s, wait_s, goes_on)

    def get_into(
        self, keys: Sequence[bytes], targets: Sequence[memoryview], timeout_s: float | None = None
    ) -> list[GetResult]:
        """As `get_many`, object i into `targets[i]`: writable, contiguous, of format B. What lies
        there is valid only if result i is OK; an object of another size is INVALID and leaves its
        target alone. A stream is received right there."""

        def take(at: int, view: memoryview) -> object:
            fits = view.nbytes == targets[at].nbytes
            return partial(copy_bytes, view, targets[at]) if fits else None

        results = self._get(keys, take, targets, timeout_s)
        return [
            GetResult(Outcome.INVALID)
            if result.outcome is Outcome.OK and result.num_bytes != target.nbytes
            else result
            for result, target in zip(results, targets, strict=True)
        ]

    def _get(
        self,
        keys: Sequence[bytes],
        sink: Sink,
        targets: Sequence[memoryview] | None,
        timeout_s: float | None,
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[GetResult]:
        until = self._until(timeout_s)
        results: list[GetResult] = []
        starts = range(0, len(keys), _BATCH_ITEMS)
        line = Pipeline(
            [keys[start : start + _BATCH_ITEMS] for start in starts],
            lambda session, batch: session.ask_get(batch, until, wait_s),
        )
        for start, batch in zip(starts, line.batches, strict=True):
            into = partial(_sink_at, sink, start)
            rooms = None if targets is None else targets[start : start + len(batch)]

            def get(
                session: StoreSession,
                into: Sink = into,
                rooms: Sequence[memoryview] | None = rooms,
            ) -> list[GetResult]:
                ahead, meanwhile = line.answer(session), line.meanwhile(session)
                if wait_s:
                    return session.follow(line.current, ahead, into, until, wait_s, goes_on)
                return session.get(line.current, ahead, into, until, meanwhile, rooms)

            done = self._attempt(get, until)
            results += done or [GetResult(Outcome.UNAVAILABLE)] * len(batch)
            line.advance()
        return results

    def exists_many(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Which objects the store has.

        Raises:
            TransferError: the store does not answer.
        """
        until = self._until(timeout_s)
        present: list[bool] = []
        for start in range(0, len(keys), _BATCH_KEYS):
            batch = keys[start : start + _BATCH_KEYS]
            request = pb.ExistsRequest(keys=batch)
            present += self.ask_each(
                "Exists", request, "present", len(batch), until - time.monotonic()
            )
        return present

    def ask(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """One control message of the contract, by its name.

        Raises:
            TransferError: the store does not answer.
        """
        return self._ask(method, request, timeout_s, lambda answer: answer)

    def ask_each(
        self,
        method: str,
        request: Any,
        field: str,
        num_asked: int,
        timeout_s: float | None = None,
    ) -> Sequence[Any]:
        """As `ask`, of a message whose answer has one entry of `field` for each item.

        Raises:
            TransferError: the store does not answer, or with more entries or fewer.
        """
        return self._ask(
            method, request, timeout_s, lambda answer: one_each(getattr(answer, field), num_asked)
        )

    def _ask(
        self,
        method: str,
        request: Any,
        timeout_s: float | None,
        checked: Callable[[Any], _T],
    ) -> _T:
        until = self._until(timeout_s)
        call = getattr(self._calls.stub, method)
        # needs no way to the bytes: whoever only asks maps no pool
        answer = self._tried(lambda: checked(self._calls.call(call, request, until)))
        if answer is None:
            raise TransferError(f"the KV store at {self.address} does not answer")
        return answer

    def attempt(self, work: Callable[[StoreSession], _T], timeout_s: float | None = None) -> _T:
        """`work` on the node's present incarnation.

        Raises:
            TransferError: the store is lost.
        """
        done = self._attempt(work, self._until(timeout_s))
        if done is None:
            raise TransferError(f"the KV store at {self.address} does not answer")
        return done

    def forget(self, method: str, request: Any) -> None:
        """Tell the node what it would find out by itself; whether it hears it does not matter."""
        if self.usable:
            self._calls.forget(getattr(self._calls.stub, method), request)

    def pools(self) -> list[memoryview]:
        """The node's pool, whole and writable, if it is mapped here."""
        session = self._session
        return [] if session is None else session.mover.pools()

    def close(self) -> None:
        """Drop mapping and connections; to calls under way and later ones the store is lost.
        Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_session()
        self._channel.close()

    def _attempt(self, work: Callable[[StoreSession], _T], until: float) -> _T | None:
        """`work` on the current session, once more on a fresh one if the node has restarted; None
        where the store is lost."""
        return self._tried(lambda: work(self._connect(until)))

    def _tried(self, work: Callable[[], _T]) -> _T | None:
        """As `_attempt`, of work that gets its session itself."""
        for _ in range(2):
            if not self.usable:
                return None
            try:
                result = work()
            except OutOfTimeError:
                return None
            except grpc.RpcError as error:
                # one of a call begun ahead is that call: its frames hold the call, and the session
                # with a pool that would stay mapped until a collection finds the cycle
                error.with_traceback(None)
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    with self._lock:
                        self._drop_session()
                    continue
                self._failed(f"{error.code().name}: {error.details()}")
                return None
            except (OSError, TransferError) as error:
                self._failed(str(error) or type(error).__name__)
                return None
            except BaseException as error:
                with self._lock:
                    self._drop_session()
                if self._closed and isinstance(error, ValueError):
                    return None  # what gRPC says of a channel that was closed
                raise  # the caller's own error; it left a stream out of step
            self._breaker.worked()
            return result
        self._failed("it restarts again and again")
        return None

    def _connect(self, until: float) -> StoreSession:
        with self._lock:
            if self._session is None:
                node = self._calls.call(self._calls.stub.GetNode, pb.GetNodeRequest(), until)
                mover = open_mover(node, self._transport, self._calls.call_timeout_s)
                self._session = StoreSession(self._calls, node.incarnation, mover)
                _log.info(
                    "KV store %s at %s, by %s", node.node_id, self.address, type(mover).__name__
                )
            return self._session

    def _failed(self, reason: str) -> None:
        with self._lock:
            self._drop_session()
            hold_s = self._breaker.failed()
        _log.warning(
            "the KV store at %s failed (%s); next try in %.1f s", self.address, reason, hold_s
        )

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.mover.close()

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def _put_batches(items: Sequence[PutItem], max_bytes: int) -> Iterator[list[PutItem]]:
    batch: list[PutItem] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == _BATCH_ITEMS or num_bytes + item.num_bytes > max_bytes):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


def _sink_at(sink: Sink, start: int, at: int, view: memoryview) -> object:
    return sink(start + at, view)
