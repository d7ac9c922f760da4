"""What the server itself counted during a run: a histogram of its metrics, before and after."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GAP = "diptych:first_to_second_token_seconds"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A histogram at one moment: sum in seconds, and counts by upper bounds, which add up."""

    total_s: float = 0.0
    count: float = 0.0
    bounds: dict[float, float] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, name: str) -> Snapshot:
        """One histogram of a metrics page, summed over its labels; empty if it is not there."""
        total = count = 0.0
        bounds: dict[float, float] = {}
        for family in text_string_to_metric_families(text):
            if family.name != name:
                continue
            for sample in family.samples:
                if sample.name == f"{name}_sum":
                    total += sample.value
                elif sample.name == f"{name}_count":
                    count += sample.value
                elif sample.name == f"{name}_bucket":
                    bound = float(sample.labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sample.value
        return cls(total, count, bounds)

    def since(self, before: Snapshot) -> Snapshot:
        """What came in between."""
        return Snapshot(
            self.total_s - before.total_s,
            self.count - before.count,
            {bound: n - before.bounds.get(bound, 0.0) for bound, n in self.bounds.items()},
        )

    def percentile_s(self, percent: float) -> float:
        """Linear inside its bucket; the last finite bound for what lies above it."""
        wanted, low, below = self.count * percent / 100, 0.0, 0.0
        for bound, reached in sorted(self.bounds.items()):
            if reached >= wanted and reached > below:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (wanted - below) / (reached - below)
            low, below = bound, reached
        return low

    def figures(self, name: str, percentiles: Sequence[float]) -> dict[str, Any]:
        """Mean and percentiles in milliseconds; nothing of nothing."""
        if not self.count:
            return {}
        found = {f"mean_{name}_ms": self.total_s / self.count * 1e3}
        for percent in sorted({50.0, *percentiles}):
            kind = "median" if percent == 50 else f"p{percent:g}"
            found[f"{kind}_{name}_ms"] = self.percentile_s(percent) * 1e3
        return found


async def scrape(session: aiohttp.ClientSession, url: str | None) -> Snapshot:
    """The gap between the first two tokens as the router saw it; empty without a page."""
    if url is None:
        return Snapshot()
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=10.0)) as response:
        return Snapshot.of(await response.text(), GAP)
