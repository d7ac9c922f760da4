"""What a worker says waits for the request's task, but not without end."""

from __future__ import annotations

import pytest

from diptych.services.router.inbox import Inbox
from diptych.services.router.route import Entry

pytestmark = pytest.mark.anyio


def entry(position: int) -> Entry:
    return Entry(epoch=1, first_position=position, token_ids=[7])


async def test_a_worker_that_says_too_much_is_lost_once_and_fills_nothing() -> None:
    inbox = Inbox(max_events=3)
    for position in range(100):
        inbox.on_entry("w/1", entry(position))

    events = []
    while (event := await inbox.get(0.0)) is not None:
        events.append(event)
    assert [e.entry.first_position for e in events if e.entry is not None] == [0, 1, 2]
    assert [e.worker_key for e in events if e.entry is None] == ["w/1"]

    inbox.on_entry("w/2", entry(3))
    again = await inbox.get(0.0)
    assert again is not None
    assert again.worker_key == "w/2"


async def test_nothing_said_in_time_is_none() -> None:
    assert await Inbox(max_events=1).get(0.001) is None
