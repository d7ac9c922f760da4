"""Time and randomness come through here, so that routing and planning also run in virtual time."""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from typing import Protocol

from diptych import fault_points


class Clock(Protocol):
    """What code that waits or draws needs; `SystemClock` is the real one."""

    def monotonic(self) -> float:
        """Seconds on a clock that never steps."""
        ...

    def unix(self) -> float:
        """Seconds since the epoch; for display only."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        ...

    def random(self) -> random.Random:
        """The source of randomness."""
        ...

    def new_id(self) -> str:
        """A fresh 32-digit hex id."""
        ...


class SystemClock:
    """The machine's time and randomness."""

    def __init__(self) -> None:
        self._random = random.Random(os.urandom(16))

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time() + fault_points.wall_step_s()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

    def random(self) -> random.Random:
        return self._random

    def new_id(self) -> str:
        return uuid.UUID(int=self._random.getrandbits(128)).hex
