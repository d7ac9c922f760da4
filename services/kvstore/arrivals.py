"""Readers who wait until something of what they want is stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence

MAX_KEYS = 1 << 18


class Arrivals:
    """Of one loop. Each waiter has a time, and takes its keys with it; who comes when `MAX_KEYS`
    are waited for is told of nothing, and waits all the time."""

    def __init__(self) -> None:
        self._num_keys = 0
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
        if self._num_keys + len(keys) > MAX_KEYS:
            await asyncio.sleep(wait_s)
            return
        event = asyncio.Event()
        self._num_keys += len(keys)
        for key in keys:
            self._waiters.setdefault(key, set()).add(event)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await event.wait()
        finally:
            self._num_keys -= len(keys)
            for key in set(keys):
                waiting = self._waiters[key]
                waiting.discard(event)
                if not waiting:
                    del self._waiters[key]
