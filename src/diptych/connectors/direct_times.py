"""How long the stages of hand-offs took, told at the end; and when the next is to be expected."""

from __future__ import annotations

from collections import deque

_KEPT = 4096
_WEIGHT = 0.3


class HandoffTimes:
    """Seconds of each stage; of many hand-offs the last. One thread's."""

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


class Pace:
    """How long prompts took lately from their first announcement to COMMIT, by their length."""

    def __init__(self) -> None:
        self._token_s = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """One that took so long."""
        token_s = seconds / max(1, num_tokens)
        self._token_s += (token_s - self._token_s) * (_WEIGHT if self._token_s else 1.0)

    def expected_s(self, num_tokens: int) -> float:
        """Of one of that length; 0 where nothing is known."""
        return self._token_s * num_tokens
