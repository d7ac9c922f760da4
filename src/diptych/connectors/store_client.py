"""A client of one KV-store node: synchronous, thread-safe, used from the transfer thread.

On the node's own host the client maps the pool and copies in its own process; elsewhere the bytes
take the byte stream. Calls go in batches. Nothing here waits without a deadline, and while the
store is known to be down nothing waits at all: a lost store makes requests slower, not wrong.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from diptych.connectors.store_transport import Move, Mover, open_mover
from diptych.errors import TransferError
from diptych.proto import kvstore_pb2 as pb
from diptych.proto import kvstore_pb2_grpc

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A batch is bounded in bytes too, so that its lease and its deadline stay short.
_BATCH_ITEMS = 256
_BATCH_BYTES = 256 << 20
_FORGET_TIMEOUT_S = 0.5
# After a failure calls fail at once for this long; it doubles up to the cap.
_RETRY_S = 0.5
_RETRY_CAP_S = 8.0

_CHANNEL_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # a store that moved to another address behind its name (another pod, say) is found in seconds
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
]


class Outcome(enum.Enum):
    """What became of one item."""

    OK = "ok"
    NOT_FOUND = "not_found"
    EXISTS = "exists"  # put: it is there already and nothing was written; as good as OK
    NO_SPACE = "no_space"
    EXPIRED = "expired"  # the lease or reservation lapsed before the bytes were moved
    CORRUPT = "corrupt"  # the bytes do not have the object's checksum
    INVALID = "invalid"  # bad key or size, or the key's object has another size
    UNAVAILABLE = "unavailable"  # the store does not answer


_OUTCOMES = {
    pb.ITEM_STATUS_OK: Outcome.OK,
    pb.ITEM_STATUS_NOT_FOUND: Outcome.NOT_FOUND,
    pb.ITEM_STATUS_EXISTS: Outcome.EXISTS,
    pb.ITEM_STATUS_NO_SPACE: Outcome.NO_SPACE,
    pb.ITEM_STATUS_EXPIRED: Outcome.EXPIRED,
    pb.ITEM_STATUS_INVALID: Outcome.INVALID,
}


def outcome_of(status: int) -> Outcome:
    """Our name of an `ItemStatus`; one that a newer node made up counts as INVALID."""
    return _OUTCOMES.get(status, Outcome.INVALID)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class PutItem:
    """An object to store. `write` puts its bytes into the view it is given: writable, contiguous,
    `num_bytes` of format B, uninitialised. It is not called when the store has the object or no
    room. With the pool mapped the view is the object's final place."""

    key: bytes
    num_bytes: int
    write: Callable[[memoryview], object]


@dataclass(frozen=True, slots=True)
class PutResult:
    """`checksum` is the xxh3-64 of what the store has now: what was written, or what was there
    before. 0 where it is not known (not stored; or EXISTS because another writer just won)."""

    outcome: Outcome
    checksum: int = 0

    @property
    def stored(self) -> bool:
        """Whether the store has the object now."""
        return self.outcome in (Outcome.OK, Outcome.EXISTS)


@dataclass(frozen=True, slots=True)
class GetResult:
    """`checksum` is the xxh3-64 that was verified; 0 unless OK."""

    outcome: Outcome
    num_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class _Link:
    """One incarnation of the node, and the way to its bytes."""

    incarnation: str
    mover: Mover


class _OutOfTimeError(Exception):
    """The caller's deadline has passed; that is not the store's fault."""


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
        self._address = address
        self._timeout_s = timeout_s
        self._call_timeout_s = call_timeout_s
        self._transport = transport
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._stub: Any = kvstore_pb2_grpc.KvStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._failures = 0
        self._down_until = 0.0
        self._closed = False

    def put_many(self, items: Sequence[PutItem], timeout_s: float | None = None) -> list[PutResult]:
        """Store objects, prefix first; results in order. A store that is lost makes the items
        UNAVAILABLE, at once while it is known to be lost; it raises nothing. What an item's `write`
        raises is raised."""
        until = self._until(timeout_s)
        results: list[PutResult] = []
        for batch in _put_batches(items):
            done = self._attempt(partial(self._put, items=batch, until=until), until)
            results += done or [PutResult(Outcome.UNAVAILABLE)] * len(batch)
        return results

    def get_many(
        self,
        keys: Sequence[bytes],
        sink: Callable[[int, memoryview], object],
        timeout_s: float | None = None,
    ) -> list[GetResult]:
        """Read objects; results in order. `sink(i, view)` copies object i out of a read-only view
        that ends with the call. What it took is valid only if result i is OK: lease and checksum
        are verified after the read. A lost store is as in `put_many`; what `sink` raises is raised.
        """
        until = self._until(timeout_s)
        results: list[GetResult] = []
        for start in range(0, len(keys), _BATCH_ITEMS):
            batch = keys[start : start + _BATCH_ITEMS]
            offset_sink = partial(_sink_at, sink, start)
            work = partial(self._get, keys=batch, sink=offset_sink, until=until)
            done = self._attempt(work, until)
            results += done or [GetResult(Outcome.UNAVAILABLE)] * len(batch)
        return results

    def exists_many(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]:
        """Which objects the store has.

        Raises:
            TransferError: the store does not answer.
        """
        until = self._until(timeout_s)
        present: list[bool] = []
        for start in range(0, len(keys), _BATCH_ITEMS):
            batch = keys[start : start + _BATCH_ITEMS]
            done = self._attempt(partial(self._exists, keys=batch, until=until), until)
            if done is None:
                raise TransferError(f"the KV store at {self._address} does not answer")
            present += done
        return present

    def close(self) -> None:
        """Drop mapping and connections; to calls under way and later ones the store is lost.
        Idempotent."""
        with self._lock:
            self._closed = True
            self._drop_link()
        self._channel.close()

    def _attempt(self, work: Callable[[_Link], _T], until: float) -> _T | None:
        """`work` on the current link, once more on a fresh one if the node has restarted; None
        where the store is lost."""
        for _ in range(2):
            if self._closed or time.monotonic() < self._down_until:
                return None
            try:
                result = work(self._connect(until))
            except _OutOfTimeError:
                return None
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    with self._lock:
                        self._drop_link()
                    continue
                self._failed(f"{error.code().name}: {error.details()}")
                return None
            except (OSError, TransferError) as error:
                self._failed(str(error) or type(error).__name__)
                return None
            except BaseException as error:
                with self._lock:
                    self._drop_link()
                if self._closed and isinstance(error, ValueError):
                    return None  # what gRPC says of a channel that was closed
                raise  # the caller's own error; it left a stream out of step
            self._failures = 0
            return result
        self._failed("it restarts again and again")
        return None

    def _connect(self, until: float) -> _Link:
        with self._lock:
            if self._link is None:
                node = self._call(self._stub.GetNode, pb.GetNodeRequest(), until)
                mover = open_mover(node, self._transport, self._call_timeout_s)
                self._link = _Link(node.incarnation, mover)
                _log.info(
                    "KV store %s at %s, by %s", node.node_id, self._address, type(mover).__name__
                )
            return self._link

    def _failed(self, reason: str) -> None:
        with self._lock:
            self._drop_link()
            hold_s = min(_RETRY_CAP_S, _RETRY_S * 2**self._failures)
            self._failures = min(self._failures + 1, 10)
            self._down_until = time.monotonic() + hold_s
        _log.warning(
            "the KV store at %s failed (%s); next try in %.1f s", self._address, reason, hold_s
        )

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.mover.close()

    def _put(self, link: _Link, items: Sequence[PutItem], until: float) -> list[PutResult]:
        request = pb.PutStartRequest(
            items=[pb.PutItem(key=i.key, num_bytes=i.num_bytes) for i in items],
            incarnation=link.incarnation,
        )
        started = time.monotonic()
        reserved = self._call(self._stub.PutStart, request, until).reservations
        results = [PutResult(outcome_of(r.status), r.checksum) for r in reserved]
        granted = [at for at, r in enumerate(reserved) if r.status == pb.ITEM_STATUS_OK]
        if not granted:
            return results
        # nobody can stop a write into mapped memory: begin none near the reservation's end
        half_s = min(reserved[at].ttl_ms for at in granted) / 2000
        moves = [
            _move(reserved[at].put_id, reserved[at].placement, items[at].write) for at in granted
        ]
        try:
            checksums = link.mover.write(moves, until, begin_by=started + half_s)
            published = self._publish(moves, checksums, until)
        except BaseException as error:
            if not isinstance(error, grpc.RpcError):
                ids = [move.id for move in moves]
                self._forget(self._stub.PutRevoke, pb.PutRevokeRequest(put_ids=ids))
            raise
        unwritten = [m.id for m, sum_ in zip(moves, checksums, strict=True) if sum_ is None]
        if unwritten:
            self._forget(self._stub.PutRevoke, pb.PutRevokeRequest(put_ids=unwritten))
        for at, sum_, outcome in zip(granted, checksums, published, strict=True):
            results[at] = PutResult(outcome, (sum_ or 0) if outcome is Outcome.OK else 0)
        return results

    def _publish(
        self, moves: Sequence[Move], checksums: Sequence[int | None], until: float
    ) -> list[Outcome]:
        """End the puts that were written; the others have EXPIRED."""
        written = [
            pb.PutEndItem(put_id=move.id, checksum=sum_)
            for move, sum_ in zip(moves, checksums, strict=True)
            if sum_ is not None
        ]
        statuses: Iterator[int] = iter(())
        if written:
            request = pb.PutEndRequest(items=written)
            statuses = iter(self._call(self._stub.PutEnd, request, until).statuses)
        return [Outcome.EXPIRED if s is None else outcome_of(next(statuses)) for s in checksums]

    def _get(
        self,
        link: _Link,
        keys: Sequence[bytes],
        sink: Callable[[int, memoryview], object],
        until: float,
    ) -> list[GetResult]:
        request = pb.GetRequest(keys=keys, incarnation=link.incarnation)
        found = self._call(self._stub.Get, request, until).results
        results = [GetResult(outcome_of(f.status)) for f in found]
        leased = [at for at, f in enumerate(found) if f.status == pb.ITEM_STATUS_OK]
        if not leased:
            return results
        moves = [_move(found[at].lease_id, found[at].placement, partial(sink, at)) for at in leased]
        release = pb.ReleaseRequest(lease_ids=[m.id for m in moves])
        try:
            checksums = link.mover.read(moves, until)
        except BaseException:
            self._forget(self._stub.Release, release)
            raise
        # a lease that can be released has held until now: this verifies what was read
        statuses = self._call(self._stub.Release, release, until).statuses
        for at, sum_, status in zip(leased, checksums, statuses, strict=True):
            results[at] = _verified(found[at], sum_, outcome_of(status))
        return results

    def _exists(self, link: _Link, keys: Sequence[bytes], until: float) -> list[bool]:
        return list(self._call(self._stub.Exists, pb.ExistsRequest(keys=keys), until).present)

    def _call(self, method: Any, request: Any, until: float) -> Any:
        """One control message.

        Raises:
            grpc.RpcError: the store does not answer in time, or refuses.
            _OutOfTimeError: there is no time left.
        """
        timeout_s = min(self._call_timeout_s, until - time.monotonic())
        if timeout_s <= 0:
            raise _OutOfTimeError
        return method(request, timeout=timeout_s)

    def _forget(self, method: Any, request: Any) -> None:
        """Give back early what would lapse by itself; whether it succeeds does not matter."""
        with contextlib.suppress(grpc.RpcError):
            method(request, timeout=_FORGET_TIMEOUT_S)

    def _until(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)


def _put_batches(items: Sequence[PutItem]) -> Iterator[list[PutItem]]:
    batch: list[PutItem] = []
    num_bytes = 0
    for item in items:
        if batch and (len(batch) == _BATCH_ITEMS or num_bytes + item.num_bytes > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += item.num_bytes
    if batch:
        yield batch


def _sink_at(
    sink: Callable[[int, memoryview], object], start: int, at: int, view: memoryview
) -> None:
    sink(start + at, view)


def _move(id_: int, placement: pb.Placement, touch: Callable[[memoryview], object]) -> Move:
    return Move(id_, placement.offset_bytes, placement.num_bytes, touch)


def _verified(found: pb.GetResult, checksum: int | None, released: Outcome) -> GetResult:
    """The result of a read: fails closed on a lapsed lease and on a wrong checksum."""
    if checksum is None or released is not Outcome.OK:
        return GetResult(Outcome.EXPIRED)
    if checksum != found.checksum:
        return GetResult(Outcome.CORRUPT)
    return GetResult(Outcome.OK, found.placement.num_bytes, checksum)
