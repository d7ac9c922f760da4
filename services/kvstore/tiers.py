"""A node's objects over all its tiers, as its service and the directory see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from diptych.services.kvstore.disk_tier import DiskTier
from diptych.services.kvstore.object_types import Found, Reservation, Status
from diptych.services.kvstore.objects import ObjectTable

TIER_DRAM, TIER_DISK = "dram", "ssd"


class Held(NamedTuple):
    """Where the best copy of an object lies, and its bytes."""

    tier: str
    num_bytes: int


class TierChanges(NamedTuple):
    """What the directory is to be told: keys with their present place, and keys that are gone."""

    held: dict[bytes, Held]
    gone: set[bytes]


class Tiers:
    """The pool's table and, where there is one, the disk below it."""

    def __init__(self, table: ObjectTable, disk: DiskTier | None = None) -> None:
        self.table = table
        self.disk = disk

    def put_start(self, items: Sequence[tuple[bytes, int]], tenant: str) -> list[Reservation]:
        """As the table's; what is on disk is there already."""
        if self.disk is None:
            return self.table.put_start(items, tenant)
        present = self.table.exists([key for key, _ in items])
        on_disk = {
            at: info
            for at, (key, _) in enumerate(items)
            if not present[at] and (info := self.disk.index.get(key)) is not None
        }
        rest = [item for at, item in enumerate(items) if at not in on_disk]
        reserved = iter(self.table.put_start(rest, tenant))
        answers = []
        for at, (_, num_bytes) in enumerate(items):
            info = on_disk.get(at)
            if info is None:
                answers.append(next(reserved))
            elif info.num_bytes != num_bytes:
                answers.append(Reservation(Status.INVALID))
            else:
                answers.append(Reservation(Status.EXISTS, checksum=info.checksum))
        self.disk.note_uses(
            [i[0] for i, a in zip(items, answers, strict=True) if a.status is Status.EXISTS]
        )
        return answers

    def put_end(self, items: Sequence[tuple[int, int]]) -> list[Status]:
        """As the table's."""
        keys = self.table.put_keys([put_id for put_id, _ in items]) if self.disk else []
        statuses = self.table.put_end(items)
        if self.disk is not None:
            self.disk.note_uses(keys)
        return statuses

    async def get(self, keys: Sequence[bytes], lease_s: float) -> list[Found]:
        """As the table's, after what lies on disk has come up, as far as it comes in time."""
        if self.disk is None:
            return self.table.get(keys, lease_s)
        await self.disk.fetch(keys)
        found = self.table.get(keys, lease_s)
        self.disk.note_uses([k for k, f in zip(keys, found, strict=True) if f.status is Status.OK])
        return found

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are in some tier."""
        present = self.table.exists(keys)
        if self.disk is None or all(present):
            return present
        index = self.disk.index
        return [there or key in index for key, there in zip(keys, present, strict=True)]

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        """Remove objects from all tiers."""
        statuses = self.table.drop(keys)
        if self.disk is None:
            return statuses
        on_disk = self.disk.forget(keys)
        return [Status.OK if d else s for s, d in zip(statuses, on_disk, strict=True)]

    def take_changes(self) -> TierChanges:
        """What changed since the last call."""
        changes = self.table.take_changes()
        keys = {*changes.added, *changes.removed}
        if self.disk is not None:
            keys |= self.disk.take_changes()
        elif not changes.removed:
            return TierChanges({k: Held(TIER_DRAM, n) for k, n in changes.added.items()}, set())
        held = {key: where for key in keys if (where := self.where(key)) is not None}
        return TierChanges(held, keys - held.keys())

    def inventory(self) -> dict[bytes, Held]:
        """Every complete object."""
        on_disk = (
            {i.key: Held(TIER_DISK, i.num_bytes) for i in self.disk.index} if self.disk else {}
        )
        in_memory = {k: Held(TIER_DRAM, n) for k, n in self.table.inventory().items()}
        return {**on_disk, **in_memory}

    def where(self, key: bytes) -> Held | None:
        """The best copy of an object."""
        num_bytes = self.table.num_bytes(key)
        if num_bytes is not None:
            return Held(TIER_DRAM, num_bytes)
        info = self.disk.index.get(key) if self.disk is not None else None
        return None if info is None else Held(TIER_DISK, info.num_bytes)
