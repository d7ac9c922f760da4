"""The contract of a transport: KV bytes between the memories of two engine processes.

The owner of the *target* memory reads; nobody ever writes into another process. A target cannot
refuse a late write, but a reader always knows which of its own reads are outstanding.

How it is used, on one thread that owns the transport (`thread.TransferThread` is that thread):

    transport = TcpTransport(host, port, ...)       # both sides
    transport.register("kv", memory)                # both sides, before the first offer
    endpoint = Endpoint(..., offers=[transport.offer()])   # source: to the reader, by any way
    peer = transport.connect(endpoint)              # reader; returns at once
    handle = transport.read(peer, "kv", runs, deadline_s=clock.monotonic() + 2.0)
    while transport.poll(handle) is ReadState.PENDING: ...
    transport.disconnect(peer)                      # its incarnation is gone
    transport.close()

A handle ends in DONE or in FAILED with a reason, and in both the target memory is written no more
by it. Between a failure and the proof of that it is QUARANTINED: the read is lost to its owner, but
its blocks must not be used for anything else until `poll` says FAILED. `fence(peer)` says whether
nothing of that peer's can be written any more. Where that cannot be proved soon, `fence` stays
False: blocks are lost to the pool for that long, never to correctness.

What is *not* promised: that the bytes are the ones that the owner of the source meant. A source may
reuse a block while it is read, so the reader asks for a verdict and verifies checksums afterwards.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from diptych.errors import TransferError

KV = "kv"
ENDPOINT_VERSION = 1


class Memory(Protocol):
    """Memory of this process that is read from or into. Offsets and sizes are in bytes."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def address(self) -> int:
        """Its first byte, in this process or on its device."""
        ...

    @property
    def device(self) -> str:
        """`cpu` or `cuda:N`."""
        ...

    @property
    def fd(self) -> int | None:
        """A memfd that another process can map, where the memory is one."""
        ...

    @property
    def view(self) -> memoryview | None:
        """The bytes themselves; None for a device's memory, which is staged by `load`, `store`."""
        ...

    def load(self, offset: int, target: memoryview) -> None:
        """Copy `len(target)` bytes from `offset` to host memory; returns when they are there."""
        ...

    def store(self, offset: int, source: memoryview) -> None:
        """Copy host bytes to `offset`; returns when they are there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """What to read: run i is `length[i]` bytes from `src[i]` in the peer's region to `dst[i]` in
    the local one. All three are int64 `[n]`; no two runs overlap at their target."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.src)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())

    @classmethod
    def of(cls, runs: Sequence[tuple[int, int, int]]) -> Runs:
        """From (src, dst, length) triples."""
        table = np.asarray(runs, np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy())

    @classmethod
    def join(cls, parts: Sequence[Runs]) -> Runs:
        """One after another."""
        if not parts:
            return cls.of([])
        columns = ("src", "dst", "length")
        return cls(*(np.concatenate([getattr(part, c) for part in parts]) for c in columns))

    def split(self, limit_bytes: int) -> Runs:
        """The same bytes in runs of at most `limit_bytes`."""
        if not len(self) or self.length.max() <= limit_bytes:
            return self
        pieces = -(-self.length // limit_bytes)
        first = np.cumsum(pieces) - pieces
        start = (np.arange(int(pieces.sum())) - np.repeat(first, pieces)) * limit_bytes
        length = np.minimum(np.repeat(self.length, pieces) - start, limit_bytes)
        return Runs(
            np.repeat(self.src, pieces) + start, np.repeat(self.dst, pieces) + start, length
        )

    def check(self, src_bytes: int, dst_bytes: int) -> None:
        """Raise unless every run is positive and inside both regions.

        Raises:
            TransferError: says which.
        """
        if not len(self):
            return
        for name, start, end in (("source", self.src, src_bytes), ("target", self.dst, dst_bytes)):
            if start.min() < 0 or int((start + self.length).max()) > end:
                raise TransferError(f"a run lies outside the {name} region of {end} bytes")
        if self.length.min() <= 0:
            raise TransferError("a run is empty")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """How one transport of a process can be reached. Holds a secret: never log it.

    `address` is host:port, or the name of a unix socket; `payload` is the transport's own.
    """

    transport: str
    address: str = ""
    token: bytes = b""
    payload: bytes = b""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a reader must know of a source process. Goes over an authenticated channel only.

    Attributes:
        incarnation: the process's; an endpoint of another incarnation is another peer.
        boot_id: of its host, so that a reader knows whether memory can be shared.
        regions: bytes of each registered region, by name.
        devices: device of each region, by name.
        probe_checksum: xxh3-64 of the region `probe` (`self_test`).
    """

    incarnation: str
    boot_id: str
    regions: dict[str, int]
    devices: dict[str, str]
    offers: list[Offer]
    probe_checksum: int = 0
    version: int = ENDPOINT_VERSION

    def encode(self) -> bytes:
        """For `decode`, on the wire."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Parse what `encode` made.

        Raises:
            TransferError: it is no endpoint, or one of another version.
        """
        try:
            endpoint = msgspec.msgpack.decode(data, type=cls)
        except (ValueError, RecursionError) as error:
            raise TransferError(f"a peer's endpoint cannot be read: {error}") from error
        endpoint.check_version()
        return endpoint

    def check_version(self) -> None:
        """
        Raises:
            TransferError: it is of another version than this worker's.
        """
        if self.version != ENDPOINT_VERSION:
            raise TransferError(
                f"a peer speaks version {self.version} of the transfer endpoint, "
                f"this worker version {ENDPOINT_VERSION}"
            )

    def offer(self, transport: str) -> Offer | None:
        """This transport's offer, if it has one."""
        return next((offer for offer in self.offers if offer.transport == transport), None)


class ReadState(enum.Enum):
    """Where a read stands."""

    PENDING = "pending"
    DONE = "done"
    QUARANTINED = "quarantined"
    FAILED = "failed"


class ReadFailure(enum.StrEnum):
    """Why a read failed."""

    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PEER_GONE = "peer gone"
    REFUSED = "refused"
    TRUNCATED = "truncated"
    PROTOCOL = "protocol"
    BACKEND = "backend"
    CLOSED = "closed"


class Peer:
    """A source process as one transport sees it; a transport adds what it needs.

    `gone` is set once the connection is lost: later reads fail at once, and the owner connects
    anew (with a new endpoint where the incarnation changed).
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.incarnation = endpoint.incarnation
        self.gone = False

    def region_bytes(self, region: str) -> int:
        """Its size; 0 where the peer has none of that name."""
        return self.endpoint.regions.get(region, 0)


@dataclass(slots=True, eq=False)
class ReadHandle:
    """One read. Its fields are the transport's to change, everybody's to look at."""

    peer: Peer
    num_bytes: int
    num_runs: int
    deadline_s: float
    state: ReadState = ReadState.PENDING
    failure: ReadFailure | None = None
    detail: str = field(default="", repr=False)

    @property
    def ended(self) -> bool:
        """Whether its target memory is written no more."""
        return self.state in (ReadState.DONE, ReadState.FAILED)

    def admit(self, runs: Runs, src_bytes: int, dst_bytes: int) -> bool:
        """Whether every run is positive and inside both regions; else the read is REFUSED."""
        try:
            runs.check(src_bytes, dst_bytes)
        except TransferError as error:
            self.fail(ReadFailure.REFUSED, error.message)
        return not self.ended

    def fail(self, failure: ReadFailure, detail: str = "", *, quarantine: bool = False) -> None:
        """Note the first failure; later ones only lift the quarantine."""
        if self.ended:
            return
        if self.failure is None:
            self.failure, self.detail = failure, detail
        self.state = ReadState.QUARANTINED if quarantine else ReadState.FAILED


class Transport(ABC):
    """One way to move bytes. Not thread-safe: one thread calls everything.

    No method but `close` waits for a peer. Nothing here raises for what a peer did; such a read
    is FAILED. `progress` must be called every few milliseconds while other processes may read from
    this one, and `poll` for each handle that has not ended: transports do their work there.
    """

    name: ClassVar[str]

    @abstractmethod
    def register(self, region: str, memory: Memory) -> None:
        """Offer `memory` under a name, to be read from and into. Before `offer` and `connect`.

        Raises:
            TransferError: this transport cannot use that memory.
        """

    @abstractmethod
    def offer(self) -> Offer | None:
        """What peers need to read from here; None where this process cannot be read from."""

    def supports(self, endpoint: Endpoint, region: str = KV) -> bool:
        """Whether a peer could be read from at all, as far as both sides' words tell."""
        return endpoint.offer(self.name) is not None and region in endpoint.regions

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> Peer:
        """Begin to connect; reads may be given at once. An unreachable peer fails its reads.

        Raises:
            TransferError: the endpoint has no offer of this transport, or a bad one.
        """

    @abstractmethod
    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        """Start to read `runs` of the peer's `region` into the local region `into`.

        Args:
            deadline_s: on the monotonic clock; past it the read fails with DEADLINE.

        Returns:
            At once. Runs outside either region make a FAILED handle.
        """

    @abstractmethod
    def poll(self, handle: ReadHandle) -> ReadState:
        """Do what can be done for a read without waiting (at most a few milliseconds)."""

    @abstractmethod
    def cancel(self, handle: ReadHandle) -> None:
        """Give a read up. It becomes FAILED(CANCELLED), perhaps by way of QUARANTINED."""

    @abstractmethod
    def fence(self, peer: Peer) -> bool:
        """Whether no read of this peer's can write any more. Cheap: it may be asked every tick."""

    @abstractmethod
    def disconnect(self, peer: Peer) -> None:
        """Let the peer go: its reads are cancelled, and what it holds of the peer's memory is
        released as soon as they have ended. Idempotent."""

    def progress(self) -> None:
        """Serve peers, where the transport needs the owner's thread for it."""
        return

    def waitables(self) -> Sequence[int]:
        """File descriptors that become readable when `poll` or `progress` has work."""
        return ()

    def tick_s(self) -> float | None:
        """How long the thread may sleep now though no descriptor becomes readable; None: for ever
        (deadlines apart)."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Cancel everything, stop serving, free what is held. Bounded; idempotent. No read writes
        after it."""
