"""Quotas, pins, holds and drops of the object table."""

from __future__ import annotations

from diptych.services.kvstore.arena import Arena
from diptych.services.kvstore.object_types import Pin, Status
from diptych.services.kvstore.objects import ObjectTable

PAGE = 4096


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class World:
    """A table of 20 pages on a clock that only `wait` moves."""

    def __init__(self, quota: float = 1.0) -> None:
        self.time = 0.0
        self.table = ObjectTable(Arena(20 * PAGE), lambda: self.time, tenant_quota=quota)

    def put(self, *numbers: int, tenant: str = "") -> list[Status]:
        self.time += 1
        reserved = self.table.put_start([(key(n), PAGE) for n in numbers], tenant)
        self.table.put_end([(r.put_id, 0) for r in reserved if r.put_id])
        return [r.status for r in reserved]

    def present(self) -> set[int]:
        return {int.from_bytes(k, "little") for k in self.table.inventory()}


def test_a_tenant_over_its_quota_evicts_its_own_and_nobody_elses() -> None:
    world = World(quota=0.25)
    world.put(1, 2, tenant="a")
    for number in range(10, 20):
        assert world.put(number, tenant="b") == [Status.OK]
    assert world.present() == {1, 2, 15, 16, 17, 18, 19}
    assert world.table.tenants.used_bytes == {"a": 2 * PAGE, "b": 5 * PAGE}


def test_a_quota_full_of_what_is_read_refuses() -> None:
    world = World(quota=0.25)
    world.put(*range(5), tenant="a")
    leases = [f.lease_id for f in world.table.get([key(n) for n in range(5)])]
    assert world.put(9, tenant="a") == [Status.NO_SPACE]
    assert world.table.counters.quota_refusals_total == 1
    assert world.put(9, tenant="b") == [Status.OK]
    world.table.release(leases)
    assert world.put(8, tenant="a") == [Status.OK]


def test_without_keys_there_is_no_quota() -> None:
    world = World(quota=0.25)
    assert world.put(*range(18)) == [Status.OK] * 18


def test_soft_pins_go_last_and_hard_pins_never() -> None:
    world = World()
    for number in range(18):
        world.put(number)
    assert world.table.pin([key(0), key(1)], Pin.SOFT) == [Status.OK] * 2
    assert world.table.pin([key(2), key(99)], Pin.HARD) == [Status.OK, Status.NOT_FOUND]
    for number in range(100, 115):
        world.put(number)
    assert {0, 1, 2} <= world.present()
    world.table.pin([key(n) for n in world.present() if n > 2], Pin.SOFT)
    for number in range(200, 240):
        world.put(number)
        world.table.pin([key(number)], Pin.SOFT)
    assert world.present() & {0, 1, 2} == {2}


def test_hard_pins_have_a_bound_and_come_off() -> None:
    world = World()
    world.put(*range(12))
    statuses = world.table.pin([key(n) for n in range(12)], Pin.HARD)
    assert statuses == [Status.OK] * 10 + [Status.NO_SPACE] * 2
    assert world.table.pinned_bytes == 10 * PAGE
    world.table.pin([key(n) for n in range(12)], Pin.NONE)
    assert world.table.pinned_bytes == 0
    for number in range(100, 118):
        world.put(number)
    assert world.present() == set(range(101, 118)) | {100} & world.present()


def test_a_drop_is_seen_at_once_and_frees_the_room_after_the_last_reader() -> None:
    world = World()
    world.put(1)
    [found] = world.table.get([key(1)])
    place = world.table.hold(key(1))
    assert place is not None
    assert world.table.drop([key(1), key(2)]) == [Status.OK, Status.NOT_FOUND]
    assert world.present() == set()
    assert world.table.used_bytes == PAGE
    assert world.put(1) == [Status.OK]  # a new one of the same key is another object
    assert world.table.release([found.lease_id]) == [Status.OK]
    assert world.table.used_bytes == 2 * PAGE
    world.table.unhold(key(1), place.offset)
    assert world.table.used_bytes == PAGE
    assert world.present() == {1}


def test_what_is_held_stays_and_keeps_its_place_in_the_order() -> None:
    world = World()
    for number in range(18):
        world.put(number)
    place = world.table.hold(key(0))
    assert place is not None
    world.put(50)
    assert 0 in world.present()
    world.table.unhold(key(0), place.offset)
    for number in range(60, 63):
        world.put(number)
    assert 0 not in world.present()
