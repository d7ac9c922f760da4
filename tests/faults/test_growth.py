"""What the soak calls a leak."""

from __future__ import annotations

from collections.abc import Callable

from tests.faults.growth import Growth

MIB = 1 << 20


def reports(bytes_at: Callable[[int], int], seconds: int) -> dict[str, str]:
    """Of a process that has so many bytes at each second."""
    now = 0
    growth = Growth(lambda pid: bytes_at(now), lambda: float(now))
    for second in range(seconds):
        now = second
        growth.note({"p": 1})
    return growth.grown({"p": 1})


def test_what_grows_while_it_gets_warm_and_then_stays_is_no_leak() -> None:
    assert reports(lambda s: 100 * MIB + min(s, 120) * MIB, 600) == {}


def test_what_goes_on_growing_is_a_leak() -> None:
    assert "became" in reports(lambda s: 100 * MIB + max(0, s - 100) * MIB // 10, 600)["p"]
    assert "became" in reports(lambda s: 200 * MIB + s * MIB // 40, 700)["p"]


def test_what_is_never_steady_is_one_too() -> None:
    assert "never steady" in reports(lambda s: 100 * MIB + s * MIB // 10, 600)["p"]


def test_a_process_with_the_id_of_one_that_ended_begins_anew() -> None:
    seconds, held = [0.0], [100 * MIB]
    growth = Growth(lambda pid: held[0], lambda: seconds[0])
    for _ in range(299):
        seconds[0] += 1.0
        growth.note({"p": 1})
    growth.note({})
    held[0] = 150 * MIB
    assert growth.grown({"p": 1}) == {}
