"""The test that each pair of processes passes before KV moves between them, and its bandwidth.

Every process registers two small regions beside its pool, on the same device: `probe`, filled with
a pattern of its own whose checksum is in the endpoint, and `landing`. A reader fetches the probe in
one run, then in reversed fragments, and compares checksums; the better of the timed reads is the
bandwidth that is published.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import numpy as np

from diptych.connectors.transports.base import (
    Memory,
    Peer,
    ReadFailure,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.memory import HostMemory, fresh_memory
from diptych.connectors.xxh3 import xxh3_64

PROBE = "probe"
LANDING = "landing"
HOST_PROBE_BYTES = 4 << 20
DEVICE_PROBE_BYTES = 32 << 20
# of either: the checksum is of all of a probe
LANDING_BYTES = DEVICE_PROBE_BYTES
FRAGMENTS = 64


@dataclass(frozen=True, slots=True)
class Probe:
    """A process's two test regions."""

    probe: Memory
    landing: Memory
    checksum: int

    @classmethod
    def make(cls, device: str, incarnation: str) -> Probe:
        """Allocate and fill them on `device`."""
        size = HOST_PROBE_BYTES if device == "cpu" else DEVICE_PROBE_BYTES
        seed = hashlib.sha256(incarnation.encode()).digest()
        pattern = np.random.Generator(np.random.SFC64(list(seed))).bytes(size)
        probe = fresh_memory(device, size)
        probe.store(0, memoryview(pattern))
        return cls(probe, fresh_memory(device, LANDING_BYTES), xxh3_64(pattern))

    def close(self) -> None:
        """Give the descriptors of host memory back."""
        for memory in (self.probe, self.landing):
            if isinstance(memory, HostMemory):
                memory.close()


class SelfTest:
    """One pair's test over one transport, advanced by `poll`."""

    def __init__(
        self, transport: Transport, peer: Peer, landing: Memory, deadline_s: float
    ) -> None:
        self._transport = transport
        self._peer = peer
        self._landing = landing
        self._deadline_s = deadline_s
        self._size = min(peer.region_bytes(PROBE), landing.num_bytes)
        # the first of each form pays for connecting and mapping
        self._rounds = [False, False, True, True]
        self._round = 0
        self._best_s = float("inf")
        self._handle: ReadHandle | None = None
        self._started_s = 0.0
        self.failure = ""

    @property
    def gb_per_s(self) -> float:
        """Of the fastest read so far; 0 before the first."""
        return self._size / self._best_s / 1e9

    def poll(self) -> ReadState:
        """PENDING until the last round; FAILED leaves `failure`."""
        if self.failure:
            return ReadState.FAILED
        if self._round == len(self._rounds):
            return ReadState.DONE
        if self._handle is None:
            self._start()
        assert self._handle is not None
        state = self._transport.poll(self._handle)
        if state is ReadState.DONE:
            self._finish_round()
        elif state is not ReadState.PENDING:
            self._fail(self._handle.failure or ReadFailure.BACKEND, self._handle.detail)
        return ReadState.FAILED if self.failure else ReadState.PENDING

    def _start(self) -> None:
        self._landing.store(0, memoryview(bytes(self._size)))
        runs = _runs(self._size, reverse=self._rounds[self._round])
        self._started_s = time.perf_counter()
        self._handle = self._transport.read(
            self._peer, PROBE, runs, deadline_s=self._deadline_s, into=LANDING
        )

    def _finish_round(self) -> None:
        self._best_s = min(self._best_s, time.perf_counter() - self._started_s)
        landed = np.empty(self._size, np.uint8)
        self._landing.load(0, landed.data)
        if self._rounds[self._round]:
            landed = np.ascontiguousarray(landed.reshape(FRAGMENTS, -1)[::-1])
        if xxh3_64(landed.data) != self._peer.endpoint.probe_checksum:
            self._fail(ReadFailure.PROTOCOL, "the bytes that came are not those that were sent")
        self._round += 1
        self._handle = None

    def _fail(self, failure: ReadFailure, detail: str) -> None:
        self.failure = f"{failure.value}: {detail}" if detail else failure.value


def _runs(size: int, *, reverse: bool) -> Runs:
    if not reverse:
        return Runs.of([(0, 0, size)])
    piece = size // FRAGMENTS
    src = np.arange(FRAGMENTS, dtype=np.int64) * piece
    return Runs(src, src[::-1].copy(), np.full(FRAGMENTS, piece, np.int64))
