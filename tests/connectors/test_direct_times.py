"""Times of hand-offs, as they are told at the end."""

from __future__ import annotations

from diptych.connectors.direct_times import HandoffTimes


def test_each_stage_is_told_by_its_median_and_its_slowest_hundredth() -> None:
    times = HandoffTimes()
    assert times.summary() == ""
    for number in range(101):
        times.add("read", number / 1e3)
    times.add("verdict", 0.0005)

    assert times.summary() == "read 50.00 (p99 99.00) ms, verdict 0.50 (p99 0.50) ms"


def test_only_the_last_are_kept() -> None:
    times = HandoffTimes()
    for _ in range(4096):
        times.add("read", 1.0)
    for _ in range(4096):
        times.add("read", 0.002)
    assert times.summary() == "read 2.00 (p99 2.00) ms"
