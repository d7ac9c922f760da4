"""Room in the pool: who gets it, and who goes for it. Pure code.

Eviction starts where the pool would be fuller than its high mark and goes down to the low one; a
tenant over its quota makes room among its own objects first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from diptych.services.kvstore.arena import Arena
from diptych.services.kvstore.eviction import EvictionOrder
from diptych.services.kvstore.object_types import Counters, Pin, TableObject
from diptych.services.kvstore.tenants import TenantBooks

# Hard pins may take this share: the rest must be able to move.
_MAX_PINNED = 0.5


class Room:
    """The arena with its orders of eviction.

    Args:
        live: the complete objects, by key.
        remove: takes a complete object out of the table; its room is free after it, if nobody is
            using it.
    """

    def __init__(
        self,
        arena: Arena,
        tenants: TenantBooks,
        counters: Counters,
        live: dict[bytes, TableObject],
        remove: Callable[[TableObject], None],
        *,
        high_watermark: float,
        eviction_step: float,
    ) -> None:
        self.pinned_bytes = 0
        self._arena = arena
        self._tenants = tenants
        self._counters = counters
        self._live = live
        self._remove = remove
        self._high_bytes = int(high_watermark * arena.pool_bytes)
        self._low_bytes = int((high_watermark - eviction_step) * arena.pool_bytes)
        self._order: EvictionOrder[TableObject] = EvictionOrder()

    def take(self, num_bytes: int, tenant: str) -> int | None:
        """An offset for `num_bytes`, charged to the tenant, after eviction where the tenant has too
        much, or the pool is too full or too torn; None where even that makes no room."""
        size = self._arena.rounded(num_bytes)
        while self._tenants.over_bytes(tenant, size) > 0:
            if not self._evict_one(self._tenants.order(tenant)):
                self._counters.quota_refusals_total += 1
                return None
        if self._arena.used_bytes + size > self._high_bytes:
            while self._arena.used_bytes + size > self._low_bytes and self._evict_one(self._order):
                pass
        offset = self._arena.allocate(num_bytes)
        while offset is None and self._evict_one(self._order):
            offset = self._arena.allocate(num_bytes)
        if offset is not None:
            self._tenants.charge(tenant, size)
        return offset

    def give_back(self, object_: TableObject) -> None:
        """The object's room is free."""
        self._arena.free(object_.offset)
        self._tenants.refund(object_.tenant, self._arena.rounded(object_.num_bytes))

    def rank(self, object_: TableObject, last_used: float, position: int) -> None:
        """The object was used then, so many objects after the first of its chain."""
        object_.rank = (object_.pin, last_used, -position)
        self.enter(object_)

    def enter(self, object_: TableObject) -> None:
        """Into the order of eviction under its present rank, if it may go at all."""
        if not object_.evictable:
            return
        self._push(self._order, object_)
        if object_.tenant:
            self._push(self._tenants.order(object_.tenant), object_)

    def pin(self, object_: TableObject, level: Pin) -> bool:
        """Set how the object resists; False beyond the bound of hard pins."""
        size = self._arena.rounded(object_.num_bytes)
        more = size * ((level is Pin.HARD) - (object_.pin is Pin.HARD))
        if more > 0 and self.pinned_bytes + more > _MAX_PINNED * self._arena.pool_bytes:
            return False
        self.pinned_bytes += more
        object_.pin = level
        object_.rank = (level, *object_.rank[1:])
        return True

    def _evict_one(self, order: EvictionOrder[TableObject]) -> bool:
        victim = order.pop(self._may_go)
        if victim is None:
            return False
        self._remove(victim)
        self._counters.evictions_total += 1
        return True

    def _may_go(self, object_: TableObject) -> bool:
        # one in use enters anew when its last use ends
        return self._live.get(object_.key) is object_ and object_.evictable

    def _push(self, order: EvictionOrder[TableObject], object_: TableObject) -> None:
        order.push(object_)
        if order.is_stale(len(self._live)):
            order.rebuild(self._evictable(None if order is self._order else object_.tenant))

    def _evictable(self, tenant: str | None) -> Iterator[TableObject]:
        objects: Iterable[TableObject] = self._live.values()
        return (o for o in objects if o.evictable and tenant in (None, o.tenant))
