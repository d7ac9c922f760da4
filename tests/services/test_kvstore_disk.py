"""The disk tier: real files under real nodes that are killed, starved and lied to."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diptych.connectors.store_results import Outcome
from diptych.errors import ConfigError
from diptych.proto import kvstore_pb2 as pb
from diptych.services.kvstore.disk_files import DIRECT_BYTES, FileInfo, ObjectFiles, rounded
from diptych.services.kvstore.disk_index import DiskIndex
from diptych.services.kvstore.frequency import FrequencySketch
from tests.services.test_kvstore import MIB, Node, control, get, key, patient, put, running_node

PAGE = 4096


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ObjectFiles]:
    files = ObjectFiles(tmp_path / "ssd")
    yield files
    files.close()


def aligned(data: bytes) -> memoryview:
    """The bytes in whole blocks of page-aligned memory, as they lie in the pool."""
    import mmap

    memory = memoryview(mmap.mmap(-1, rounded(len(data))))
    memory[: len(data)] = data
    return memory


def info_of(data: bytes, name: bytes | None = None, tenant: str = "") -> FileInfo:
    import xxhash

    return FileInfo(name or key(), len(data), xxhash.xxh3_64_intdigest(data), tenant, 0.0)


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def num_on_disk(node: Node) -> int:
    return int(control(node).GetStats(pb.GetStatsRequest()).num_disk_objects)


# --- files


@pytest.mark.parametrize("size", [1, PAGE, 100_001, DIRECT_BYTES, DIRECT_BYTES + 5])
@pytest.mark.parametrize("direct", [True, False])
def test_a_file_gives_back_what_was_written(files: ObjectFiles, size: int, direct: bool) -> None:
    files._direct = direct
    data = os.urandom(size)
    info = info_of(data, tenant="müller")
    files.write(info, aligned(data))
    body = aligned(bytes(size))
    assert files.read(info, body)
    assert body[:size] == data
    [found] = files.scan()
    assert found[:4] == info[:4]


@pytest.mark.parametrize("where", ["header", "body", "cut", "gone", "other"])
def test_a_damaged_file_is_not_read(files: ObjectFiles, where: str) -> None:
    data = os.urandom(200_000)
    info = info_of(data)
    files.write(info, aligned(data))
    path = files.path(info.key)
    raw = bytearray(path.read_bytes())
    if where == "gone":
        path.unlink()
    elif where == "cut":
        path.write_bytes(raw[:-PAGE])
    elif where == "other":
        other = info_of(data[::-1])
        files.write(other, aligned(data[::-1]))
        files.path(other.key).rename(path)
    else:
        raw[20 if where == "header" else PAGE + 100_000] ^= 1
        path.write_bytes(raw)
    assert not files.read(info, aligned(bytes(len(data))))
    expected = [info.key] if where == "body" else []  # a scan does not read the bytes
    assert [found.key for found in files.scan()] == expected


def test_what_is_no_folder_costs_no_other_folder_its_objects(files: ObjectFiles) -> None:
    info = info_of(b"x", b"\xff" * 32)
    files.write(info, aligned(b"x"))
    (files.root / "00").write_text("a file where a folder of objects would be")
    assert [found.key for found in files.scan()] == [info.key]


def test_a_folder_belongs_to_one_node(files: ObjectFiles) -> None:
    with pytest.raises(ConfigError, match="in use"):
        ObjectFiles(files.root)


# --- what may enter


def index_of(pages: int, **settings: float) -> tuple[DiskIndex, FrequencySketch]:
    frequency = FrequencySketch(1 << 10)
    clock = iter(range(1_000_000))
    return DiskIndex(pages * 2 * PAGE, lambda: float(next(clock)), frequency, **settings), frequency


def test_with_room_all_enter_and_without_only_what_is_used_more_than_what_goes() -> None:
    index, frequency = index_of(10)
    names = [key() for _ in range(9)]
    for name in names:
        frequency.add(name)
        assert index.admit(info_of(b"x", name)) == (True, [])
        index.add(info_of(b"x", name))
    newcomer = info_of(b"x")
    frequency.add(newcomer.key)
    assert index.admit(newcomer) == (False, [])
    frequency.add(newcomer.key)
    # the first was kept and went to the back: now the second is the one that would go
    assert index.admit(newcomer) == (True, names[1:3])  # down to the low mark
    assert names[0] in index
    assert names[1] not in index


def test_a_tenant_over_its_quota_makes_room_among_its_own() -> None:
    index, _ = index_of(10, tenant_quota=0.2)
    other, *own = [info_of(b"x", tenant=t) for t in ("b", "a", "a", "a")]
    for info in (other, *own[:2]):
        index.add(info)
    assert index.admit(own[2]) == (True, [own[0].key])
    assert other.key in index


def test_a_tenant_that_holds_nothing_any_more_is_forgotten() -> None:
    index, _ = index_of(10, tenant_quota=0.5)
    infos = [info_of(b"x", tenant=f"t{number}") for number in range(100)]
    for info in infos:
        index.add(info)
        assert index.remove(info.key)
    assert index._tenants == {} == index._tenant_orders


def test_the_sketch_counts_and_ages() -> None:
    sketch = FrequencySketch(1 << 4)
    name = key()
    assert [sketch.add(name) for _ in range(20)] == [*range(1, 16), 15, 15, 15, 15, 15]
    for _ in range(200):
        sketch.add(bytes(32))
    assert sketch.estimate(name) < 15


# --- nodes


def test_what_memory_evicted_comes_back_from_disk(tmp_path: Path) -> None:
    with running_node(pool_bytes=4 * MIB, ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        client = patient(node.address)
        objects = {key(): os.urandom(MIB // 2) for _ in range(20)}
        for number, (name, data) in enumerate(objects.items(), 1):
            put(client, {name: data})
            until(lambda number=number: num_on_disk(node) == number)
        assert client.exists_many(list(objects)) == [True] * 20
        for name, data in objects.items():
            results, taken = get(client, [name])
            assert (results[0].outcome, taken[0]) == (Outcome.OK, data)
        stats = control(node).GetStats(pb.GetStatsRequest())
        assert stats.disk_hits_total >= 13
        # there already: not written again
        assert put(client, objects)[0].outcome is Outcome.EXISTS
        client.close()


def test_only_what_is_used_again_goes_to_disk(tmp_path: Path) -> None:
    with running_node(ssd_path=str(tmp_path)) as node:
        client = patient(node.address)
        once, twice = key(), key()
        put(client, {once: b"a" * 100, twice: b"b" * 100})
        get(client, [twice])
        until(lambda: num_on_disk(node) == 1)
        time.sleep(0.1)
        assert num_on_disk(node) == 1
        assert len(list(tmp_path.glob(f"*/{twice.hex()}"))) == 1
        client.close()


def test_a_killed_node_comes_back_with_its_files_and_its_name(tmp_path: Path) -> None:
    objects = {key(): os.urandom(50_000) for _ in range(10)}
    with running_node(ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        client = patient(node.address)
        put(client, objects)
        until(lambda: num_on_disk(node) == 10)
        name = control(node).GetNode(pb.GetNodeRequest()).node_id
        node.process.kill()
        node.process.wait()
        client.close()
    half_written = tmp_path / "00"
    half_written.mkdir(exist_ok=True)
    (half_written / ".half").write_bytes(b"torn")
    with running_node(ssd_path=str(tmp_path)) as node:
        client = patient(node.address)
        until(lambda: num_on_disk(node) == 10)
        assert control(node).GetNode(pb.GetNodeRequest()).node_id == name
        results, taken = get(client, list(objects))
        assert {r.outcome for r in results} == {Outcome.OK}
        assert list(taken.values()) == list(objects.values())
        assert not list(tmp_path.glob("*/.*"))
        client.close()


def test_a_node_that_is_told_to_stop_keeps_on_disk_what_its_memory_has(tmp_path: Path) -> None:
    """Each was used once only, and would never go to disk by itself."""
    objects = {key(): os.urandom(50_000) for _ in range(20)}
    with running_node(ssd_path=str(tmp_path), drain_s=60.0) as node:
        client = patient(node.address)
        put(client, objects)
        assert num_on_disk(node) == 0
        client.close()
    with running_node(ssd_path=str(tmp_path)) as node:
        client = patient(node.address)
        until(lambda: num_on_disk(node) == 20)
        results, taken = get(client, list(objects))
        assert {r.outcome for r in results} == {Outcome.OK}
        assert list(taken.values()) == list(objects.values())
        client.close()


def test_what_was_used_last_goes_to_disk_first_where_there_is_little_room(tmp_path: Path) -> None:
    old, new = key(), key()
    data = os.urandom(60_000)
    room = {"ssd_path": str(tmp_path), "ssd_bytes": 100_000}
    with running_node(**room, drain_s=60.0) as node:
        client = patient(node.address)
        put(client, {old: data})
        put(client, {new: data})
        client.close()
    with running_node(**room) as node:
        until(lambda: num_on_disk(node) == 1)
        assert list(control(node).Exists(pb.ExistsRequest(keys=[old, new])).present) == [
            False,
            True,
        ]


def test_a_reader_may_end_before_a_node_that_is_told_to_stop(tmp_path: Path) -> None:
    with running_node(drain_s=60.0) as node:
        client, stub, name = patient(node.address), control(node), key()
        put(client, {name: b"a" * 100})
        [found] = stub.Get(pb.GetRequest(keys=[name])).results
        node.process.terminate()
        time.sleep(0.3)
        ours = [found.lease_id]
        held = stub.VerifyLease(pb.VerifyLeaseRequest(lease_ids=ours))
        assert list(held.statuses) == [pb.ITEM_STATUS_OK]
        stub.Release(pb.ReleaseRequest(lease_ids=ours))
        assert node.process.wait(60) == 0
        client.close()


def test_a_flipped_byte_on_disk_is_a_miss_and_the_file_goes(tmp_path: Path) -> None:
    name, other = key(), key()
    with running_node(ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        client = patient(node.address)
        put(client, {name: os.urandom(10_000), other: b"whole"})
        until(lambda: num_on_disk(node) == 2)
        client.close()
    [path] = tmp_path.glob(f"*/{name.hex()}")
    raw = bytearray(path.read_bytes())
    raw[PAGE + 77] ^= 4
    path.write_bytes(raw)
    with running_node(ssd_path=str(tmp_path)) as node:
        client = patient(node.address)
        until(lambda: num_on_disk(node) == 2)
        results, _ = get(client, [name, other])
        assert [r.outcome for r in results] == [Outcome.NOT_FOUND, Outcome.OK]
        assert control(node).GetStats(pb.GetStatsRequest()).corrupt_total == 1
        until(lambda: not path.exists())
        assert put(client, {name: b"new"})[0].outcome is Outcome.OK
        client.close()


def flip(path: Path) -> None:
    """One bit of an object's bytes; the file stays the same one."""
    with path.open("r+b") as file:
        file.seek(PAGE + 77)
        byte = file.read(1)[0]
        file.seek(PAGE + 77)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("size", [10_000, DIRECT_BYTES])
def test_a_check_finds_damage_on_disk_below_what_is_in_memory(tmp_path: Path, size: int) -> None:
    name, data = key(), os.urandom(size)
    with running_node(ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        client, stub = patient(node.address), control(node)
        put(client, {name: data})
        until(lambda: num_on_disk(node) == 1)
        asked = pb.CheckRequest(keys=[name, key()])
        [path] = tmp_path.glob(f"*/{name.hex()}")
        not_there = pb.ITEM_STATUS_NOT_FOUND
        assert list(stub.Check(asked).statuses) == [pb.ITEM_STATUS_OK, not_there]
        flip(path)
        assert list(stub.Check(asked).statuses) == [pb.ITEM_STATUS_INVALID, not_there]
        assert num_on_disk(node) == 0
        until(lambda: not path.exists())
        assert stub.GetStats(pb.GetStatsRequest()).corrupt_total == 1
        # the copy in memory is whole, and goes to disk again when it is used
        assert get(client, [name])[1] == {0: data}
        until(lambda: num_on_disk(node) == 1)
        assert list(stub.Check(asked).statuses) == [pb.ITEM_STATUS_OK, not_there]
        client.close()


def test_a_check_brings_nothing_up_from_disk(tmp_path: Path) -> None:
    whole, damaged = key(), key()
    with running_node(ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        client = patient(node.address)
        put(client, {whole: os.urandom(10_000), damaged: os.urandom(10_000)})
        until(lambda: num_on_disk(node) == 2)
        client.close()
    [path] = tmp_path.glob(f"*/{damaged.hex()}")
    flip(path)
    with running_node(ssd_path=str(tmp_path)) as node:
        until(lambda: num_on_disk(node) == 2)
        statuses = control(node).Check(pb.CheckRequest(keys=[whole, damaged])).statuses
        assert list(statuses) == [pb.ITEM_STATUS_OK, pb.ITEM_STATUS_INVALID]
        stats = control(node).GetStats(pb.GetStatsRequest())
        assert (stats.num_objects, stats.num_disk_objects, stats.corrupt_total) == (0, 1, 1)


def test_a_full_disk_costs_only_the_disk_tier(tmp_path: Path) -> None:
    with running_node(ssd_path=str(tmp_path), ssd_min_uses=1) as node:
        resource.prlimit(node.process.pid, resource.RLIMIT_FSIZE, (PAGE, resource.RLIM_INFINITY))
        client = patient(node.address)
        data = os.urandom(100_000)
        name = key()
        assert put(client, {name: data})[0].outcome is Outcome.OK
        until(lambda: "kvstore_disk_write_errors_total 1.0" in node.get("/metrics")[1])
        assert get(client, [name])[1] == {0: data}
        assert num_on_disk(node) == 0
        assert not list(tmp_path.glob("*/*"))
        client.close()
