"""What the object table promises: by example, then by a machine that tries every order of calls."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from diptych.services.kvstore.arena import Arena
from diptych.services.kvstore.object_types import Status
from diptych.services.kvstore.objects import ObjectTable

PAGE = 4096
PAGES = 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class World:
    """A table on a clock that only `wait` moves."""

    def __init__(self, pages: int = PAGES) -> None:
        self.time = 100.0
        self.table = ObjectTable(
            Arena(pages * PAGE), lambda: self.time, put_ttl_s=30.0, lease_s=10.0, first_id=1000
        )

    def wait(self, seconds: float) -> None:
        self.time += seconds

    def put(self, *numbers: int, num_bytes: int = PAGE) -> list[Status]:
        reserved = self.table.put_start([(key(n), num_bytes) for n in numbers])
        return self.table.put_end([(r.put_id, n) for r, n in zip(reserved, numbers, strict=True)])

    def present(self) -> set[int]:
        return {int.from_bytes(k, "little") for k in self.table.inventory()}


def test_an_object_is_invisible_until_its_put_ends() -> None:
    world = World()
    [reservation] = world.table.put_start([(key(1), 100)])
    assert world.table.exists([key(1)]) == [False]
    assert world.table.get([key(1)])[0].status is Status.NOT_FOUND
    assert world.table.put_end([(reservation.put_id, 77)]) == [Status.OK]
    [found] = world.table.get([key(1)])
    assert (found.offset, found.num_bytes, found.checksum) == (reservation.offset, 100, 77)
    assert world.table.used_bytes == PAGE


def test_the_first_finisher_wins_and_the_other_gets_its_room_back() -> None:
    world = World()
    [first], [second] = (world.table.put_start([(key(1), 100)]) for _ in range(2))
    assert world.table.put_end([(second.put_id, 2)]) == [Status.OK]
    assert world.table.put_end([(first.put_id, 1)]) == [Status.EXISTS]
    assert world.table.get([key(1)])[0].checksum == 2
    assert world.table.used_bytes == PAGE
    assert world.table.put_start([(key(1), 100)])[0].status is Status.EXISTS


@pytest.mark.parametrize(("name", "size"), [(b"short", 1), (key(1), 0), (key(1), 21 * PAGE)])
def test_a_bad_key_or_size_is_invalid(name: bytes, size: int) -> None:
    assert World().table.put_start([(name, size)])[0].status is Status.INVALID


def test_a_revoked_put_frees_its_room() -> None:
    world = World()
    [reservation] = world.table.put_start([(key(1), 100)])
    assert world.table.put_revoke([reservation.put_id]) == [Status.OK]
    assert world.table.put_revoke([reservation.put_id]) == [Status.EXPIRED]
    assert world.table.put_end([(reservation.put_id, 1)]) == [Status.EXPIRED]
    assert world.table.used_bytes == 0


def test_a_stale_put_is_reclaimed_and_cannot_end() -> None:
    world = World()
    [reservation] = world.table.put_start([(key(1), 100)])
    world.wait(29.9)
    assert world.table.writable(reservation.put_id) == (reservation.offset, 100)
    world.wait(0.1)
    assert world.table.writable(reservation.put_id) is None
    assert world.table.put_end([(reservation.put_id, 1)]) == [Status.EXPIRED]
    assert world.table.used_bytes == 0
    assert world.table.counters.stale_puts_total == 1


def test_ids_of_another_incarnation_are_unknown() -> None:
    world = World()
    assert world.table.put_end([(5, 0)]) == [Status.NOT_FOUND]
    assert world.table.verify([5]) == [Status.NOT_FOUND]
    assert world.table.release([5]) == [Status.NOT_FOUND]


def test_eviction_starts_at_the_watermark_and_frees_a_step() -> None:
    """20 pages: nothing is evicted up to 18; the 19th makes room down to 17."""
    world = World()
    for number in range(18):
        world.put(number)
        world.wait(1)
    assert world.table.counters.evictions_total == 0
    world.put(18)
    assert world.present() == set(range(2, 19))
    assert world.table.used_bytes == 17 * PAGE


def test_what_was_used_last_is_evicted_last() -> None:
    world = World()
    for number in range(18):
        world.put(number)
        world.wait(1)
    [found] = world.table.get([key(0)])
    world.table.release([found.lease_id])
    world.table.put_start([(key(1), PAGE)])  # it exists: that counts as use
    world.put(18)
    assert world.present() == set(range(19)) - {2, 3}


def test_of_objects_used_together_the_suffix_goes_first() -> None:
    world = World()
    world.put(*range(18))
    world.put(18)
    assert world.present() == set(range(19)) - {17, 16}
    # read together, the order of reading counts
    world = World()
    world.put(*reversed(range(18)))
    world.table.get([key(n) for n in range(18)])
    world.wait(60)
    world.put(18)
    assert world.present() == set(range(19)) - {17, 16}


def test_a_leased_object_is_never_evicted_and_without_room_a_put_is_refused() -> None:
    world = World()
    world.put(*range(18))
    world.table.get([key(n) for n in range(18)])
    reserved = world.table.put_start([(key(n), PAGE) for n in range(18, 21)])
    assert [r.status for r in reserved] == [Status.OK, Status.OK, Status.NO_SPACE]
    assert world.table.counters.evictions_total == 0
    world.wait(60)
    assert world.table.put_start([(key(20), PAGE)])[0].status is Status.OK
    assert world.table.counters.evictions_total > 0


def test_a_torn_pool_is_evicted_until_a_large_object_fits() -> None:
    world = World()
    world.put(*range(16))
    [held] = world.table.get([key(8)])
    assert held.status is Status.OK
    reserved = world.table.put_start([(key(99), 10 * PAGE)])
    assert reserved[0].status is Status.OK
    assert 8 in world.present()


def test_a_lease_lasts_longer_for_more_bytes_and_no_longer_than_the_cap() -> None:
    world = World(pages=100_000)
    world.put(1, num_bytes=64 << 20)
    world.put(2, 3, num_bytes=100 << 20)
    assert world.table.get([key(1)])[0].lease_s == 11.0
    assert world.table.get([key(1)], lease_s=2.0)[0].lease_s == 2.0
    assert world.table.get([key(1)], lease_s=1e9)[0].lease_s == 11.0


def test_a_lease_is_verified_renewed_released_and_lapses() -> None:
    world = World()
    world.put(1)
    [found] = world.table.get([key(1)])
    world.wait(9)
    assert world.table.verify([found.lease_id], renew_s=20) == [Status.OK]
    world.wait(19)
    assert world.table.verify([found.lease_id]) == [Status.OK]
    assert world.table.release([found.lease_id]) == [Status.OK]
    assert world.table.release([found.lease_id]) == [Status.EXPIRED]
    [found] = world.table.get([key(1)])
    world.wait(found.lease_s)
    assert world.table.readable(found.lease_id) is None
    assert world.table.verify([found.lease_id]) == [Status.EXPIRED]
    assert world.table.num_leases == 0


def test_changes_tell_what_appeared_and_disappeared() -> None:
    world = World()
    world.put(*range(18))
    assert set(world.table.take_changes().added) == {key(n) for n in range(18)}
    world.put(18)
    added, removed = world.table.take_changes()
    assert (set(added), removed) == ({key(18)}, {key(17), key(16)})
    world.put(17)
    assert world.table.take_changes() == ({key(17): PAGE}, set())


@dataclass
class Written:
    offset: int
    num_bytes: int
    ends_at: float


class TableMachine(RuleBasedStateMachine):
    """Any order of calls and waits, against the plain meaning of reservations and leases."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(pages=10)
        self.table = self.world.table
        self.puts: dict[int, tuple[bytes, Written]] = {}
        self.leases: dict[int, tuple[bytes, Written]] = {}
        self.places: dict[bytes, tuple[int, int]] = {}

    numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5)
    sizes = st.integers(1, 3)

    @rule(numbers=numbers, pages=sizes)
    def put_whole(self, numbers: list[int], pages: int) -> None:
        """Objects get there at once, so that the pool is full soon."""
        known = set(self.puts)
        self.put_start(numbers, pages)
        for put_id in sorted(set(self.puts) - known):
            self.end_put(put_id, revoke=False)

    @rule(numbers=numbers, pages=sizes)
    def put_start(self, numbers: list[int], pages: int) -> None:
        size = pages * PAGE - 7
        for number, r in zip(
            numbers, self.table.put_start([(key(n), size) for n in numbers]), strict=True
        ):
            if r.status is Status.OK:
                written = Written(r.offset, r.num_bytes, self.world.time + 30)
                self.puts[r.put_id] = (key(number), written)

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), revoke=st.booleans())
    def put_finish(self, data: st.DataObject, revoke: bool) -> None:
        self.end_put(data.draw(st.sampled_from(sorted(self.puts))), revoke)

    def end_put(self, put_id: int, revoke: bool) -> None:
        name, written = self.puts.pop(put_id)
        in_time = self.world.time < written.ends_at
        was_there = self.table.exists([name])[0]
        if revoke:
            assert self.table.put_revoke([put_id]) == [Status.OK if in_time else Status.EXPIRED]
            return
        [status] = self.table.put_end([(put_id, put_id)])
        if not in_time:
            assert status is Status.EXPIRED
        else:
            assert status is (Status.EXISTS if was_there else Status.OK)
        if status is Status.OK:
            self.places[name] = (written.offset, put_id)

    @precondition(lambda self: self.places)
    @rule(numbers=numbers, lease_s=st.sampled_from([0.0, 3.0]))
    def get(self, numbers: list[int], lease_s: float) -> None:
        before = self.table.exists([key(n) for n in numbers])
        for number, there, found in zip(
            numbers, before, self.table.get([key(n) for n in numbers], lease_s), strict=True
        ):
            assert (found.status is Status.OK) == there
            if there:
                assert self.places[key(number)] == (found.offset, found.checksum)
                ends_at = self.world.time + found.lease_s
                leased = Written(found.offset, found.num_bytes, ends_at)
                self.leases[found.lease_id] = (key(number), leased)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), renew_s=st.sampled_from([0.0, 8.0]))
    def verify(self, data: st.DataObject, renew_s: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        leased = self.leases[lease_id][1]
        live = self.world.time < leased.ends_at
        assert self.table.verify([lease_id], renew_s) == [Status.OK if live else Status.EXPIRED]
        if live:
            leased.ends_at = max(leased.ends_at, self.world.time + renew_s)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        _, leased = self.leases.pop(lease_id)
        live = self.world.time < leased.ends_at
        assert self.table.release([lease_id]) == [Status.OK if live else Status.EXPIRED]

    @rule(seconds=st.sampled_from([0.5, 2.0, 9.0, 29.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)
        self.table.expire()

    @invariant()
    def a_leased_object_stays_where_it_is(self) -> None:
        for lease_id, (name, leased) in self.leases.items():
            if self.world.time < leased.ends_at:
                assert self.table.exists([name]) == [True]
                assert self.table.readable(lease_id) == (leased.offset, leased.num_bytes)

    @invariant()
    def nothing_alive_overlaps_and_used_bytes_are_exact(self) -> None:
        runs = []
        for put_id, (_, written) in self.puts.items():
            place = self.table.writable(put_id)
            assert (place is not None) == (self.world.time < written.ends_at)
            if place is not None:
                runs.append(place)
        for name, size in self.table.inventory().items():
            runs.append((self.places[name][0], size))
        runs.sort()
        ends = [offset + -(-size // PAGE) * PAGE for offset, size in runs]
        assert all(end <= offset for end, (offset, _) in zip(ends, runs[1:], strict=False))
        used = sum(end - offset for end, (offset, _) in zip(ends, runs, strict=True))
        assert used == self.table.used_bytes <= self.table.pool_bytes


TestTable = TableMachine.TestCase
TestTable.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
