"""How long the stages of hand-offs took on decode's side, told once at the end. One thread's."""

from __future__ import annotations

from collections import deque

_KEPT = 4096


class HandoffTimes:
    """Seconds of each stage; of many hand-offs the last."""

    def __init__(self) -> None:
        self._stages: dict[str, deque[float]] = {}

    def add(self, stage: str, seconds: float) -> None:
        self._stages.setdefault(stage, deque(maxlen=_KEPT)).append(seconds)

    def summary(self) -> str:
        """Median and p99 of each stage in milliseconds; empty if there was none."""
        parts = []
        for stage, seconds in self._stages.items():
            ordered = sorted(seconds)
            median, late = (ordered[int(q * (len(ordered) - 1))] * 1e3 for q in (0.5, 0.99))
            parts.append(f"{stage} {median:.2f} (p99 {late:.2f}) ms")
        return ", ".join(parts)
