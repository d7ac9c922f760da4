"""What a process holds, from /proc: descriptors and threads by kind, memory."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")

# What libraries keep for themselves: pools that fill up as work happens to overlap, each with a
# bound of its own. What is named here is per life of a process, over all faults that it lives
# through: a leak of one for each fault is more after a few tests. All else must be back exactly.
POOLED_THREADS = {
    "event_engine": 16,  # gRPC's pool: at most twice the cores, at least 8
    "grpc_global_tim": 2,  # gRPC's timers
    "python": 4,  # executors (asyncio's own, of disks, of store calls) start threads when needed
}
POOLED_DESCRIPTORS = {
    "unix out": 6,  # redis-py keeps as many connections as were ever in use at once
}
_LISTENS = "0A"  # as the kernel names the state


@dataclass(frozen=True, slots=True)
class Held:
    """Of one process, by kind: what a descriptor is of, what a thread calls itself."""

    descriptors: Counter[str]
    threads: Counter[str]

    def beyond(self, before: Held, may_have: Mapping[str, int] | None = None) -> dict[str, int]:
        """What it has more of than before, by kind, apart from what libraries may keep; of some
        kinds of descriptor it `may_have` so many whatever it had."""
        known = before.descriptors | Counter(may_have or {})  # the larger of both
        found = _beyond(self.threads, before.threads, POOLED_THREADS)
        return found | _beyond(self.descriptors, known, POOLED_DESCRIPTORS)


def _beyond(now: Counter[str], before: Mapping[str, int], pooled: dict[str, int]) -> dict[str, int]:
    more = {kind: count - before.get(kind, 0) for kind, count in now.items()}
    return {kind: count for kind, count in more.items() if count > pooled.get(kind, 0)}


def held(pid: int) -> Held:
    """Now.

    Raises:
        OSError: it is gone.
    """
    sockets = _sockets(pid)
    descriptors: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            descriptors[_kind(os.readlink(f"/proc/{pid}/fd/{name}"), sockets)] += 1
    threads: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            threads[Path(f"/proc/{pid}/task/{name}/comm").read_text().strip()] += 1
    return Held(descriptors, threads)


def _kind(link: str, sockets: dict[str, str]) -> str:
    """That of a socket, `pipe`, the name of an anonymous inode, or `file`; memory files by name."""
    if link.startswith("/memfd:"):
        return link.removesuffix(" (deleted)")
    if link.startswith("socket:["):
        return sockets.get(link[8:-1], "socket")
    if link.startswith("anon_inode:"):
        return link.removeprefix("anon_inode:")
    return "file" if link.startswith("/") else link.partition(":")[0]


def _sockets(pid: int) -> dict[str, str]:
    """Kinds of the sockets of a process's network, by inode: `tcp in` and `tcp out` by which end
    has a port that the process listens at, `tcp listen`;
    `unix in` of those that have a name, `unix out` of others."""
    kinds: dict[str, str] = {}
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows += [x.split() for x in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()]
    listening = {row[1].rpartition(":")[2] for row in rows if row[3] == _LISTENS}
    for row in rows:
        end = "in" if row[1].rpartition(":")[2] in listening else "out"
        kinds[row[9]] = "tcp listen" if row[3] == _LISTENS else f"tcp {end}"
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            words = line.split()
            kinds[words[6]] = "unix out" if len(words) == 7 else "unix in"
    return kinds


def private_bytes(pid: int) -> int:
    """Memory of its own: resident without what it shares (mapped pools, libraries)."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


def child_of(pid: int) -> int:
    """The engine of a worker.

    Raises:
        OSError: there is none (yet), or the worker is gone.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if len(children) != 1:
        raise ProcessLookupError(f"process {pid} has {len(children)} children")
    return int(children[0])
