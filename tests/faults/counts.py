"""What a process holds, from /proc: descriptors, threads, memory."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """Counts of one process."""

    descriptors: int
    threads: int


def held(pid: int) -> Held:
    """Now.

    Raises:
        OSError: it is gone.
    """
    return Held(len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task")))


def private_bytes(pid: int) -> int:
    """Memory of its own: resident without what it shares (mapped pools, libraries)."""
    _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(resident) - int(shared)) * PAGE


def described(pid: int) -> str:
    """Its descriptors and threads by kind, for whoever has to find a leak."""
    kinds: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            kinds[os.readlink(f"/proc/{pid}/fd/{name}").split(":")[0]] += 1
        except OSError:
            continue
    threads: Counter[str] = Counter()
    for name in os.listdir(f"/proc/{pid}/task"):
        try:
            threads[Path(f"/proc/{pid}/task/{name}/comm").read_text().strip()] += 1
        except OSError:
            continue
    return f"descriptors {dict(kinds)}, threads {dict(threads)}"


def child_of(pid: int) -> int:
    """The engine of a worker.

    Raises:
        OSError: there is none (yet), or the worker is gone.
    """
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if len(children) != 1:
        raise ProcessLookupError(f"process {pid} has {len(children)} children")
    return int(children[0])
