"""Reads objects again and removes those whose bytes are not what was stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import xxhash

from diptych.services.kvstore.object_types import Place, Status
from diptych.services.kvstore.tiers import Tiers


class Checker:
    """Checks on demand, in a thread: the loop goes on serving."""

    def __init__(self, tiers: Tiers, pool: memoryview) -> None:
        self.corrupt_total = 0
        self._tiers = tiers
        self._pool = pool

    async def check(self, keys: Sequence[bytes]) -> list[Status]:
        """OK, NOT_FOUND, or INVALID for what was damaged and is removed now. An object on disk
        comes up into memory for it."""
        known = self._tiers.exists(keys)
        if self._tiers.disk is not None:
            await self._tiers.disk.fetch(keys)
        statuses = []
        for key, was_there in zip(keys, known, strict=True):
            place = self._tiers.table.hold(key)
            if place is not None:
                statuses.append(await self._check_held(place))
            elif was_there and not self._tiers.exists([key])[0]:
                statuses.append(Status.INVALID)  # its file was damaged
            else:
                statuses.append(Status.OK if was_there else Status.NOT_FOUND)
        return statuses

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
            return xxhash.xxh3_64_intdigest(view)
