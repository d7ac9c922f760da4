"""What the router itself counted during a run: its metrics before and after."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GAP = "diptych:handoff_gap_seconds"
HANDOFFS = "diptych:handoffs"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The gap between tokens 1 and 2 at one moment: sum in seconds, and counts by upper bounds,
    which add up; and hand-offs by way and result."""

    total_s: float = 0.0
    count: float = 0.0
    bounds: dict[float, float] = field(default_factory=dict)
    handoffs: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Snapshot:
        """What a metrics page says; the histogram is summed over its labels. Empty of another's."""
        total = count = 0.0
        bounds: dict[float, float] = {}
        handoffs: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"{GAP}_sum":
                    total += sample.value
                elif sample.name == f"{GAP}_count":
                    count += sample.value
                elif sample.name == f"{GAP}_bucket":
                    bound = float(sample.labels["le"])
                    bounds[bound] = bounds.get(bound, 0.0) + sample.value
                elif sample.name == f"{HANDOFFS}_total":
                    handoffs["{way} {result}".format(**sample.labels)] = sample.value
        return cls(total, count, bounds, handoffs)

    def since(self, before: Snapshot) -> Snapshot:
        """What came in between."""
        return Snapshot(
            self.total_s - before.total_s,
            self.count - before.count,
            {bound: n - before.bounds.get(bound, 0.0) for bound, n in self.bounds.items()},
            {way: n - before.handoffs.get(way, 0.0) for way, n in self.handoffs.items()},
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

    def figures(self, name: str, percentiles: Iterable[float]) -> dict[str, Any]:
        """Mean and percentiles in milliseconds, and the hand-offs; nothing of nothing."""
        if not self.count:
            return {}
        found: dict[str, Any] = {"handoffs": {way: int(n) for way, n in self.handoffs.items() if n}}
        found[f"mean_{name}_ms"] = self.total_s / self.count * 1e3
        for percent in sorted({50.0, *percentiles}):
            kind = "median" if percent == 50 else f"p{percent:g}"
            found[f"{kind}_{name}_ms"] = self.percentile_s(percent) * 1e3
        return found


async def scrape(session: aiohttp.ClientSession, url: str | None) -> Snapshot:
    """The router's page; empty without one."""
    if url is None:
        return Snapshot()
    async with session.get(url, timeout=aiohttp.ClientTimeout(total=10.0)) as response:
        return Snapshot.of(await response.text())
