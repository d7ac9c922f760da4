"""The table of a node's objects in memory: reservations, complete objects, leases, eviction.

    PutStart → reserved → PutEnd → complete → evicted
                   └ PutRevoke, or its time is over → gone

Pure code. A reservation is invisible. The first that finishes for a key wins; later ones are told
that the object exists. A complete object never changes and is never evicted under a lease. Eviction
goes by the end of the last lease, oldest first; of objects used together, the later in the chain
first, so that a prefix outlives its suffix; pinned ones last or never. Bytes are counted as the
arena rounds them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from diptych.services.kvstore.arena import Arena
from diptych.services.kvstore.object_types import (
    KEY_BYTES,
    Changes,
    Counters,
    Found,
    Pin,
    Place,
    Reservation,
    Status,
    TableObject,
)
from diptych.services.kvstore.room import Room
from diptych.services.kvstore.tenants import TenantBooks

# A lease lasts `lease_s` and what the batch's bytes take at this slow rate, but no longer than the
# cap: a reader that died must not pin its objects for long.
_LEASE_BYTES_PER_S = 64 << 20
_MAX_LEASE_S = 60.0


@dataclass(slots=True)
class _Put:
    object: TableObject
    ends_at: float


@dataclass(slots=True)
class _Lease:
    object: TableObject
    ends_at: float
    position: int


class ObjectTable:
    """One node's objects. Not thread-safe; every call first drops what has lapsed.

    Args:
        now: seconds, never going back.
        tenant_quota: share of the pool that one named tenant may hold.
        first_id: put and lease ids count from here; a node draws it at random, so that ids of an
            earlier incarnation are unknown.
    """

    def __init__(
        self,
        arena: Arena,
        now: Callable[[], float],
        *,
        put_ttl_s: float = 30.0,
        lease_s: float = 10.0,
        high_watermark: float = 0.90,
        eviction_step: float = 0.05,
        tenant_quota: float = 1.0,
        first_id: int = 1,
    ) -> None:
        self.counters = Counters()
        self.put_ttl_s = put_ttl_s
        self.tenants = TenantBooks(arena.pool_bytes, tenant_quota)
        self._arena = arena
        self._now = now
        self._lease_s = lease_s
        self._first_id = self._next_id = first_id
        self._objects: dict[bytes, TableObject] = {}
        self._puts: dict[int, _Put] = {}
        self._leases: dict[int, _Lease] = {}
        self._gone: dict[int, TableObject] = {}  # dropped while in use, by offset
        # a heap whose entries may be stale: (end, put or lease id)
        self._deadlines: list[tuple[float, int]] = []
        self._room = Room(
            arena,
            self.tenants,
            self.counters,
            self._objects,
            self._remove,
            high_watermark=high_watermark,
            eviction_step=eviction_step,
        )
        self._added: dict[bytes, int] = {}
        self._removed: set[bytes] = set()

    # --- puts

    def put_start(
        self, items: Sequence[tuple[bytes, int]], tenant: str = "", ttl_s: float | None = None
    ) -> list[Reservation]:
        """Reserve room for (key, bytes), prefix first, charged to the tenant.

        Args:
            ttl_s: life of the reservations, `put_ttl_s` if absent; `inf` for the node's own, which
                end with the thread that writes them.
        """
        now = self.expire()
        ends_at = now + (self.put_ttl_s if ttl_s is None else ttl_s)
        return [
            self._reserve(key, size, tenant, at, now, ends_at)
            for at, (key, size) in enumerate(items)
        ]

    def put_end(self, items: Sequence[tuple[int, int]]) -> list[Status]:
        """Publish (put id, checksum), in the order of the chain."""
        now = self.expire()
        return [self._publish(put_id, sum_, at, now) for at, (put_id, sum_) in enumerate(items)]

    def put_revoke(self, put_ids: Sequence[int]) -> list[Status]:
        """Give up reservations."""
        self.expire()
        statuses = []
        for put_id in put_ids:
            put = self._puts.pop(put_id, None)
            if put is not None:
                self._room.give_back(put.object)
            statuses.append(self._unknown(put_id) if put is None else Status.OK)
        return statuses

    def put_keys(self, put_ids: Sequence[int]) -> list[bytes]:
        """Keys of those reservations that are open."""
        puts = [self._puts.get(put_id) for put_id in put_ids]
        return [put.object.key for put in puts if put is not None]

    def writable(self, put_id: int) -> tuple[int, int] | None:
        """(offset, bytes) of an open reservation, None once it is over."""
        put = self._puts.get(put_id)
        if put is None or self._now() >= put.ends_at:
            return None
        return put.object.offset, put.object.num_bytes

    # --- gets

    def get(self, keys: Sequence[bytes], lease_s: float = 0.0) -> list[Found]:
        """Find and lease objects for `lease_s` at most; 0 takes what suits their bytes."""
        now = self.expire()
        found = [self._objects.get(key) for key in keys]
        hits = [o for o in found if o is not None]
        self.counters.hits_total += len(hits)
        self.counters.misses_total += len(found) - len(hits)
        longest = min(
            _MAX_LEASE_S, self._lease_s + sum(o.num_bytes for o in hits) / _LEASE_BYTES_PER_S
        )
        lease_s = min(lease_s or longest, longest)
        return [
            Found(Status.NOT_FOUND) if o is None else self._lease(o, lease_s, at, now)
            for at, o in enumerate(found)
        ]

    def verify(self, lease_ids: Sequence[int], renew_s: float = 0.0) -> list[Status]:
        """Whether the leases hold; those that do last `renew_s` from now if that is longer."""
        ends_at = self.expire() + min(renew_s, _MAX_LEASE_S)
        statuses = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and ends_at > lease.ends_at:
                lease.ends_at = ends_at
                heapq.heappush(self._deadlines, (ends_at, lease_id))
            statuses.append(self._unknown(lease_id) if lease is None else Status.OK)
        return statuses

    def release(self, lease_ids: Sequence[int]) -> list[Status]:
        """End leases; OK proves that the lease held until now."""
        now = self.expire()
        statuses = []
        for lease_id in lease_ids:
            known = lease_id in self._leases
            if known:
                self._end_lease(lease_id, now)
            statuses.append(Status.OK if known else self._unknown(lease_id))
        return statuses

    def readable(self, lease_id: int) -> tuple[int, int] | None:
        """(offset, bytes) of the object under a lease, None once it is over."""
        lease = self._leases.get(lease_id)
        if lease is None or self._now() >= lease.ends_at:
            return None
        return lease.object.offset, lease.object.num_bytes

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are complete."""
        return [key in self._objects for key in keys]

    def touch(self, keys: Sequence[bytes]) -> None:
        """The objects count as used just now, as a chain."""
        now = self.expire()
        for position, key in enumerate(keys):
            object_ = self._objects.get(key)
            if object_ is not None and not object_.in_use:
                self._room.rank(object_, now, position)

    # --- what the node does with its own objects

    def hold(self, key: bytes) -> Place | None:
        """Keep an object where it is until `unhold`, without counting as a use."""
        object_ = self._objects.get(key)
        if object_ is None:
            return None
        object_.holds += 1
        return _place(object_)

    def unhold(self, key: bytes, offset: int) -> None:
        """End a hold; the offset tells the object from a later one of the same key."""
        for object_ in (self._objects.get(key), self._gone.get(offset)):
            if object_ is not None and object_.offset == offset:
                object_.holds -= 1
                self._settle(object_)

    def pin(self, keys: Sequence[bytes], level: Pin) -> list[Status]:
        """Set how objects resist eviction; hard pins have a bound (NO_SPACE)."""
        return [self._pin(key, level) for key in keys]

    def drop(self, keys: Sequence[bytes]) -> list[Status]:
        """Remove objects at once, pinned ones too; room that is being read is freed after."""
        self.expire()
        statuses = []
        for key in keys:
            object_ = self._objects.get(key)
            if object_ is not None:
                self._remove(object_)
            statuses.append(Status.NOT_FOUND if object_ is None else Status.OK)
        return statuses

    def expire(self) -> float:
        """Drop reservations and leases whose time is over; returns the time now. All items of a
        batch share that one time: only then does their order decide among them."""
        now = self._now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id_ = heapq.heappop(self._deadlines)
            put = self._puts.get(id_)
            if put is not None and put.ends_at <= now:
                del self._puts[id_]
                self._room.give_back(put.object)
                self.counters.stale_puts_total += 1
            lease = self._leases.get(id_)
            if lease is not None and lease.ends_at <= now:
                self._end_lease(id_, lease.ends_at)
        return now

    # --- what it holds

    def take_changes(self) -> Changes:
        """What changed since the last call, for the directory."""
        changes = Changes(self._added, self._removed)
        self._added, self._removed = {}, set()
        return changes

    def num_bytes(self, key: bytes) -> int | None:
        """Bytes of a complete object."""
        object_ = self._objects.get(key)
        return None if object_ is None else object_.num_bytes

    def inventory(self) -> dict[bytes, int]:
        """Key and bytes of every complete object."""
        return {key: o.num_bytes for key, o in self._objects.items()}

    def last_used_first(self) -> list[bytes]:
        """Keys of complete objects; first those that would be evicted last."""
        return [o.key for o in sorted(self._objects.values(), key=lambda o: o.rank, reverse=True)]

    def places(self) -> Iterator[Place]:
        """Every complete object; the table must not change meanwhile."""
        return map(_place, self._objects.values())

    @property
    def num_objects(self) -> int:
        return len(self._objects)

    @property
    def num_puts(self) -> int:
        return len(self._puts)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def used_bytes(self) -> int:
        """Bytes of complete objects and reservations."""
        return self._arena.used_bytes

    @property
    def pool_bytes(self) -> int:
        return self._arena.pool_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of hard-pinned objects."""
        return self._room.pinned_bytes

    # --- inside

    def _reserve(
        self,
        key: bytes,
        num_bytes: int,
        tenant: str,
        position: int,
        now: float,
        ends_at: float,
    ) -> Reservation:
        if len(key) != KEY_BYTES or not 0 < num_bytes <= self._arena.pool_bytes:
            return Reservation(Status.INVALID)
        present = self._objects.get(key)
        if present is not None and present.num_bytes != num_bytes:
            return Reservation(Status.INVALID)
        if present is not None:
            # whoever would have written it has just used it
            if not present.in_use:
                self._room.rank(present, now, position)
            return Reservation(Status.EXISTS, checksum=present.checksum)
        offset = self._room.take(num_bytes, tenant)
        if offset is None:
            return Reservation(Status.NO_SPACE)
        put_id = self._new_id()
        put = _Put(TableObject(key, offset, num_bytes, tenant), ends_at)
        self._puts[put_id] = put
        if ends_at < math.inf:
            heapq.heappush(self._deadlines, (ends_at, put_id))
        return Reservation(Status.OK, put_id, offset, num_bytes)

    def _publish(self, put_id: int, checksum: int, position: int, now: float) -> Status:
        put = self._puts.pop(put_id, None)
        if put is None:
            return self._unknown(put_id)
        object_ = put.object
        if object_.key in self._objects:
            self._room.give_back(object_)
            return Status.EXISTS
        object_.checksum = checksum
        self._objects[object_.key] = object_
        self._room.rank(object_, now, position)
        self.counters.puts_total += 1
        self._added[object_.key] = object_.num_bytes
        self._removed.discard(object_.key)
        return Status.OK

    def _lease(self, object_: TableObject, lease_s: float, position: int, now: float) -> Found:
        lease_id = self._new_id()
        ends_at = now + lease_s
        self._leases[lease_id] = _Lease(object_, ends_at, position)
        object_.leases.add(lease_id)
        heapq.heappush(self._deadlines, (ends_at, lease_id))
        return Found(
            Status.OK, lease_id, lease_s, object_.offset, object_.num_bytes, object_.checksum
        )

    def _end_lease(self, lease_id: int, ended_at: float) -> None:
        lease = self._leases.pop(lease_id)
        lease.object.leases.remove(lease_id)
        if not lease.object.leases:
            lease.object.rank = (lease.object.pin, ended_at, -lease.position)
            self._settle(lease.object)

    def _settle(self, object_: TableObject) -> None:
        """After a use has ended: free what was dropped meanwhile, let the rest be evicted again."""
        if object_.in_use:
            return
        if object_.gone:
            self._gone.pop(object_.offset, None)
            self._room.give_back(object_)
        else:
            self._room.enter(object_)

    def _remove(self, object_: TableObject) -> None:
        """Take a complete object out of the table."""
        if object_.pin is not Pin.NONE:
            self._room.pin(object_, Pin.NONE)
        del self._objects[object_.key]
        self._added.pop(object_.key, None)
        self._removed.add(object_.key)
        if object_.in_use:
            object_.gone = True
            self._gone[object_.offset] = object_
        else:
            self._room.give_back(object_)

    def _pin(self, key: bytes, level: Pin) -> Status:
        object_ = self._objects.get(key)
        if object_ is None:
            return Status.NOT_FOUND
        if not self._room.pin(object_, level):
            return Status.NO_SPACE
        self._room.enter(object_)
        return Status.OK

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _unknown(self, id_: int) -> Status:
        """The status of an id that is not in use: issued and over, or never issued."""
        return Status.EXPIRED if self._first_id <= id_ < self._next_id else Status.NOT_FOUND


def _place(object_: TableObject) -> Place:
    return Place(object_.key, object_.offset, object_.num_bytes, object_.checksum, object_.tenant)
