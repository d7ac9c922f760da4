"""Reports of the hand-off thread: between two steps they are awaited, but not for long."""

import threading
import time

from diptych.connectors.base import HandedOver
from diptych.connectors.direct_reports import Arrival, DirectReports

LONG_S = 3600.0


def coming(hold_s: float = LONG_S, ready_s: float | None = None) -> Arrival:
    now = time.monotonic()
    ready_s = hold_s if ready_s is None else ready_s
    return Arrival(now, now + LONG_S, now + ready_s, now + hold_s)


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def test_without_anything_to_come_nothing_is_awaited() -> None:
    reports = DirectReports()
    reports.await_arrival(soon(), first=False)
    assert not reports.hold_until_s(soon())


def test_what_does_not_come_is_awaited_so_long_and_no_longer() -> None:
    reports = DirectReports()
    reports.expect("r", coming())
    until_s = soon(0.01)
    reports.await_arrival(until_s, first=True)
    assert time.monotonic() >= until_s
    assert reports.is_expecting


def test_only_what_is_near_is_worth_a_wait_and_only_in_its_time() -> None:
    reports = DirectReports()
    reports.expect("r", Arrival(0.0, soon()))  # expected, but not committed
    assert not reports.hold_until_s(soon())
    arrival = coming(hold_s=200.0, ready_s=100.0)
    reports.expect("r", arrival)
    assert not reports.hold_until_s(soon(50.0))
    assert reports.hold_until_s(soon(150.0)) == arrival.hold_s
    reports.expect("r", coming(hold_s=-0.001, ready_s=-0.002))
    assert not reports.hold_until_s(soon())  # it is late


def test_whoever_is_here_waits_for_nobody() -> None:
    reports = DirectReports()
    reports.expect("r", coming())
    reports.received("s", HandedOver(8, 0))
    assert not reports.hold_until_s(soon())
    reports.await_arrival(soon(), first=True)
    arrived = reports.take_arrived()
    assert arrived is not None
    assert arrived.finished_recving == {"s"}
    assert reports.take_arrived() is None
    assert reports.hold_until_s(soon())


def test_news_end_the_wait() -> None:
    for first, tell in (
        (True, lambda reports: reports.received("r", HandedOver(7, 0))),
        (False, lambda reports: reports.expect("r", None)),
    ):
        reports = DirectReports()
        reports.expect("r", coming())
        teller = threading.Timer(0.02, tell, [reports])
        teller.start()
        reports.await_arrival(soon(), first=first)
        teller.join()


def test_what_has_arrived_is_taken_alone() -> None:
    reports = DirectReports()
    reports.read_ended("gone")
    reports.failed("lost", "its peer is gone")
    reports.received("r", HandedOver(7, 3))
    arrived = reports.take_arrived()
    assert arrived is not None
    assert (arrived.finished_recving, arrived.handed_over) == ({"r"}, {"r": HandedOver(7, 3)})
    rest = reports.take()
    assert rest.finished_recving == {"gone"}
    assert list(rest.failed_handoffs) == ["lost"]
    assert not rest.handed_over
