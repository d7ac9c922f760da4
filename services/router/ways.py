"""How KV gets from prefill to decode: the setting `handoff`, applied to two workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.services.router.route import Obstacle, RoutableWorker


@dataclass(frozen=True, slots=True)
class Direct:
    """Decode reads prefill's memory, always: a link that was not tested yet is tested then."""

    def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
        if not prefill.direct:
            return Obstacle.PREFILL_NOT_DIRECT
        return None if decode.direct else Obstacle.DECODE_NOT_DIRECT


@dataclass(frozen=True, slots=True)
class Auto:
    """Decode reads prefill's memory where their link passed its test, else through the store."""

    def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
        found = Direct().obstacle(prefill, decode)
        if found is None and decode.reads(prefill.incarnation) is None:
            return Obstacle.NO_LINK
        return found
