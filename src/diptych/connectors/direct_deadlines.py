"""How long decode waits in each state of a hand-off, and what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from diptych.connectors.direct_attempt import Taken
from diptych.connectors.direct_settings import DirectSettings
from diptych.connectors.handoff import Event, State

PULLING = (State.RESERVED, State.READING)
_RENEWALS_PER_LEASE = 4


class Deadline(NamedTuple):
    """At `at_s` the event is due, for this reason."""

    at_s: float
    event: Event
    why: str


class TakenDeadlines:
    """Pure: times are those of the entries, and the settings'.

    Args:
        knows: whether a peer is met: one that is not says nothing.
    """

    def __init__(self, settings: DirectSettings, knows: Callable[[str], bool]) -> None:
        self._settings = settings
        self._knows = knows

    @property
    def renew_s(self) -> float:
        """From one sign of life to prefill to the next."""
        settings = self._settings
        return min(settings.lease_s, settings.silence_s) / _RENEWALS_PER_LEASE

    def of(self, entry: Taken) -> Deadline | None:
        """The deadline of the entry's present state; None where nothing is waited for."""
        settings, state = self._settings, entry.machine.state
        if state is State.OFFERED:
            return self._start(entry)
        if state is State.DEFERRED:
            at_s = entry.announced_s + settings.reserve_s
            return Deadline(at_s, Event.DEFER_DEADLINE, "there was no room in time")
        if state in PULLING:
            at_s = entry.heard_s + settings.silence_s
            why = "the prefill worker was silent too long"
            return Deadline(at_s, Event.READ_DEADLINE, why)
        if state is State.VALIDATING:
            at_s = entry.validating_s + settings.verdict_s
            return Deadline(at_s, Event.VERDICT_DEADLINE, "no verdict came in time")
        return None

    def _start(self, entry: Taken) -> Deadline:
        """Prefill is to begin. One that is not met is soon given up: it was gone before the request
        came, and nobody will say so again."""
        ttl_s, why = entry.prompt.ttl_s, "prefill did not begin in time"
        if not self._knows(entry.prompt.peer):
            ttl_s, why = min(ttl_s, self._settings.silence_s), "there is no way to prefill"
        return Deadline(entry.offered_s + ttl_s, Event.TICKET_END, why)
