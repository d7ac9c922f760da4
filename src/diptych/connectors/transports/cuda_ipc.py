"""CUDA IPC: between GPUs of one host over NVLink or PCIe, by the reader's copy engines or a kernel.

The reader maps the source's pool and copies out of it, so the source has nothing to do and nothing
of it is ever written. Compared with UCX's use of the same mapping (through NIXL): all runs of a
read are one call, short ones move nearly as fast as long ones, and a read ends microseconds after
its last byte (docs/decisions/0019).

A copy that was begun cannot be called back: a read that is cancelled or late stays QUARANTINED
until its event is over, which takes milliseconds. A source that died leaves its memory to its
readers until they unmap it; whether what they read is valid is decided by its verdict, as ever.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from diptych.connectors.store_wire import boot_id
from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Memory,
    Offer,
    Peer,
    ReadFailure,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.cuda_ipc_memory import (
    ENGINE_RUN_BYTES,
    HANDLE_BYTES,
    CudaPeerMemory,
    PeerMemory,
)
from diptych.connectors.transports.orders import Mark
from diptych.connectors.transports.self_test import LANDING
from diptych.errors import TransferError

_log = logging.getLogger(__name__)

# a read is looked at first when the fastest so far would have ended, then ever more rarely: what is
# seen late is bandwidth that is lost
_MIN_TICK_S = 20e-6
_MAX_TICK_S = 1e-3
_LATENESS = 4
_CLOSE_S = 5.0
_WARM_UP_S = 30.0
# the kernel has a form for each power of two of these, and one for what lies at odd addresses; the
# last is for copy engines
WARM_SIZES = (1, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, ENGINE_RUN_BYTES)
_PROCESS = uuid.uuid4().hex


class _Region(msgspec.Struct, frozen=True):
    """A registered region: the allocation it lies in, and where."""

    handle: bytes
    offset: int


class _Payload(msgspec.Struct, frozen=True):
    """`process` is unique: a process cannot map what is its own."""

    process: str
    regions: dict[str, _Region]


class _Local(NamedTuple):
    memory: Memory
    region: _Region


class _Mapped(NamedTuple):
    """An allocation of another process, mapped here."""

    address: int
    num_bytes: int


class CudaIpcPeer(Peer):
    """A source whose allocations are mapped here; `addresses` of its regions, by name."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__(endpoint)
        self.mapped: dict[bytes, _Mapped] = {}
        self.addresses: dict[str, int] = {}


class _IpcRead(ReadHandle):
    """A read and the event that ends it."""

    __slots__ = ("expected_s", "mark", "posted_s")
    mark: Mark | None
    posted_s: float
    expected_s: float


class CudaIpcTransport(Transport):
    """Reads by mapping the source's GPU memory."""

    name = "cuda_ipc"

    def __init__(
        self,
        open_memory: Callable[[str], PeerMemory] = CudaPeerMemory,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_memory` takes the device of the first region."""
        self._open_memory = open_memory
        self._monotonic = monotonic
        self._memory: PeerMemory | None = None
        self._regions: dict[str, _Local] = {}
        self._peers: set[CudaIpcPeer] = set()
        self._reads: set[_IpcRead] = set()
        self._bytes_per_s = 0.0

    def register(self, region: str, memory: Memory) -> None:
        if not memory.device.startswith("cuda"):
            raise TransferError(f"CUDA IPC does not reach memory on {memory.device}")
        if self._memory is None:
            self._memory = self._open_memory(memory.device)
        self._regions[region] = _Local(memory, _Region(*self._memory.export(memory.address)))

    def offer(self) -> Offer:
        """
        Raises:
            TransferError: the GPU does not copy.
        """
        self._warm_up()
        payload = _Payload(_PROCESS, {name: local.region for name, local in self._regions.items()})
        return Offer(transport=self.name, payload=msgspec.msgpack.encode(payload))

    def supports(self, endpoint: Endpoint, region: str = KV) -> bool:
        offer = endpoint.offer(self.name)
        if offer is None or endpoint.boot_id != boot_id() or region not in self._regions:
            return False
        try:
            payload = _decode(offer)
        except TransferError:
            return True  # `connect` says why
        return payload.process != _PROCESS and region in payload.regions

    def connect(self, endpoint: Endpoint) -> CudaIpcPeer:
        offer = endpoint.offer(self.name)
        if offer is None or self._memory is None:
            raise TransferError("the peer's GPU memory is not offered, or this process has none")
        regions = _decode(offer).regions
        peer = CudaIpcPeer(endpoint)
        try:
            for name, region in regions.items():
                peer.addresses[name] = self._address(peer, name, region)
        except TransferError:
            self._unmap(peer)
            raise
        self._peers.add(peer)
        return peer

    def read(
        self, peer: Peer, region: str, runs: Runs, *, deadline_s: float, into: str = KV
    ) -> ReadHandle:
        assert isinstance(peer, CudaIpcPeer)
        handle = _IpcRead(peer, runs.num_bytes, len(runs), deadline_s)
        handle.mark, handle.posted_s = None, self._monotonic()
        handle.expected_s = handle.num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        target, address = self._regions[into].memory, peer.addresses.get(region)
        size = 0 if address is None else peer.region_bytes(region)
        if peer.gone or self._memory is None:
            handle.fail(ReadFailure.PEER_GONE)
        elif handle.admit(runs, size, target.num_bytes) and not len(runs):
            handle.state = ReadState.DONE
        elif not handle.ended and address is not None:
            handle.mark = self._memory.copy(address, target.address, runs)
            self._reads.add(handle)
        return handle

    def poll(self, handle: ReadHandle) -> ReadState:
        assert isinstance(handle, _IpcRead)
        if handle.mark is not None and handle.mark.query():
            self._ended(handle)
        elif not handle.ended and self._monotonic() >= handle.deadline_s:
            handle.fail(ReadFailure.DEADLINE, quarantine=True)
        return handle.state

    def cancel(self, handle: ReadHandle) -> None:
        if self.poll(handle) is ReadState.PENDING:
            handle.fail(ReadFailure.CANCELLED, quarantine=True)

    def fence(self, peer: Peer) -> bool:
        reads = [read for read in self._reads if read.peer is peer]
        return all(self.poll(read) in (ReadState.DONE, ReadState.FAILED) for read in reads)

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, CudaIpcPeer)
        peer.gone = True
        for read in [read for read in self._reads if read.peer is peer]:
            self.cancel(read)
        self._let_go(peer)

    def progress(self) -> None:
        for peer in [peer for peer in self._peers if peer.gone]:
            self._let_go(peer)

    def tick_s(self) -> float | None:
        if not self._reads:
            return None
        now = self._monotonic()
        # of the one that is to be over first, and of the last that was
        left_s = [read.posted_s + read.expected_s - now for read in self._reads]
        late_s = min((-left for left in left_s if left <= 0), default=0.0)
        return min(max(min(left_s), late_s / _LATENESS, _MIN_TICK_S), _MAX_TICK_S)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        end_s = self._monotonic() + _CLOSE_S
        while self._peers and self._monotonic() < end_s:
            time.sleep(_MIN_TICK_S)
            self.progress()
        if self._peers:
            _log.error("reads over CUDA IPC do not end; their memory stays mapped")

    def _warm_up(self) -> None:
        """Compile the kernel before a peer's time runs, and see whether the engines take batches:
        copy runs of all sizes within the region that tests write."""
        if LANDING not in self._regions:
            return
        assert self._memory is not None
        landing, _ = self._regions[LANDING]
        half = landing.num_bytes // 2
        for size in WARM_SIZES:
            runs = Runs.of([(0, half, min(size, half))])
            mark = self._memory.copy(landing.address, landing.address, runs)
            end_s = self._monotonic() + _WARM_UP_S
            while not mark.query():
                if self._monotonic() >= end_s:
                    raise TransferError("a copy on the GPU does not end")
                time.sleep(_MIN_TICK_S)

    def _ended(self, handle: _IpcRead) -> None:
        self._reads.discard(handle)
        handle.mark = None
        if handle.failure is not None:
            handle.fail(handle.failure)
            return
        handle.state = ReadState.DONE
        seconds = self._monotonic() - handle.posted_s
        if seconds > 0:
            self._bytes_per_s = max(self._bytes_per_s, handle.num_bytes / seconds)

    def _let_go(self, peer: CudaIpcPeer) -> None:
        """Unmap a peer's memory, which must not happen before its reads ended."""
        if peer in self._peers and self.fence(peer):
            self._peers.discard(peer)
            self._unmap(peer)

    def _address(self, peer: CudaIpcPeer, name: str, region: _Region) -> int:
        """Where a peer's region lies here. What it says of its size is held against the mapping:
        a kernel that reads past its end would take the whole process with it."""
        if region.handle not in peer.mapped:
            peer.mapped[region.handle] = self._map(region.handle)
        mapped, size = peer.mapped[region.handle], peer.region_bytes(name)
        if region.offset < 0 or region.offset + size > mapped.num_bytes:
            raise TransferError(f"a peer's region {name} is larger than its memory")
        return mapped.address + region.offset

    def _map(self, handle: bytes) -> _Mapped:
        assert self._memory is not None
        if len(handle) != HANDLE_BYTES:
            raise TransferError("a peer offers what is no handle of GPU memory")
        known = [peer.mapped[handle] for peer in self._peers if handle in peer.mapped]
        return known[0] if known else _Mapped(*self._memory.open(handle))

    def _unmap(self, peer: CudaIpcPeer) -> None:
        assert self._memory is not None
        mapped, peer.mapped = peer.mapped, {}
        peer.addresses.clear()
        for handle, (address, _) in mapped.items():
            if any(handle in other.mapped for other in self._peers):
                continue
            try:
                self._memory.close(address)
            except TransferError as error:
                _log.warning("a peer's GPU memory stays mapped: %s", error.message)


def _decode(offer: Offer) -> _Payload:
    try:
        return msgspec.msgpack.decode(offer.payload, type=_Payload)
    except (ValueError, RecursionError) as error:
        raise TransferError(f"a peer's offer of GPU memory cannot be read: {error}") from error
