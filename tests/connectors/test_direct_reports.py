"""Reports of the hand-off thread: between two steps they are awaited, but not for long."""

import threading
import time

from diptych.connectors.base import HandedOver
from diptych.connectors.direct_reports import Arrival, DirectReports

LONG_S = 3600.0


def arrival(hold_s: float) -> Arrival:
    now = time.monotonic()
    return Arrival(now, now + LONG_S, now + hold_s)


def test_without_anything_to_come_nothing_is_awaited() -> None:
    reports = DirectReports()
    reports.await_expected()
    reports.expect("r", Arrival(0.0, time.monotonic() + LONG_S))
    reports.await_expected()  # expected, but not within a fraction of a step
    assert reports.is_expecting


def test_what_does_not_come_is_awaited_once() -> None:
    reports = DirectReports()
    reports.expect("r", arrival(0.01))
    before = time.monotonic()
    reports.await_expected()
    assert time.monotonic() - before >= 0.01
    reports.expect("r", arrival(-0.01))
    reports.await_expected()
    assert reports.is_expecting


def test_news_end_the_wait() -> None:
    for tell in (
        lambda reports: reports.received("r", HandedOver(7, 0)),
        lambda reports: reports.expect("r", None),
    ):
        reports = DirectReports()
        reports.expect("r", arrival(LONG_S))
        teller = threading.Timer(0.02, tell, [reports])
        teller.start()
        reports.await_expected()
        teller.join()
    reports.received("s", HandedOver(8, 0))
    reports.expect("r", arrival(LONG_S))
    reports.await_expected()  # there are news already
    assert reports.take().finished_recving == {"s"}


def test_a_failure_is_news() -> None:
    reports = DirectReports()
    reports.expect("r", arrival(LONG_S))
    reports.failed("r", "its peer is gone")
    reports.await_expected()
