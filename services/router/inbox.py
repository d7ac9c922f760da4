"""What workers say about one request, on its way to the request's task."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from diptych.services.router.route import Entry


class Event(NamedTuple):
    """An entry of a worker; without one, the worker will say no more."""

    worker_key: str
    entry: Entry | None
    reason: str = ""


class Inbox:
    """What workers say about one request, until its task takes it.

    Bounded by what the request may still produce: a worker that says more is not believed.
    """

    def __init__(self, max_events: int) -> None:
        self._events: deque[Event] = deque()
        self._max_events = max_events
        self._wake = asyncio.Event()

    def on_entry(self, worker_key: str, entry: Entry) -> None:
        if len(self._events) < self._max_events:
            self._put(Event(worker_key, entry))
        elif len(self._events) == self._max_events:
            # said once: what comes after it is of an attempt that is lost
            self.on_lost(worker_key, "the worker says more than the request can produce")

    def on_lost(self, worker_key: str, reason: str) -> None:
        self._put(Event(worker_key, None, reason))

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    async def get(self, timeout_s: float) -> Event | None:
        """The next event; None after the time."""
        if not self._events:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return None
        return self._events.popleft()
