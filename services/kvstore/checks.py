"""Reads objects again, in both tiers, and removes those whose bytes are not what was stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from diptych.connectors.xxh3 import xxh3_64
from diptych.services.kvstore.object_types import Place, Status
from diptych.services.kvstore.tiers import Tiers


class Checker:
    """Checks on demand, in a thread: the loop goes on serving."""

    def __init__(self, tiers: Tiers, pool: memoryview) -> None:
        self.corrupt_total = 0
        self._tiers = tiers
        self._pool = pool

    async def check(self, keys: Sequence[bytes]) -> list[Status]:
        """OK, NOT_FOUND, or INVALID for what was damaged. Every copy of this node is read: one in
        memory that is damaged takes the whole object with it, a damaged file goes alone. Nothing
        comes up from disk for it."""
        return [await self._check(key) for key in keys]  # one by one: readers' calls go between

    async def _check(self, key: bytes) -> Status:
        if not self._tiers.exists([key])[0]:
            return Status.NOT_FOUND
        place = self._tiers.table.hold(key)
        if place is not None and await self._check_held(place) is Status.INVALID:
            return Status.INVALID
        if self._tiers.disk is not None and not await self._tiers.disk.check(key):
            return Status.INVALID
        return Status.OK

    async def _check_held(self, place: Place) -> Status:
        try:
            checksum = await asyncio.to_thread(self._checksum, place)
            if checksum == place.checksum:
                return Status.OK
            self.corrupt_total += 1
            self._tiers.drop([place.key])
            return Status.INVALID
        finally:
            self._tiers.table.unhold(place.key, place.offset)

    def _checksum(self, place: Place) -> int:
        with self._pool[place.offset : place.offset + place.num_bytes] as view:
            return xxh3_64(view)
