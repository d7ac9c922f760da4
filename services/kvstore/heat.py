"""Which objects are read so often that other nodes should share the reads. Pure code."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

_HALF_LIFE_S = 10.0
_MAX_KEYS = 8192


class HeatMap:
    """Reads per second of the objects read lately; the decayed counts of so many keys only.

    Args:
        reads_per_s: of one object, for each copy that should be there; 0 wants no copies.
        max_copies: the most, the object itself included.
    """

    def __init__(
        self, now: Callable[[], float], *, reads_per_s: float = 20.0, max_copies: int = 3
    ) -> None:
        self._now = now
        self._reads_per_s = reads_per_s
        self._max_copies = max_copies
        self._counts: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def note_read(self, key: bytes) -> int:
        """Count a read; returns the copies wanted now, from 1."""
        if not self._reads_per_s:
            return 1
        now = self._now()
        count, at = self._counts.get(key, (0.0, now))
        count = count * 0.5 ** ((now - at) / _HALF_LIFE_S) + 1.0
        self._counts[key] = (count, now)
        self._counts.move_to_end(key)
        if len(self._counts) > _MAX_KEYS:
            self._counts.popitem(last=False)
        # in the steady state a rate r gives a count of r * half life / ln 2
        rate = count * math.log(2) / _HALF_LIFE_S
        return max(1, min(self._max_copies, 1 + int(rate / self._reads_per_s)))
