"""Puts and gets on one incarnation of a node: control messages around moved bytes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from diptych.connectors.store_answers import found, one_each, reserved
from diptych.connectors.store_move import Move
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult, outcome_of
from diptych.connectors.store_transport import Mover
from diptych.proto import kvstore_pb2 as pb

Sink = Callable[[int, memoryview], object]

_FORGET_TIMEOUT_S = 0.5
# What is written is published by so many bytes, while the rest is written; towards the end by
# fewer, so that who waits for it has little left to do then. Where there are no cores to spare each
# call costs the writer half a millisecond: all at once, then.
_PUBLISH_BYTES = 64 << 20
_LAST_BYTES = 16 << 20
_AT_ONCE_BYTES = 256 << 20
# A read is cut here, to look whether its leases need to be renewed.
_READ_BYTES = 256 << 20


def _nothing() -> None:
    return


class OutOfTimeError(Exception):
    """The caller's deadline has passed; that is not the store's fault."""


class ControlCalls:
    """A node's gRPC stub with a deadline on every call."""

    def __init__(self, stub: Any, call_timeout_s: float) -> None:
        self.stub = stub
        self.call_timeout_s = call_timeout_s

    def call(self, method: Any, request: Any, until: float) -> Any:
        """One control message.

        Raises:
            grpc.RpcError: the store does not answer in time, or refuses.
            OutOfTimeError: there is no time left.
        """
        timeout_s = min(self.call_timeout_s, until - time.monotonic())
        if timeout_s <= 0:
            raise OutOfTimeError
        return method(request, timeout=timeout_s)

    def begin(self, method: Any, request: Any, until: float) -> Any:
        """As `call`, but without waiting: a future of the answer.

        Raises:
            OutOfTimeError: there is no time left.
        """
        timeout_s = min(self.call_timeout_s, until - time.monotonic())
        if timeout_s <= 0:
            raise OutOfTimeError
        return method.future(request, timeout=timeout_s)

    def forget(self, method: Any, request: Any) -> None:
        """Give back early what would lapse by itself; whether it succeeds does not matter."""
        with contextlib.suppress(grpc.RpcError):
            method(request, timeout=_FORGET_TIMEOUT_S)


@dataclass(slots=True)
class Ahead:
    """The first question of a batch, asked while the batch before it is moved."""

    answer: Any
    asked_at: float


@dataclass(slots=True)
class Written:
    """A batch whose bytes are in the store; whether they are published, `finish` tells.

    `published` are the answers that are awaited, each of so many items.
    """

    results: list[PutResult]
    granted: list[int]
    checksums: list[int | None]
    published: list[tuple[Any, int]]
    damaged: set[int] = field(default_factory=set)  # positions

    def finish(self) -> list[PutResult]:
        """The batch's results; what was not written in time has EXPIRED.

        Raises:
            grpc.RpcError: the node is lost.
            TransferError: it does not keep to the protocol.
        """
        answers = [one_each(each.result().statuses, count) for each, count in self.published]
        statuses = iter([status for answer in answers for status in answer])
        for at, checksum in zip(self.granted, self.checksums, strict=True):
            unwritten = Outcome.CORRUPT if at in self.damaged else Outcome.EXPIRED
            outcome = unwritten if checksum is None else outcome_of(next(statuses))
            self.results[at] = PutResult(outcome, (checksum or 0) * (outcome is Outcome.OK))
        return self.results


@dataclass(frozen=True, slots=True)
class _Turn:
    """Objects that were read, by their place in the batch; `released` tells whether that counts."""

    leased: dict[int, pb.GetResult]
    checksums: list[int | None]
    released: Any


class StoreSession:
    """One incarnation of the node, and the way to its bytes.

    `ahead` of a put or get is what `ask_put` or `ask_get` gave for the same batch; `meanwhile` is
    called once it is answered, before the bytes are moved: the time to ask for the next batch.
    """

    def __init__(self, calls: ControlCalls, incarnation: str, mover: Mover) -> None:
        self._calls = calls
        self._incarnation = incarnation
        self.mover = mover

    def ask_put(self, items: Sequence[PutItem], tenant: str, until: float) -> Ahead:
        """Reserve room for a batch, without waiting for the answer."""
        request = pb.PutStartRequest(
            items=[pb.PutItem(key=i.key, num_bytes=i.num_bytes) for i in items],
            incarnation=self._incarnation,
            tenant=tenant,
        )
        asked_at = time.monotonic()
        return Ahead(self._calls.begin(self._calls.stub.PutStart, request, until), asked_at)

    def put(
        self,
        items: Sequence[PutItem],
        ahead: Ahead,
        until: float,
        meanwhile: Callable[[], None] = _nothing,
    ) -> Written:
        """Write one batch, and ask for it to be published.

        Raises:
            grpc.RpcError, OSError, TransferError: the node is lost, or another incarnation.
            OutOfTimeError: it took too long.
        """
        sizes = [item.num_bytes for item in items]
        rooms = reserved(ahead.answer.result(), sizes, self.mover.pool_bytes)
        meanwhile()
        results = [PutResult(outcome_of(r.status), r.checksum) for r in rooms]
        granted = [at for at, r in enumerate(rooms) if r.status == pb.ITEM_STATUS_OK]
        if not granted:
            return Written(results, [], [], [])
        # nobody can stop a write into mapped memory: begin none near the reservation's end
        half_s = min(rooms[at].ttl_ms for at in granted) / 2000
        moves = [
            _move(r.put_id, r.placement, items[at].write, items[at].data)
            for at, r in enumerate(rooms)
            if r.status == pb.ITEM_STATUS_OK
        ]
        stub = self._calls.stub
        written = Written(results, granted, [], [])
        try:
            begin_by = ahead.asked_at + half_s
            with contextlib.closing(self.mover.write(moves, until, begin_by)) as sums:
                self._publish(items, moves, sums, written, until)
        except BaseException as error:
            if not isinstance(error, grpc.RpcError):
                ids = [move.id for move in moves]
                self._calls.forget(stub.PutRevoke, pb.PutRevokeRequest(put_ids=ids))
            raise
        unwritten = [m.id for m, sum_ in zip(moves, written.checksums, strict=True) if sum_ is None]
        if unwritten:
            self._calls.forget(stub.PutRevoke, pb.PutRevokeRequest(put_ids=unwritten))
        return written

    def _publish(
        self,
        items: Sequence[PutItem],
        moves: Sequence[Move],
        sums: Iterable[int | None],
        written: Written,
        until: float,
    ) -> None:
        """Ask for what is written to be published, some while the rest is written."""
        ends: list[pb.PutEndItem] = []
        num_bytes, left = 0, sum(move.num_bytes for move in moves)
        for move, at, sum_ in zip(moves, written.granted, sums, strict=True):
            if sum_ is not None and items[at].checksum not in (None, sum_):
                written.damaged.add(at)
                sum_ = None
            written.checksums.append(sum_)
            if sum_ is None:
                continue
            ends.append(pb.PutEndItem(put_id=move.id, checksum=sum_))
            num_bytes += move.num_bytes
            part = min(max(left // 4, _LAST_BYTES), _PUBLISH_BYTES)
            if num_bytes >= (part if self.mover.has_threads else _AT_ONCE_BYTES):
                self._ask_put_end(ends, written, until)
                left -= num_bytes
                ends, num_bytes = [], 0
        if ends:
            self._ask_put_end(ends, written, until)

    def _ask_put_end(self, ends: list[pb.PutEndItem], written: Written, until: float) -> None:
        request = pb.PutEndRequest(items=ends)
        answer = self._calls.begin(self._calls.stub.PutEnd, request, until)
        written.published.append((answer, len(ends)))

    def ask_get(self, keys: Sequence[bytes], until: float, wait_s: float = 0.0) -> Ahead:
        """Find and lease a batch, without waiting for the answer; where none of it is there, the
        node waits so long for one."""
        request = pb.GetRequest(
            keys=keys, incarnation=self._incarnation, wait_ms=math.ceil(wait_s * 1000)
        )
        return Ahead(self._calls.begin(self._calls.stub.Get, request, until), time.monotonic())

    def found(self, ahead: Ahead, num_keys: int) -> Sequence[pb.GetResult]:
        """The answer to `ask_get`. Errors as `put`."""
        return found(ahead.answer.result(), num_keys, self.mover.pool_bytes)

    def get(
        self,
        keys: Sequence[bytes],
        ahead: Ahead,
        sink: Sink,
        until: float,
        meanwhile: Callable[[], None] = _nothing,
        targets: Sequence[memoryview] | None = None,
    ) -> list[GetResult]:
        """One batch; errors as `put`. Objects found damaged are reported to the node.

        Args:
            targets: where objects of just that size may go, instead of through the sink.
        """
        held = self.found(ahead, len(keys))
        meanwhile()
        results = [GetResult(outcome_of(f.status)) for f in held]
        leased = {at: f for at, f in enumerate(held) if f.status == pb.ITEM_STATUS_OK}
        if leased:
            # the leases may have begun while the batch before this one was moved
            self._verify(self._take(leased, sink, ahead.asked_at, until, targets), keys, results)
        return results

    def follow(
        self,
        keys: Sequence[bytes],
        ahead: Ahead,
        sink: Sink,
        until: float,
        wait_s: float,
        goes_on: Callable[[], bool],
    ) -> list[GetResult]:
        """As `get`, of objects that are being stored: takes what is there, and asks for the others
        again meanwhile, as long as there is something of them within `wait_s` and `goes_on`."""
        results = [GetResult(Outcome.NOT_FOUND)] * len(keys)
        left = list(range(len(keys)))
        turns: list[_Turn] = []
        asked: Ahead | None = ahead
        with contextlib.suppress(OutOfTimeError):  # what has been taken by then is good
            while asked is not None:
                held = dict(zip(left, self.found(asked, len(left)), strict=True))
                leased = {at: f for at, f in held.items() if f.status == pb.ITEM_STATUS_OK}
                if not leased:
                    break
                left = [at for at in left if at not in leased]
                asked_at, asked = asked.asked_at, None
                if left and goes_on():
                    asked = self.ask_get([keys[at] for at in left], until, wait_s)
                turns.append(self._take(leased, sink, asked_at, until))
        for turn in turns:
            self._verify(turn, keys, results)
        return results

    def _take(
        self,
        leased: dict[int, pb.GetResult],
        sink: Sink,
        asked_at: float,
        until: float,
        targets: Sequence[memoryview] | None = None,
    ) -> _Turn:
        """Read what was leased, by its place in the batch, and ask for the leases to end."""
        moves = [
            _move(f.lease_id, f.placement, partial(sink, at), targets[at] if targets else None)
            for at, f in leased.items()
        ]
        lease_s = min(f.lease_ms for f in leased.values()) / 1000
        release = self._calls.stub.Release
        request = pb.ReleaseRequest(lease_ids=[move.id for move in moves])
        try:
            checksums = self._read(moves, lease_s, asked_at + lease_s / 2, until)
            return _Turn(leased, checksums, self._calls.begin(release, request, until))
        except BaseException:
            self._calls.forget(release, request)
            raise

    def _verify(self, turn: _Turn, keys: Sequence[bytes], results: list[GetResult]) -> None:
        """A lease that could be released has held until then: this verifies what was read."""
        statuses = one_each(turn.released.result().statuses, len(turn.leased))
        corrupt = []
        for (at, f), sum_, status in zip(
            turn.leased.items(), turn.checksums, statuses, strict=True
        ):
            results[at] = verified(f, sum_, outcome_of(status))
            if results[at].outcome is Outcome.CORRUPT:
                corrupt.append(keys[at])
        if corrupt:
            self._calls.forget(self._calls.stub.Check, pb.CheckRequest(keys=corrupt))

    def holds(self, lease_ids: Sequence[int], until: float, renew_s: float = 0.0) -> list[bool]:
        """Whether leases hold; those that do are renewed. Errors as `put`."""
        request = pb.VerifyLeaseRequest(lease_ids=lease_ids, renew_ms=int(renew_s * 1000))
        statuses = self._calls.call(self._calls.stub.VerifyLease, request, until).statuses
        return [s == pb.ITEM_STATUS_OK for s in one_each(statuses, len(lease_ids))]

    def _read(
        self, moves: Sequence[Move], lease_s: float, renew_at: float, until: float
    ) -> list[int | None]:
        """Read in pieces, and renew the leases of all where they have come to their half."""
        checksums: list[int | None] = []
        for piece in _pieces(moves):
            if time.monotonic() > renew_at:
                self.holds([move.id for move in moves], until, renew_s=lease_s)
                renew_at = time.monotonic() + lease_s / 2
            checksums += self.mover.read(piece, until)
        return checksums


def verified(found: pb.GetResult, checksum: int | None, released: Outcome) -> GetResult:
    """The result of a read: fails closed on a lapsed lease and on a wrong checksum."""
    if checksum is None or released is not Outcome.OK:
        return GetResult(Outcome.EXPIRED)
    if checksum != found.checksum:
        return GetResult(Outcome.CORRUPT)
    num_copies = max(1, found.num_copies)
    return GetResult(Outcome.OK, found.placement.num_bytes, checksum, num_copies)


def _move(
    id_: int,
    placement: pb.Placement,
    touch: Callable[[memoryview], object],
    data: memoryview | None,
) -> Move:
    fits = data is not None and data.nbytes == placement.num_bytes
    return Move(id_, placement.offset_bytes, placement.num_bytes, touch, data if fits else None)


def _pieces(moves: Sequence[Move]) -> Iterator[list[Move]]:
    piece: list[Move] = []
    num_bytes = 0
    for move in moves:
        if piece and num_bytes + move.num_bytes > _READ_BYTES:
            yield piece
            piece, num_bytes = [], 0
        piece.append(move)
        num_bytes += move.num_bytes
    yield piece
