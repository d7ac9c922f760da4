"""How often keys were used lately, in little memory: a count-min sketch that ages."""

from __future__ import annotations

_ROWS = 4
_MOST = 15


class FrequencySketch:
    """Counts up to 15 per key, never too low for what it saw since the last ageing.

    All counts are halved after `10 * width` uses, so that what was popular once gives way. Keys are
    hashes already: four slices of one pick its four counters.
    """

    def __init__(self, width: int = 1 << 16) -> None:
        if width <= 0 or width & (width - 1):
            raise ValueError(f"the width must be a power of two, not {width}")
        self._mask = width - 1
        self._counts = [bytearray(width) for _ in range(_ROWS)]
        self._uses_left = self._period = 10 * width

    def add(self, key: bytes) -> int:
        """Count a use; returns the estimate that includes it."""
        estimate = self.estimate(key)
        if estimate < _MOST:
            for row, place in self._places(key):
                row[place] = max(row[place], estimate + 1)
        self._uses_left -= 1
        if self._uses_left == 0:
            self._age()
        return min(_MOST, estimate + 1)

    def estimate(self, key: bytes) -> int:
        """Uses of the key."""
        return min(row[place] for row, place in self._places(key))

    def _places(self, key: bytes) -> list[tuple[bytearray, int]]:
        return [
            (row, int.from_bytes(key[4 * i : 4 * i + 4], "little") & self._mask)
            for i, row in enumerate(self._counts)
        ]

    def _age(self) -> None:
        halves = bytes(value >> 1 for value in range(256))
        self._counts = [bytearray(row.translate(halves)) for row in self._counts]
        self._uses_left = self._period
