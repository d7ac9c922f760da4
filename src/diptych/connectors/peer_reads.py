"""Reading a range of a prompt's KV from another worker: all its ranks, as one read.

A worker publishes a card per rank: who it is, how its pool lies, how it can be reached. A reader
plans once whom it needs, reads a range of tokens from each, and hears one answer: DONE when all of
it is there; FAILED when something failed *and* nothing of it is written any more. A read that lost
one share cancels the others, and is QUARANTINED until the last of them ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from diptych.connectors.base import ITEM_BYTES, KVLayout
from diptych.connectors.direct_shortcut import ShortcutCard
from diptych.connectors.plan import BlockTable, Share, plan_read, plan_sources
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.base import Endpoint, ReadFailure, ReadState
from diptych.connectors.transports.orders import Mark, ReadOrder, ReadResult
from diptych.errors import TransferError


class Reads(Protocol):
    """What is needed of `TransferThread`."""

    def connect(self, peer_id: str, endpoint: Endpoint) -> None: ...
    def disconnect(self, peer_id: str) -> None: ...
    def read(self, order: ReadOrder) -> None: ...
    def cancel(self, read_id: str) -> None: ...
    def take_results(self) -> list[ReadResult]: ...


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a worker, as others must know it to read its pool.

    Attributes:
        kv_namespace: digest of what the KV means (weights, dtypes, RoPE); must be equal.
        shortcut: where the engine can be spoken to from its own host, past the services.
        rank: 0.. over pipeline and tensor ranks; the order of `cards` in which sources are planned.
    """

    kv_namespace: str
    rank: int
    geometry: PoolGeometry
    endpoint: Endpoint
    shortcut: ShortcutCard | None = None


def encode_cards(cards: Sequence[RankCard]) -> bytes:
    """For `decode_cards`. Holds secrets: over authenticated channels only, never in a log."""
    return msgspec.msgpack.encode(list(cards))


def decode_cards(data: bytes) -> list[RankCard]:
    """The cards of one worker, by rank.

    Raises:
        TransferError: they cannot be read, or are of another version.
    """
    try:
        cards = msgspec.msgpack.decode(data, type=list[RankCard])
    except (ValueError, RecursionError) as error:
        raise TransferError(f"a worker's cards cannot be read: {error}") from error
    for card in cards:
        card.endpoint.check_version()
    return sorted(cards, key=lambda card: card.rank)


def geometry_of(
    layout: KVLayout, heads: Span | None = None, layers: Span | None = None
) -> PoolGeometry:
    """How an engine's cache lies; `heads` and `layers` are the global ones that this rank holds.

    Raises:
        TransferError: bytes of its dtype are not known.
    """
    item_bytes = ITEM_BYTES.get(layout.dtype)
    if item_bytes is None:
        raise TransferError(f"KV of {layout.dtype} cannot be read by others")
    return PoolGeometry(
        num_blocks=layout.num_blocks,
        block_size=layout.block_size,
        heads=heads or Span(0, layout.num_kv_heads),
        layers=layers or Span(0, layout.num_layers),
        atom_bytes=layout.head_dim * item_bytes,
        dtype=layout.dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeRead:
    """Tokens [start_token, end_token) of one request, from a connected worker.

    Attributes:
        read_id: not in use; a request's chunk has one of its own.
        incarnation: of the source worker.
        source_blocks: as the source announced them.
        target_blocks: of this engine; fenced by `mark`.
        whole_tail: see `plan_read`.
    """

    read_id: str
    incarnation: str
    source_blocks: BlockTable
    target_blocks: BlockTable
    start_token: int
    end_token: int
    deadline_s: float
    mark: Mark | None = None
    whole_tail: bool = True


@dataclass(frozen=True, slots=True)
class RangeResult:
    """What became of a range. `transports` names those that carried it."""

    read_id: str
    state: ReadState
    failure: ReadFailure | None
    detail: str
    num_bytes: int
    seconds: float
    transports: frozenset[str]


@dataclass(slots=True, eq=False)
class _Worker:
    """A source worker: its pools, and the shares that this rank reads."""

    cards: list[RankCard]
    shares: list[Share]


@dataclass(slots=True, eq=False)
class _Range:
    """One range on its way. `open` are the shares that have not ended."""

    read_id: str
    open: set[str]
    num_bytes: int = 0
    seconds: float = 0.0
    transports: set[str] = field(default_factory=set)
    failure: ReadFailure | None = None
    detail: str = ""
    told: bool = False

    def result(self) -> RangeResult:
        if self.failure is None:
            state = ReadState.DONE
        else:
            state = ReadState.QUARANTINED if self.open else ReadState.FAILED
        return RangeResult(
            self.read_id,
            state,
            self.failure,
            self.detail,
            self.num_bytes,
            self.seconds,
            frozenset(self.transports),
        )


class PeerReads:
    """All reads of one rank. One thread's; it never waits."""

    def __init__(
        self, reads: Reads, geometry: PoolGeometry, kv_namespace: str, rank: int = 0
    ) -> None:
        """`geometry` and `rank` are this engine's."""
        self._reads = reads
        self._geometry = geometry
        self._kv_namespace = kv_namespace
        self._rank = rank
        self._workers: dict[str, _Worker] = {}
        self._ranges: dict[str, _Range] = {}
        self._range_of: dict[str, _Range] = {}
        self._refused: list[RangeResult] = []

    def connect(self, incarnation: str, cards: Sequence[RankCard]) -> None:
        """Meet a worker, or meet it again: only ranks that this one reads are connected.

        Raises:
            TransferError: its KV means something else, or lacks heads or layers.
        """
        for card in cards:
            if card.kv_namespace != self._kv_namespace:
                raise TransferError("the worker's KV is of another model, revision or dtype")
        shares = plan_sources([card.geometry for card in cards], self._geometry, self._rank)
        self._workers[incarnation] = _Worker(list(cards), shares)
        for share in shares:
            self._reads.connect(_peer_id(incarnation, share), cards[share.source].endpoint)

    def disconnect(self, incarnation: str) -> None:
        """Let a worker go: its reads fail. Unknown ones are ignored."""
        worker = self._workers.pop(incarnation, None)
        for share in worker.shares if worker is not None else ():
            self._reads.disconnect(_peer_id(incarnation, share))

    def source_ranks(self, incarnation: str) -> frozenset[int]:
        """The ranks of a connected worker that are read from here; empty where it is unknown."""
        worker = self._workers.get(incarnation)
        shares = worker.shares if worker is not None else []
        return frozenset(share.source for share in shares)

    def read(self, order: RangeRead) -> None:
        """Start to read a range; `take_results` gives what became of it. Never raises: what cannot
        be planned is a FAILED result."""
        worker = self._workers.get(order.incarnation)
        if worker is None:
            self._refuse(order, ReadFailure.PEER_GONE, "the worker is not connected")
        elif order.read_id in self._ranges:
            self._refuse(order, ReadFailure.REFUSED, "its id is in use")
        else:
            try:
                orders = self._plan(worker, order)
            except TransferError as error:
                self._refuse(order, ReadFailure.REFUSED, error.message)
                return
            self._start(order, orders)

    def cancel(self, read_id: str) -> None:
        """Give a range up; it still gives its result. Unknown ids are ignored."""
        if entry := self._ranges.get(read_id):
            self._cancel_open(entry)

    def take_results(self) -> list[RangeResult]:
        """What came since the last call: per range at most one QUARANTINED, then its end."""
        results, self._refused = self._refused, []
        for result in self._reads.take_results():
            entry = self._range_of.get(result.read_id)
            if entry is not None:
                results += self._note(entry, result)
        return results

    @property
    def num_open(self) -> int:
        """Ranges that have not ended."""
        return len(self._ranges)

    def _plan(self, worker: _Worker, order: RangeRead) -> list[ReadOrder]:
        orders = []
        for index, share in enumerate(worker.shares):
            runs = plan_read(
                worker.cards[share.source].geometry,
                self._geometry,
                share,
                order.source_blocks,
                order.target_blocks,
                order.start_token,
                order.end_token,
                whole_tail=order.whole_tail,
            )
            orders.append(
                ReadOrder(
                    read_id=f"{order.read_id}#{index}",
                    peer_id=_peer_id(order.incarnation, share),
                    runs=runs,
                    deadline_s=order.deadline_s,
                    mark=order.mark,
                )
            )
        return orders

    def _start(self, order: RangeRead, orders: list[ReadOrder]) -> None:
        entry = _Range(order.read_id, {share.read_id for share in orders})
        entry.num_bytes = sum(share.runs.num_bytes for share in orders)
        self._ranges[order.read_id] = entry
        for share in orders:
            self._range_of[share.read_id] = entry
            self._reads.read(share)

    def _note(self, entry: _Range, result: ReadResult) -> list[RangeResult]:
        if result.transport:
            entry.transports.add(result.transport)
        entry.seconds = max(entry.seconds, result.seconds)
        if result.state in (ReadState.DONE, ReadState.FAILED):
            entry.open.discard(result.read_id)
            del self._range_of[result.read_id]
        if result.state is not ReadState.DONE and entry.failure is None:
            entry.failure, entry.detail = result.failure, result.detail
            self._cancel_open(entry)
        if not entry.open:
            del self._ranges[entry.read_id]
            return [entry.result()]
        if entry.failure is not None and not entry.told:
            entry.told = True
            return [entry.result()]
        return []

    def _cancel_open(self, entry: _Range) -> None:
        for read_id in sorted(entry.open):
            self._reads.cancel(read_id)

    def _refuse(self, order: RangeRead, failure: ReadFailure, why: str) -> None:
        self._refused.append(
            RangeResult(order.read_id, ReadState.FAILED, failure, why, 0, 0.0, frozenset())
        )


def _peer_id(incarnation: str, share: Share) -> str:
    return f"{incarnation}/{share.source}"
