"""Readers who wait until something of what they want is stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence


class Arrivals:
    """Of one loop. Bounded by its waiters: each has a time, and takes its keys with it."""

    def __init__(self) -> None:
        self._waiters: dict[bytes, set[asyncio.Event]] = {}

    @property
    def awaited(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    def note(self, keys: Iterable[bytes]) -> None:
        """These objects may have become complete."""
        for key in keys:
            for event in self._waiters.get(key, ()):
                event.set()

    async def wait(self, keys: Sequence[bytes], wait_s: float) -> None:
        """Until one of the keys is noted, at most so long."""
        event = asyncio.Event()
        for key in keys:
            self._waiters.setdefault(key, set()).add(event)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await event.wait()
        finally:
            for key in set(keys):
                waiting = self._waiters[key]
                waiting.discard(event)
                if not waiting:
                    del self._waiters[key]
