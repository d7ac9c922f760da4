"""How KV gets from prefill to decode: the setting `handoff`, applied to two workers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.services.router.route import RoutableWorker


@dataclass(frozen=True, slots=True)
class Direct:
    """Decode reads prefill's memory, always: a link that was not tested yet is tested then."""

    through_store = False

    def direct(self, prefill: RoutableWorker, decode: RoutableWorker) -> bool:
        return prefill.direct and decode.direct


@dataclass(frozen=True, slots=True)
class Auto:
    """Decode reads prefill's memory where their link passed its test, else through the store."""

    through_store = True

    def direct(self, prefill: RoutableWorker, decode: RoutableWorker) -> bool:
        return prefill.direct and decode.direct and decode.reads(prefill.incarnation)
