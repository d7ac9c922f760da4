"""When requests come: gaps of a gamma distribution, of which a Poisson process is one."""

from __future__ import annotations

import math
import random


def arrival_times(
    count: int, rate: float, burstiness: float, rng: random.Random, ramp: float = 1.0
) -> list[float]:
    """Seconds after the start at which each of `count` requests is due, ascending.

    The times are stretched so that the last one is due at `count / rate`: two runs of one rate
    offer the same load, whatever the seed.

    Args:
        rate: requests a second; infinite: all at once.
        burstiness: shape of the gaps' gamma distribution: 1 is a Poisson process, less comes in
            bursts, more evenly, infinite at equal distances.
        ramp: the rate at the end over that at the start; the mean stays `rate`.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = [
        1.0 if math.isinf(burstiness) else rng.gammavariate(burstiness, 1.0 / burstiness)
        for _ in range(count)
    ]
    times: list[float] = []
    now = 0.0
    for index, gap in enumerate(gaps):
        now += gap / ramp ** (index / count)
        times.append(now)
    return [time * count / rate / now for time in times]
