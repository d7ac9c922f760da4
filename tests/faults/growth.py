"""Memory of processes that live for long: whether it still grows once they are warm.

A process is warm when its memory has been steady for a minute. From then on it may grow by a
twentieth, and one that never gets there in minutes under load is said to grow, too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.faults.counts import private_bytes

STEADY_S, STEADY_SHARE = 60.0, 0.01
LONGEST_WARM_UP_S = 420.0
# Less than that is noise.
NOISE_BYTES = 4 << 20


@dataclass(slots=True)
class _Life:
    """Of one process: since when its memory is what it was then; `warm_bytes` once it is warm."""

    began_at: float
    steady_at: float
    steady_bytes: int
    last_at: float
    last_bytes: int
    warm_bytes: int | None = None


class Growth:
    """`note` all processes that live, every second or so."""

    def __init__(
        self,
        measure: Callable[[int], int] = private_bytes,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._now = now
        self._lives: dict[int, _Life] = {}

    def note(self, pids: Mapping[str, int]) -> None:
        """Measure. Who is not named has ended: its id may be another's next time."""
        now = self._now()
        self._lives = {pid: self._lives[pid] for pid in pids.values() if pid in self._lives}
        for pid in pids.values():
            with contextlib.suppress(OSError):
                self._take(pid, self._measure(pid), now)

    def all_warm(self, pids: Mapping[str, int]) -> bool:
        """Whether the memory of each has been steady for long enough."""
        lives = [self._lives.get(pid) for pid in pids.values()]
        return all(life is not None and life.warm_bytes is not None for life in lives)

    def grown(self, pids: Mapping[str, int], share: float = 0.05) -> dict[str, str]:
        """Processes whose memory grew by more than a share since they were warm."""
        self.note(pids)
        found = {}
        for name, pid in pids.items():
            life = self._lives.get(pid)
            if life is None:
                continue
            if life.warm_bytes is None:
                if life.last_at - life.began_at > LONGEST_WARM_UP_S:
                    found[name] = f"never steady, {life.last_bytes >> 10} KiB by now"
            elif life.last_bytes > life.warm_bytes * (1 + share) + NOISE_BYTES:
                found[name] = f"{life.warm_bytes >> 10} KiB became {life.last_bytes >> 10} KiB"
        return found

    def _take(self, pid: int, num_bytes: int, now: float) -> None:
        life = self._lives.setdefault(pid, _Life(now, now, num_bytes, now, num_bytes))
        life.last_at, life.last_bytes = now, num_bytes
        if life.warm_bytes is not None:
            return
        if num_bytes > life.steady_bytes * (1 + STEADY_SHARE):
            life.steady_at, life.steady_bytes = now, num_bytes
        elif now - life.steady_at > STEADY_S:
            life.warm_bytes = num_bytes
