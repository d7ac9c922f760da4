"""Announcements that came before their request."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from diptych.connectors.direct_messages import HandoffMessage

MAX_KEPT = 1024
# block ids and checksums of all that is kept: of a hundred long prompts
MAX_KEPT_IDS = 1 << 20


class _Kept(NamedTuple):
    message: HandoffMessage
    end_s: float

    @property
    def num_ids(self) -> int:
        return len(self.message.block_ids) + len(self.message.checksums)


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
        self._num_ids = 0

    def keep(self, peer: str, message: HandoffMessage) -> None:
        """A later announcement of a hand-off says all that an earlier one did."""
        key = (peer, message.request_id)
        known = self._pop(key)
        if known is not None and _order(known.message) > _order(message):
            message = known.message
        kept = self._kept[key] = _Kept(message, self._monotonic() + self._keep_s)
        self._num_ids += kept.num_ids

    def take(self, peer: str, request_id: str) -> HandoffMessage | None:
        """What was said of a request that is known from now on."""
        kept = self._pop((peer, request_id))
        return None if kept is None else kept.message

    def part(self, peer: str) -> None:
        """What that incarnation has said is void."""
        for key in [key for key in self._kept if key[0] == peer]:
            self._pop(key)

    def drop(self) -> int:
        """Forget what is too old or too much; returns how many that were."""
        now, num_dropped = self._monotonic(), 0
        for key, kept in list(self._kept.items()):  # the oldest first
            has_room = len(self._kept) <= MAX_KEPT and self._num_ids <= MAX_KEPT_IDS
            if kept.end_s > now and has_room:
                break
            self._pop(key)
            num_dropped += 1
        return num_dropped

    def _pop(self, key: tuple[str, str]) -> _Kept | None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_ids -= kept.num_ids
        return kept


def _order(message: HandoffMessage) -> tuple[int, int]:
    return message.epoch, message.number
