"""Whose requests are in the engine. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from diptych.errors import DuplicateRequestError, StaleTicketError


@dataclass(frozen=True, slots=True)
class Owned:
    """One attempt at one request, and the router whose it is."""

    request_id: str
    epoch: int
    router: str

    @property
    def engine_id(self) -> str:
        """Its id inside the engine: attempts never mix there."""
        return f"{self.request_id}#{self.epoch}"


class RequestTable:
    """The live attempts, at most one per request."""

    def __init__(self) -> None:
        self._by_engine_id: dict[str, Owned] = {}
        self._by_request_id: dict[str, Owned] = {}
        self._queued_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._by_engine_id)

    def add(self, owned: Owned, queued_until_s: float = math.inf) -> Owned | None:
        """Enter an attempt; returns the older one that it replaces, now to be aborted.

        Args:
            queued_until_s: when it is late, unless it has started by then.

        Raises:
            DuplicateRequestError: this attempt lives already.
            StaleTicketError: a later attempt lives.
        """
        older = self._by_request_id.get(owned.request_id)
        if older is not None:
            if older.epoch == owned.epoch:
                raise DuplicateRequestError(f"request {owned.request_id} is running already")
            if older.epoch > owned.epoch:
                raise StaleTicketError(
                    f"request {owned.request_id} is at epoch {older.epoch}, not {owned.epoch}"
                )
            self.remove(older.engine_id)
        self._by_engine_id[owned.engine_id] = owned
        self._by_request_id[owned.request_id] = owned
        self._queued_until_s[owned.engine_id] = queued_until_s
        return older

    def started(self, engine_id: str) -> None:
        """The attempt has left the queue: it can be late no more."""
        self._queued_until_s.pop(engine_id, None)

    def remove_late(self, now_s: float) -> list[Owned]:
        """Forget attempts that were to have started by now."""
        late = [
            engine_id for engine_id, until_s in self._queued_until_s.items() if until_s <= now_s
        ]
        return [owned for engine_id in late if (owned := self.remove(engine_id)) is not None]

    def get(self, engine_id: str) -> Owned | None:
        return self._by_engine_id.get(engine_id)

    def remove(self, engine_id: str) -> Owned | None:
        """Forget an attempt that ended; None if it is not there."""
        self._queued_until_s.pop(engine_id, None)
        owned = self._by_engine_id.pop(engine_id, None)
        if owned is not None:
            del self._by_request_id[owned.request_id]
        return owned

    def cancel(self, router: str, request_id: str, epoch: int) -> Owned | None:
        """Forget a router's attempt up to `epoch`; None if there is none."""
        owned = self._by_request_id.get(request_id)
        if owned is None or owned.router != router or owned.epoch > epoch:
            return None
        return self.remove(owned.engine_id)

    def remove_router(self, router: str) -> list[Owned]:
        """Forget all of a router's attempts."""
        gone = [owned for owned in self._by_engine_id.values() if owned.router == router]
        for owned in gone:
            self.remove(owned.engine_id)
        return gone

    def remove_all(self) -> list[Owned]:
        """Forget everything."""
        gone = list(self._by_engine_id.values())
        self._by_engine_id.clear()
        self._by_request_id.clear()
        self._queued_until_s.clear()
        return gone
