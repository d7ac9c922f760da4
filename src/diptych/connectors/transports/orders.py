"""What is asked of the transfer thread, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from diptych.connectors.transports.base import (
    KV,
    ReadFailure,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.links import Link, LinkState


class Mark(Protocol):
    """A device event; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all that was recorded before it is over."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """One read. `mark` is an event of this device that must be over before the target is written
    (the steps that last used its blocks)."""

    read_id: str
    peer_id: str
    runs: Runs
    deadline_s: float
    region: str = KV
    into: str = KV
    mark: Mark | None = None


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What became of a read. `seconds` counts from the order."""

    read_id: str
    state: ReadState
    failure: ReadFailure | None
    detail: str
    num_bytes: int
    seconds: float
    transport: str


@dataclass(frozen=True, slots=True)
class LinkReport:
    """One peer as it is now: for routing, metrics and operators."""

    peer_id: str
    state: LinkState
    transport: str
    bandwidth_gb_per_s: float
    failures: dict[str, str]

    @classmethod
    def of(cls, link: Link) -> LinkReport:
        return cls(
            link.peer_id,
            link.state if link.usable else LinkState.DOWN,
            link.transport.name if link.transport is not None else "",
            link.bandwidth_gb_per_s,
            dict(link.failures),
        )


@dataclass(slots=True, eq=False)
class PendingRead:
    """A read until its last result: first without a handle, then as its handle says."""

    order: ReadOrder
    ordered_s: float
    transport: Transport | None = None
    handle: ReadHandle | None = None
    cancelled: bool = False
    quarantine_reported: bool = False
    _failure: ReadFailure | None = None
    _detail: str = ""

    @property
    def state(self) -> ReadState:
        if self.handle is not None:
            return self.handle.state
        return ReadState.PENDING if self._failure is None else ReadState.FAILED

    @property
    def ended(self) -> bool:
        return self.state in (ReadState.DONE, ReadState.FAILED)

    def post(self, link: Link) -> None:
        """Give it to its link's transport."""
        assert link.transport is not None
        assert link.peer is not None
        order = self.order
        self.transport = link.transport
        self.handle = link.transport.read(
            link.peer, order.region, order.runs, deadline_s=order.deadline_s, into=order.into
        )

    def poll(self) -> None:
        if self.transport is not None and self.handle is not None:
            self.transport.poll(self.handle)

    def cancel(self) -> None:
        self.cancelled = True
        if self.transport is not None and self.handle is not None:
            self.transport.cancel(self.handle)

    def fail(self, failure: ReadFailure, detail: str = "") -> None:
        """It was never posted, and never will be."""
        self._failure, self._detail = failure, detail

    def result(self, now_s: float) -> ReadResult:
        """As it stands."""
        handle = self.handle
        return ReadResult(
            read_id=self.order.read_id,
            state=self.state,
            failure=self._failure if handle is None else handle.failure,
            detail=self._detail if handle is None else handle.detail,
            num_bytes=self.order.runs.num_bytes,
            seconds=now_s - self.ordered_s,
            transport=self.transport.name if self.transport is not None else "",
        )


@dataclass(slots=True)
class TransferCounters:
    """Since the start. `late_s` is how much later than asked the thread ran: other threads held
    the interpreter, or the machine was busy."""

    reads_done: int = 0
    reads_failed: int = 0
    bytes_read: int = 0
    read_seconds: float = 0.0
    late_s: float = 0.0
    wakes: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def count(self, result: ReadResult) -> None:
        """Note a read's end."""
        if result.state is ReadState.DONE:
            self.reads_done += 1
            self.bytes_read += result.num_bytes
            self.read_seconds += result.seconds
        else:
            self.reads_failed += 1
            name = (result.failure or ReadFailure.BACKEND).value
            self.failures[name] = self.failures.get(name, 0) + 1
