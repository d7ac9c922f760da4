"""The table of a node's objects: reservations, complete objects, leases, eviction. Pure code.

    PutStart → reserved → PutEnd → complete → evicted
                   └ PutRevoke, or its time is over → gone

A reservation is invisible. The first that finishes for a key wins; later ones are told that the
object exists. A complete object never changes and is never evicted under a lease. Eviction goes by
the end of the last lease, oldest first; of objects used together, the later in the chain first, so
that a prefix outlives its suffix. Bytes are counted as the arena rounds them.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from diptych.services.kvstore.arena import Arena

KEY_BYTES = 32
# A lease lasts `lease_s` and what the batch's bytes take at this slow rate, but no longer than the
# cap: a reader that died must not pin its objects for long.
_LEASE_BYTES_PER_S = 64 << 20
_MAX_LEASE_S = 60.0


class Status(enum.IntEnum):
    """Outcome of one item; the numbers of `ItemStatus`."""

    OK = 1
    NOT_FOUND = 2
    EXISTS = 3
    NO_SPACE = 4
    EXPIRED = 5
    INVALID = 6


class Reservation(NamedTuple):
    """Answer to one item of `put_start`."""

    status: Status
    put_id: int = 0
    offset: int = 0
    num_bytes: int = 0
    checksum: int = 0  # EXISTS: of the object that is there


class Found(NamedTuple):
    """Answer to one key of `get`."""

    status: Status
    lease_id: int = 0
    lease_s: float = 0.0
    offset: int = 0
    num_bytes: int = 0
    checksum: int = 0


class Changes(NamedTuple):
    """What appeared (with sizes) and disappeared since the last call of `take_changes`."""

    added: dict[bytes, int]
    removed: set[bytes]


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    puts_total: int = 0
    hits_total: int = 0
    misses_total: int = 0
    evictions_total: int = 0
    stale_puts_total: int = 0


@dataclass(slots=True, eq=False)
class _Object:
    key: bytes
    offset: int
    num_bytes: int
    checksum: int = 0
    leases: set[int] = field(default_factory=set)
    # (last use, -position in its batch): what eviction goes by
    rank: tuple[float, int] = (0.0, 0)


@dataclass(slots=True)
class _Put:
    object: _Object
    ends_at: float


@dataclass(slots=True)
class _Lease:
    object: _Object
    ends_at: float
    position: int


class ObjectTable:
    """One node's objects. Not thread-safe; every call first drops what has lapsed.

    Args:
        now: seconds, never going back.
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
        first_id: int = 1,
    ) -> None:
        self.counters = Counters()
        self.put_ttl_s = put_ttl_s
        self._arena = arena
        self._now = now
        self._lease_s = lease_s
        self._high_bytes = int(high_watermark * arena.pool_bytes)
        self._low_bytes = int((high_watermark - eviction_step) * arena.pool_bytes)
        self._first_id = self._next_id = first_id
        self._objects: dict[bytes, _Object] = {}
        self._puts: dict[int, _Put] = {}
        self._leases: dict[int, _Lease] = {}
        # heaps whose entries may be stale: (end, put or lease id), and (rank, id, object)
        self._deadlines: list[tuple[float, int]] = []
        self._evictable: list[tuple[tuple[float, int], int, _Object]] = []
        self._added: dict[bytes, int] = {}
        self._removed: set[bytes] = set()

    def put_start(self, items: Sequence[tuple[bytes, int]]) -> list[Reservation]:
        """Reserve room for (key, bytes), prefix first."""
        now = self.expire()
        return [self._reserve(key, size, at, now) for at, (key, size) in enumerate(items)]

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
                self._arena.free(put.object.offset)
            statuses.append(self._unknown(put_id) if put is None else Status.OK)
        return statuses

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

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are complete."""
        return [key in self._objects for key in keys]

    def writable(self, put_id: int) -> tuple[int, int] | None:
        """(offset, bytes) of an open reservation, None once it is over."""
        put = self._puts.get(put_id)
        if put is None or self._now() >= put.ends_at:
            return None
        return put.object.offset, put.object.num_bytes

    def readable(self, lease_id: int) -> tuple[int, int] | None:
        """(offset, bytes) of the object under a lease, None once it is over."""
        lease = self._leases.get(lease_id)
        if lease is None or self._now() >= lease.ends_at:
            return None
        return lease.object.offset, lease.object.num_bytes

    def expire(self) -> float:
        """Drop reservations and leases whose time is over; returns the time now. All items of a
        batch share that one time: only then does their order decide among them."""
        now = self._now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, id_ = heapq.heappop(self._deadlines)
            put = self._puts.get(id_)
            if put is not None and put.ends_at <= now:
                del self._puts[id_]
                self._arena.free(put.object.offset)
                self.counters.stale_puts_total += 1
            lease = self._leases.get(id_)
            if lease is not None and lease.ends_at <= now:
                self._end_lease(id_, lease.ends_at)
        return now

    def take_changes(self) -> Changes:
        """What changed since the last call, for the directory."""
        changes = Changes(self._added, self._removed)
        self._added, self._removed = {}, set()
        return changes

    def inventory(self) -> dict[bytes, int]:
        """Key and bytes of every complete object."""
        return {key: o.num_bytes for key, o in self._objects.items()}

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

    def _reserve(self, key: bytes, num_bytes: int, position: int, now: float) -> Reservation:
        if len(key) != KEY_BYTES or not 0 < num_bytes <= self._arena.pool_bytes:
            return Reservation(Status.INVALID)
        present = self._objects.get(key)
        if present is not None and present.num_bytes != num_bytes:
            return Reservation(Status.INVALID)
        if present is not None:
            # whoever would have written it has just used it
            if not present.leases:
                self._rank(present, now, position)
            return Reservation(Status.EXISTS, checksum=present.checksum)
        offset = self._make_room(num_bytes)
        if offset is None:
            return Reservation(Status.NO_SPACE)
        put_id = self._new_id()
        put = _Put(_Object(key, offset, num_bytes), now + self.put_ttl_s)
        self._puts[put_id] = put
        heapq.heappush(self._deadlines, (put.ends_at, put_id))
        return Reservation(Status.OK, put_id, offset, num_bytes)

    def _publish(self, put_id: int, checksum: int, position: int, now: float) -> Status:
        put = self._puts.pop(put_id, None)
        if put is None:
            return self._unknown(put_id)
        object_ = put.object
        if object_.key in self._objects:
            self._arena.free(object_.offset)
            return Status.EXISTS
        object_.checksum = checksum
        self._objects[object_.key] = object_
        self._rank(object_, now, position)
        self.counters.puts_total += 1
        self._added[object_.key] = object_.num_bytes
        self._removed.discard(object_.key)
        return Status.OK

    def _lease(self, object_: _Object, lease_s: float, position: int, now: float) -> Found:
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
            self._rank(lease.object, ended_at, lease.position)

    def _make_room(self, num_bytes: int) -> int | None:
        """An offset for `num_bytes`, after eviction where the pool is too full or too torn."""
        size = self._arena.rounded(num_bytes)
        if self._arena.used_bytes + size > self._high_bytes:
            while self._arena.used_bytes + size > self._low_bytes and self._evict_one():
                pass
        offset = self._arena.allocate(num_bytes)
        while offset is None and self._evict_one():
            offset = self._arena.allocate(num_bytes)
        return offset

    def _evict_one(self) -> bool:
        while self._evictable:
            rank, _, object_ = heapq.heappop(self._evictable)
            current = self._objects.get(object_.key) is object_ and object_.rank == rank
            if not current or object_.leases:
                continue  # a leased object gets a new entry when its last lease ends
            del self._objects[object_.key]
            self._arena.free(object_.offset)
            self.counters.evictions_total += 1
            self._added.pop(object_.key, None)
            self._removed.add(object_.key)
            return True
        return False

    def _rank(self, object_: _Object, last_used: float, position: int) -> None:
        object_.rank = (last_used, -position)
        # the number keeps equal ranks from comparing objects
        heapq.heappush(self._evictable, (object_.rank, self._new_id(), object_))
        if len(self._evictable) > 4 * len(self._objects) + 64:
            self._evictable = [
                (o.rank, self._new_id(), o) for o in self._objects.values() if not o.leases
            ]
            heapq.heapify(self._evictable)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _unknown(self, id_: int) -> Status:
        """The status of an id that is not in use: issued and over, or never issued."""
        return Status.EXPIRED if self._first_id <= id_ < self._next_id else Status.NOT_FOUND
