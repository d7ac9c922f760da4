"""When the step that runs will end, by those before it, and how long the next takes to be launched.

Pure but for the clock. Only steps that decode are predicted: they are alike, and a prompt's step is
like no other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_WEIGHT = 0.2
# who waited less for a step's end does not know when that was
_SEEN_S = 50e-6
# the next step is given to the device so much sooner than it would just do
_MARGIN_S = 0.3e-3
# for KV that comes after a step's end the device is left without one for this share of a step at
# most: its coming a whole step later costs who waits for it more than that costs all others
_HELD_SHARE = 0.5
_MOST_HELD_S = 2.5e-3


@dataclass(slots=True)
class _Launched:
    """A step that the device was given. `is_exact` says whether its start is known, or only that it
    was not before; `ended` whether somebody has waited for its end."""

    decodes: bool
    at_s: float
    start_s: float = 0.0
    is_exact: bool = False
    ended: bool = False


class StepTimes:
    """Steps in the order in which a device does them, at most two at a time."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._steps: deque[_Launched] = deque()
        self._step_s = 0.0
        self._launch_s = 0.0

    def launched(self, begun_s: float, *, decodes: bool) -> None:
        """A step that was begun to be planned at `begun_s` is with the device now."""
        now = self._monotonic()
        step = _Launched(decodes, now)
        if not self._steps or self._steps[-1].ended:
            step.start_s, step.is_exact = now, True
        self._steps.append(step)
        if decodes:
            self._launch_s = _smoothed(self._launch_s, now - begun_s)

    def waited(self, since_s: float) -> None:
        """The oldest step is over; that was waited for since `since_s`."""
        if not self._steps or self._steps[0].ended:
            return
        now, step = self._monotonic(), self._steps[0]
        step.ended = True
        seen = now - since_s >= _SEEN_S
        took_s = now - step.start_s
        if seen and step.is_exact and step.decodes:
            self._step_s = _smoothed(self._step_s, took_s)
        elif step.is_exact and step.decodes:
            self._step_s = min(self._step_s, took_s)  # it took less than was expected
        for behind in list(self._steps)[1:]:
            behind.start_s, behind.is_exact = (now, True) if seen else (behind.at_s, False)

    def settled(self) -> None:
        """The oldest step's results were taken."""
        self._steps.popleft()

    @property
    def end_s(self) -> float | None:
        """When the step that runs will end; None where nobody knows."""
        running = next((step for step in self._steps if not step.ended), None)
        if running is None or not running.start_s or not running.decodes or not self._step_s:
            return None
        return running.start_s + self._step_s

    @property
    def launch_at_s(self) -> float | None:
        """When the next step is to be planned, for the device to have it just in time."""
        end_s = self.end_s
        return None if end_s is None else end_s - self._launch_s - _MARGIN_S

    @property
    def most_held_s(self) -> float:
        """How long the device may be without a step for the sake of KV that is about to arrive."""
        return min(self._step_s * _HELD_SHARE or _MOST_HELD_S, _MOST_HELD_S)


def _smoothed(known_s: float, seconds: float) -> float:
    return known_s + (seconds - known_s) * _WEIGHT if known_s else seconds
