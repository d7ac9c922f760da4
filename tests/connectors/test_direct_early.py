"""Announcements that come before their request."""

from __future__ import annotations

from diptych.connectors.direct_early import MAX_KEPT, EarlyAnnouncements
from diptych.connectors.direct_messages import HandoffMessage
from diptych.connectors.handoff import Event


def said(request_id: str, number: int, epoch: int = 1) -> HandoffMessage:
    return HandoffMessage(kind=Event.CHUNK, request_id=request_id, epoch=epoch, number=number)


def test_the_latest_is_kept_for_its_request_and_once() -> None:
    early = EarlyAnnouncements(lambda: 0.0, 5.0)
    for number, epoch in ((1, 1), (3, 1), (2, 1), (1, 2), (9, 1)):
        early.keep("p", said("r", number, epoch))
    early.keep("q", said("r", 4))
    assert early.take("p", "s") is None
    assert early.take("p", "r") == said("r", 1, 2)
    assert early.take("p", "r") is None
    assert early.take("q", "r") == said("r", 4)


def test_what_is_too_old_or_too_much_is_dropped() -> None:
    now = [0.0]
    early = EarlyAnnouncements(lambda: now[0], 5.0)
    early.keep("p", said("old", 1))
    now[0] = 3.0
    for number in range(MAX_KEPT):
        early.keep("p", said(f"r{number}", 1))
    assert early.drop() == 1  # the oldest, for want of room
    now[0] = 8.0
    assert early.drop() == MAX_KEPT
    assert early.take("p", "r7") is None


def test_what_an_incarnation_said_goes_with_it() -> None:
    early = EarlyAnnouncements(lambda: 0.0, 5.0)
    early.keep("p", said("r", 1))
    early.keep("q", said("s", 1))
    early.part("p")
    assert early.take("p", "r") is None
    assert early.take("q", "s") is not None
