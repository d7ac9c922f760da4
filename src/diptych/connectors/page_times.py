"""How long the stages of hand-offs by way of the store took, told at the end."""

from __future__ import annotations

import time
from collections.abc import Callable

from diptych.connectors.direct_times import FirstSteps, HandoffTimes, Pace
from diptych.connectors.transfer_jobs import Load, Save


class PageTimes:
    """Not thread-safe: its user has a lock.

    Of the one who computed: from the end of the last step to the first byte's copy, to the store's
    word that it has all, to the commit's being told. Of the one who loads: from the request's
    arrival to its order, to the transfer's begin, to that of the last object's copy, to the store's
    word that all of it held, to the request's being taken into a step.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._given = HandoffTimes()
        self._taken = HandoffTimes()
        self._untold: dict[str, float] = {}
        # from the begin of the last object's copy to the end of its load
        self.last_pace = Pace()
        self._stepped = HandoffTimes()
        # of the thread that steps, and nobody else's
        self.first_steps = FirstSteps(monotonic, self._stepped)

    def stored(self, save: Save, now: float) -> None:
        """The last save of a prompt has ended, and its hand-off is reported."""
        begun_s = max(save.begun_s, save.computed_s)
        self._given.add("computed to begun", begun_s - save.computed_s)
        self._given.add("begun to stored", now - begun_s)
        self._untold[save.order.request_id] = now

    def told(self, request_ids: set[str], now: float) -> None:
        """These commits go to the router."""
        for request_id in request_ids:
            if (stored_s := self._untold.pop(request_id, None)) is not None:
                self._given.add("stored to told", now - stored_s)

    def valid(self, load: Load, now: float) -> None:
        """All of a hand-off has come, and holds."""
        read_s = max(load.read_s, load.begun_s)
        self._taken.add("told to ordered", load.ordered_s - load.order.told_s)
        self._taken.add("ordered to begun", load.begun_s - load.ordered_s)
        self._taken.add("begun to read", read_s - load.begun_s)
        self._taken.add("read to valid", now - read_s)
        self.last_pace.note(1, now - read_s)
        self._untold[load.order.request_id] = now

    def taken_in(self, request_ids: set[str], now: float) -> None:
        """The scheduler knows of these loads."""
        for request_id in request_ids:
            if (valid_s := self._untold.pop(request_id, None)) is not None:
                self._taken.add("valid to taken in", now - valid_s)

    def lines(self) -> list[str]:
        """Medians for the log; none where there was nothing."""
        lines = []
        if given := self._given.summary():
            lines.append(f"stored hand-offs, medians: {given}")
        if taken := self._taken.summary():
            stepped = self._stepped.summary()
            lines.append(f"loaded hand-offs, medians: {', '.join(filter(None, (taken, stepped)))}")
        return lines
