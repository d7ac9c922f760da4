"""Announcements that come before their request."""

from __future__ import annotations

import msgspec

from diptych.connectors.direct_early import MAX_KEPT, MAX_KEPT_IDS, EarlyAnnouncements
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


def test_few_that_name_many_blocks_are_too_much_as_well() -> None:
    early = EarlyAnnouncements(lambda: 0.0, 5.0)
    long = msgspec.structs.replace(said("long", 1), block_ids=[0] * (MAX_KEPT_IDS // 2 + 1))
    for number in range(3):  # said again they are one
        early.keep("p", msgspec.structs.replace(long, number=number))
    assert not early.drop()
    early.keep("p", msgspec.structs.replace(long, request_id="other"))
    assert early.drop() == 1
    assert early.take("p", "long") is None
    assert early.take("p", "other") is not None
    for peer in ("p", "q", "q"):  # what was taken, or went with its peer, takes no room
        early.keep(peer, long)
        early.part("q")
    assert not early.drop()
    assert early.take("p", "long") == long
