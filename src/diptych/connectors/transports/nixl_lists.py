"""NIXL's descriptor lists: made once per peer and grain, then reads are arrays of indices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.transports.base import Runs

LOCAL = "NIXL_INIT_AGENT"
# a list of finer pieces than this would be long, and each piece costs microseconds to post
MIN_GRAIN_BYTES = 32 << 10
MAX_ENTRIES = 1 << 20
# indices per run above which runs that were merged are better posted as they are
MAX_SPREAD = 2


class Region(NamedTuple):
    """A registered region of an agent. `kind` is DRAM or VRAM."""

    address: int
    num_bytes: int
    kind: str
    device_id: int


class DescriptorLists:
    """Makes transfers of runs, with prepared lists where the runs lie on a common grid."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._prepared: dict[tuple[str, Region, int, int], Any] = {}

    def make_read(self, peer: str, theirs: Region, ours: Region, runs: Runs) -> Any:
        """A transfer that is ready to be posted. Raises whatever NIXL raises."""
        grain = int(np.gcd.reduce(runs.length))
        spread = runs.num_bytes // grain
        entries = max(theirs.num_bytes, ours.num_bytes) // grain
        if grain < MIN_GRAIN_BYTES or spread > MAX_SPREAD * len(runs) or entries > MAX_ENTRIES:
            return self._explicit(peer, theirs, ours, runs)
        src_phase = runs.src % grain
        dst_phase = runs.dst % grain
        if src_phase.min() != src_phase.max() or dst_phase.min() != dst_phase.max():
            return self._explicit(peer, theirs, ours, runs)
        remote = self._prepare(peer, theirs, grain, int(src_phase[0]))
        local = self._prepare(LOCAL, ours, grain, int(dst_phase[0]))
        return self._agent.make_prepped_xfer(
            "READ", local, _indices(runs.dst, runs, grain), remote, _indices(runs.src, runs, grain)
        )

    def forget(self, peer: str) -> None:
        """Release what was prepared for one peer."""
        for key in [key for key in self._prepared if key[0] == peer]:
            self._prepared.pop(key).release()

    def abandon(self) -> None:
        """The agent goes, and all lists with it."""
        for prepared in self._prepared.values():
            prepared._released = True
        self._prepared.clear()
        self._agent = None

    def _prepare(self, agent: str, region: Region, grain: int, phase: int) -> Any:
        key = (agent, region, grain, phase)
        if key not in self._prepared:
            count = (region.num_bytes - phase) // grain
            # one strided entry: [address, length, device, stride, count]
            row = (region.address + phase, grain, region.device_id, grain, count)
            table = np.array([row], np.uint64)
            self._prepared[key] = self._agent.prep_xfer_dlist(agent, table, region.kind)
        return self._prepared[key]

    def _explicit(self, peer: str, theirs: Region, ours: Region, runs: Runs) -> Any:
        local = self._agent.get_xfer_descs(_table(ours, runs.dst, runs), ours.kind)
        remote = self._agent.get_xfer_descs(_table(theirs, runs.src, runs), theirs.kind)
        return self._agent.initialize_xfer("READ", local, remote, peer)


def _table(region: Region, starts: NDArray[np.int64], runs: Runs) -> NDArray[np.uint64]:
    """`[n, 3]`: address, length, device."""
    device = np.full(len(runs), region.device_id, np.int64)
    table = np.stack([starts + region.address, runs.length, device], axis=1)
    return table.astype(np.uint64)


def _indices(starts: NDArray[np.int64], runs: Runs, grain: int) -> NDArray[np.int32]:
    """Entries of the list that the runs cover, in order."""
    first = starts // grain
    counts = runs.length // grain
    if counts.max() == 1:
        return first.astype(np.int32)
    before = np.cumsum(counts) - counts
    steps = np.arange(int(counts.sum())) - np.repeat(before, counts)
    return (np.repeat(first, counts) + steps).astype(np.int32)
