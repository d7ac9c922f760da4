"""Which objects the disk tier has, which may enter, and which must go. Pure code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from diptych.services.kvstore.disk_files import BLOCK_BYTES, FileInfo, rounded
from diptych.services.kvstore.eviction import EvictionOrder
from diptych.services.kvstore.frequency import FrequencySketch


@dataclass(slots=True, eq=False)
class _Entry:
    info: FileInfo
    rank: tuple[int, float, int]


class Admission(NamedTuple):
    """Whether an object may enter, and the keys that have gone (already forgotten here)."""

    admitted: bool
    gone: list[bytes]


class DiskIndex:
    """Bounded in bytes. While there is room all may enter; after that only what was used more
    often lately than the one that would have to go for it.

    Args:
        now: seconds, never going back.
        tenant_quota: share of the tier that one named tenant may hold.
    """

    def __init__(
        self,
        max_bytes: int,
        now: Callable[[], float],
        frequency: FrequencySketch,
        *,
        high_watermark: float = 0.90,
        eviction_step: float = 0.05,
        tenant_quota: float = 1.0,
    ) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self.evictions_total = 0
        self.refusals_total = 0
        self._now = now
        self._frequency = frequency
        self._high_bytes = int(high_watermark * max_bytes)
        self._low_bytes = int((high_watermark - eviction_step) * max_bytes)
        self._quota_bytes = int(tenant_quota * max_bytes)
        self._tenants: dict[str, int] = {}
        self._tenant_orders: dict[str, EvictionOrder[_Entry]] = {}
        self._entries: dict[bytes, _Entry] = {}
        self._order: EvictionOrder[_Entry] = EvictionOrder()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[FileInfo]:
        return (entry.info for entry in self._entries.values())

    def get(self, key: bytes) -> FileInfo | None:
        entry = self._entries.get(key)
        return None if entry is None else entry.info

    def used(self, key: bytes, position: int = 0) -> None:
        """The object was used just now, so many objects after the first of its chain."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.rank = (0, self._now(), -position)
            self._push(entry)

    def admit(self, info: FileInfo) -> Admission:
        """Whether the object may enter, and what has gone for it."""
        size = _size(info)
        if info.key in self._entries or size > self._high_bytes:
            return Admission(False, [])
        gone: list[bytes] = []
        while info.tenant and self._tenants.get(info.tenant, 0) + size > self._quota_bytes:
            victim = self._pop(self._tenant_order(info.tenant))
            if victim is None:
                self.refusals_total += 1
                return Admission(False, gone)
            gone.append(self._evict(victim))
        if self.used_bytes + size <= self._high_bytes:
            return Admission(True, gone)
        return Admission(self._evict_for(info, size, gone), gone)

    def add(self, info: FileInfo, *, used_at: float | None = None) -> None:
        """The object's file is there. `used_at` is for files of an earlier incarnation: before
        all that this one used."""
        if info.key in self._entries:
            return
        last_used = self._now() if used_at is None else used_at
        entry = _Entry(info, (0, last_used, 0))
        self._entries[info.key] = entry
        self.used_bytes += _size(info)
        self._tenants[info.tenant] = self._tenants.get(info.tenant, 0) + _size(info)
        self._push(entry)

    def remove(self, key: bytes) -> bool:
        """Forget an object; False if it was not known."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        size = _size(entry.info)
        self.used_bytes -= size
        tenant = entry.info.tenant
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]
            self._tenant_orders.pop(tenant, None)
        return True

    def overflow(self) -> list[bytes]:
        """Keys that go because the tier has become smaller than its files."""
        gone = []
        while self.used_bytes > self._high_bytes and (victim := self._pop()) is not None:
            gone.append(self._evict(victim))
        return gone

    def _evict_for(self, info: FileInfo, size: int, gone: list[bytes]) -> bool:
        """Down to the low mark, if the object is used more often than the first that would go."""
        victim = self._pop()
        if victim is None:
            return False
        if self._frequency.estimate(info.key) <= self._frequency.estimate(victim.info.key):
            # who stays goes to the back: else one that is used often would bar the way for ever
            victim.rank = (0, self._now(), 0)
            self._push(victim)
            self.refusals_total += 1
            return False
        gone.append(self._evict(victim))
        while self.used_bytes + size > self._low_bytes and (victim := self._pop()) is not None:
            gone.append(self._evict(victim))
        return True

    def _evict(self, victim: _Entry) -> bytes:
        self.remove(victim.info.key)
        self.evictions_total += 1
        return victim.info.key

    def _pop(self, order: EvictionOrder[_Entry] | None = None) -> _Entry | None:
        order = order or self._order
        return order.pop(lambda entry: self._entries.get(entry.info.key) is entry)

    def _push(self, entry: _Entry) -> None:
        self._order.push(entry)
        if self._order.is_stale(len(self._entries)):
            self._order.rebuild(self._entries.values())
        if entry.info.tenant:
            order = self._tenant_order(entry.info.tenant)
            order.push(entry)
            if order.is_stale(len(self._entries)):
                tenant = entry.info.tenant
                order.rebuild(e for e in self._entries.values() if e.info.tenant == tenant)

    def _tenant_order(self, tenant: str) -> EvictionOrder[_Entry]:
        return self._tenant_orders.setdefault(tenant, EvictionOrder())


def _size(info: FileInfo) -> int:
    return BLOCK_BYTES + rounded(info.num_bytes)
