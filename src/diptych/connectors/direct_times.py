"""How long the stages of hand-offs took, told at the end; and when the next is to be expected."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from diptych.connectors.base import StepStage

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


class _Stage(NamedTuple):
    """What a request waits for since when."""

    awaited: StepStage
    since_s: float


_NAMES = {
    StepStage.WRITTEN: "taken in to written",
    StepStage.LAUNCHED: "written to launched",
    StepStage.KNOWN: "launched to token 2",
    StepStage.SENT: "token 2 to sent",
}
_FOLLOWING = dict(itertools.pairwise(_NAMES))
# of whoever waits for them: these come without names
_OF_ALL = (StepStage.WRITTEN, StepStage.SENT)
# who ended before the step it was taken into comes no further
_LOST_S = 10.0


class FirstSteps:
    """Follows requests whose KV has come through their first step, until token 2 is sent. For the
    thread that steps."""

    def __init__(self, monotonic: Callable[[], float], times: HandoffTimes) -> None:
        self._monotonic = monotonic
        self._times = times
        self._stages: dict[str, _Stage] = {}

    def begin(self, request_ids: Collection[str]) -> None:
        """These are taken in: they are in the next step, unless they have ended."""
        now = self._monotonic()
        for request_id in [r for r, stage in self._stages.items() if now - stage.since_s > _LOST_S]:
            del self._stages[request_id]
        for request_id in request_ids:
            self._stages[request_id] = _Stage(StepStage.WRITTEN, now)

    def note(self, stage: StepStage, request_ids: Collection[str]) -> None:
        """See `KVConnectorScheduler.note_step`."""
        if not self._stages:
            return
        now = self._monotonic()
        for request_id, (awaited, since_s) in list(self._stages.items()):
            if awaited is not stage or not (request_id in request_ids or stage in _OF_ALL):
                continue
            self._times.add(_NAMES[stage], now - since_s)
            if (following := _FOLLOWING.get(stage)) is not None:
                self._stages[request_id] = _Stage(following, now)
            else:
                del self._stages[request_id]

    def forget(self, request_id: str) -> None:
        """It has ended. If it is in a step, what that gives is yet to be sent."""
        stage = self._stages.get(request_id)
        if stage is not None and stage.awaited is StepStage.WRITTEN:
            del self._stages[request_id]


class Pace:
    """How long something took lately, by the number of tokens that it was done for."""

    def __init__(self) -> None:
        self._token_s = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """It took so long for so many."""
        token_s = seconds / max(1, num_tokens)
        self._token_s += (token_s - self._token_s) * (_WEIGHT if self._token_s else 1.0)

    def expected_s(self, num_tokens: int) -> float:
        """For so many; 0 where nothing is known."""
        return self._token_s * num_tokens
