"""Announcements that came before their request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from diptych.connectors.direct_messages import HandoffMessage

MAX_KEPT = 1024


class _Kept(NamedTuple):
    message: HandoffMessage
    end_s: float


class EarlyAnnouncements:
    """The last announcement of each hand-off that is not known yet.

    A router tells both sides of a request at once. Prefill may begin it at a moment when the decode
    engine is within a step, and has not heard of it: without this its word would be lost, and with
    it the time until it is said again. One thread's.
    """

    def __init__(self, monotonic: Callable[[], float], keep_s: float) -> None:
        """What nobody asks for within `keep_s` is dropped."""
        self._monotonic = monotonic
        self._keep_s = keep_s
        self._kept: dict[tuple[str, str], _Kept] = {}

    def keep(self, peer: str, message: HandoffMessage) -> None:
        """A later announcement of a hand-off says all that an earlier one did."""
        key = (peer, message.request_id)
        known = self._kept.pop(key, None)
        if known is not None and _order(known.message) > _order(message):
            message = known.message
        self._kept[key] = _Kept(message, self._monotonic() + self._keep_s)

    def take(self, peer: str, request_id: str) -> HandoffMessage | None:
        """What was said of a request that is known from now on."""
        kept = self._kept.pop((peer, request_id), None)
        return None if kept is None else kept.message

    def part(self, peer: str) -> None:
        """What that incarnation has said is void."""
        for key in [key for key in self._kept if key[0] == peer]:
            del self._kept[key]

    def drop(self) -> int:
        """Forget what is too old or too much; returns how many that were."""
        now, num_dropped = self._monotonic(), 0
        for key, kept in list(self._kept.items()):  # the oldest first
            if kept.end_s > now and len(self._kept) <= MAX_KEPT:
                break
            del self._kept[key]
            num_dropped += 1
        return num_dropped


def _order(message: HandoffMessage) -> tuple[int, int]:
    return message.epoch, message.number
