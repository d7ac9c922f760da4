"""When a node that failed may be asked again. Pure code."""

from __future__ import annotations

from collections.abc import Callable

# After a failure calls fail at once for this long; it doubles up to the cap.
_HOLD_S = 0.5
_HOLD_CAP_S = 8.0


class CircuitBreaker:
    """Open for a while after a failure, longer after each further one. Not thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failures = 0
        self._open_until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the node is left alone now."""
        return self._now() < self._open_until

    def failed(self) -> float:
        """Note a failure; returns the seconds for which the node is left alone."""
        hold_s: float = min(_HOLD_CAP_S, _HOLD_S * 2**self._failures)
        self._failures = min(self._failures + 1, 10)
        self._open_until = self._now() + hold_s
        return hold_s

    def worked(self) -> None:
        """Note a success."""
        self._failures = 0

    def reset(self) -> None:
        """The node is a new one: what was known of it is void."""
        self._failures = 0
        self._open_until = 0.0
