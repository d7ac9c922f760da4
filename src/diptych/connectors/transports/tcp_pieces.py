"""A read over TCP, cut into pieces that fit one request."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.transports.base import Memory, ReadHandle, Runs
from diptych.connectors.transports.tcp_wire import PIECE_BYTES, PIECE_RUNS, REQUEST


class Piece:
    """Some runs of a read. Host memory receives where it is; a device's through `_staged`."""

    __slots__ = ("_dst", "_lengths", "_memory", "_region", "_src", "_staged", "handle", "id")

    def __init__(self, handle: ReadHandle, runs: Runs, memory: Memory, region: int) -> None:
        self.handle = handle
        self.id = 0
        self._src, self._dst, self._lengths = runs.src, runs.dst, runs.length
        self._memory = memory
        self._region = region
        self._staged: memoryview | None = None

    @property
    def num_bytes(self) -> int:
        return int(self._lengths.sum())

    def request(self) -> bytes:
        """The frame that asks for it."""
        table: NDArray[np.int64] = np.stack([self._src, self._lengths], axis=1)
        return REQUEST.pack(self.id, self._region, len(table)) + table.astype("<u8").tobytes()

    def views(self) -> list[memoryview]:
        """Where its bytes go."""
        view = self._memory.view
        if view is None or self._staged is not None:
            if self._staged is None:
                self._staged = memoryview(bytearray(self.num_bytes))
            return [self._staged]
        return [
            view[start : start + length]
            for start, length in zip(self._dst.tolist(), self._lengths.tolist(), strict=True)
        ]

    def drop(self) -> None:
        """Its read is over: what is still to come goes to scratch memory."""
        self._staged = memoryview(bytearray(self.num_bytes))

    def scratch(self, num_bytes: int) -> list[memoryview]:
        """Room for the last `num_bytes` of a piece that was dropped while it was received."""
        assert self._staged is not None
        return [self._staged[:num_bytes]]

    def deliver(self) -> None:
        """All of it is here: bring it to the device, where it was staged."""
        if self._staged is None:
            return
        at = 0
        for start, length in zip(self._dst.tolist(), self._lengths.tolist(), strict=True):
            self._memory.store(start, self._staged[at : at + length])
            at += length
        self._staged = None


def cut(handle: ReadHandle, runs: Runs, memory: Memory, region: int) -> list[Piece]:
    """The pieces of a read, in order."""
    runs = runs.split(PIECE_BYTES)
    if not len(runs):
        return []
    cuts = [0]
    total = 0
    for index, length in enumerate(runs.length.tolist()):
        if total + length > PIECE_BYTES or index - cuts[-1] >= PIECE_RUNS:
            cuts.append(index)
            total = 0
        total += length
    cuts.append(len(runs))
    return [
        Piece(handle, Runs(runs.src[a:b], runs.dst[a:b], runs.length[a:b]), memory, region)
        for a, b in pairwise(cuts)
    ]
