"""How KV gets from prefill to decode: the setting `handoff`, applied to two workers. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from diptych.services.router.routable import RoutableWorker


class Obstacle(enum.Enum):
    """Why a decode worker does not read a prefill worker's memory."""

    NOT_WANTED = "not wanted"
    """`handoff` is `store`."""
    PREFILL_NOT_DIRECT = "prefill not direct"
    DECODE_NOT_DIRECT = "decode not direct"
    NO_LINK = "no link"
    """Their link did not pass its test, or not yet."""


class HandoffWays(Protocol):
    """How KV may get from a prefill to a decode worker."""

    def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
        """Why this decode worker does not read this prefill worker's memory; None where it does."""
        ...


class StoreOnly:
    """Every hand-off goes through the store."""

    def obstacle(self, prefill: RoutableWorker, decode: RoutableWorker) -> Obstacle | None:
        return Obstacle.NOT_WANTED


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
