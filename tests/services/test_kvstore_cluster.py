"""Several nodes as one store: real nodes, a real Redis, real signals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from diptych.config import RedisConfig
from diptych.connectors.store_cluster import FixedNodes, StoreCluster
from diptych.connectors.store_membership import RegistryNodes
from diptych.connectors.store_results import Outcome, PutItem
from diptych.connectors.store_ring import owner
from diptych.embedded_redis import EmbeddedRedis
from diptych.proto import kvstore_pb2 as pb
from diptych.services.kvstore.heat import HeatMap
from tests.services.test_kvstore import Node, control, key, running_node


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


LIVENESS_S = 4.0  # more than a live node gets no time to run


class World:
    """A registry, nodes that come and go, and one client of all of them."""

    def __init__(self, stack: ExitStack, url: str, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.redis = {
            "redis": url,
            "registry_prefix": os.urandom(4).hex(),
            "heartbeat_s": 0.1,
            "liveness_s": LIVENESS_S,
        }
        self.nodes: dict[str, Node] = {}
        self.members = RegistryNodes(RedisConfig(**self.redis))  # type: ignore[arg-type]
        self.store = StoreCluster(self.members, timeout_s=60.0, call_timeout_s=60.0)
        stack.callback(self.store.close)

    def start(self, name: str, **settings: object) -> Node:
        """Start a node, or start it again, and wait until the client knows it."""
        context = running_node(
            redis=self.redis, node_id=name, ssd_path=str(self._folder / name), ssd_min_uses=1,
            **settings,
        )  # fmt: skip
        node = self.nodes[name] = self._stack.enter_context(context)
        node.until_ready()
        address = node.address
        until(lambda: any(n.address == address for n in self.members.nodes().values()))
        return node

    def kill(self, name: str) -> None:
        self.nodes[name].process.kill()
        self.nodes[name].process.wait()

    def put(self, objects: dict[bytes, bytes]) -> list[Outcome]:
        def item(name: bytes, data: bytes) -> PutItem:
            return PutItem(name, len(data), lambda view: view.__setitem__(slice(None), data))

        return [r.outcome for r in self.store.put_many([item(*o) for o in objects.items()])]

    def get(self, keys: list[bytes]) -> dict[bytes, bytes]:
        taken: dict[int, bytes] = {}
        results = self.store.get_many(keys, lambda i, view: taken.__setitem__(i, bytes(view)))
        return {keys[i]: taken[i] for i, r in enumerate(results) if r.outcome is Outcome.OK}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis() as url:
        yield url


@contextmanager
def make_world(url: str, folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, url, folder)


@pytest.fixture
def world(url: str, tmp_path: Path) -> Iterator[World]:
    with make_world(url, tmp_path) as world:
        yield world


def some(count: int) -> dict[bytes, bytes]:
    return {key(): os.urandom(1000) for _ in range(count)}


def mapped_pools() -> set[str]:
    """Those of stores that this process maps, by inode."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:diptych-kv" in line}


def stored(node: Node) -> int:
    return int(control(node).GetStats(pb.GetStatsRequest()).num_objects)


def on_disk(node: Node) -> int:
    return int(control(node).GetStats(pb.GetStatsRequest()).num_disk_objects)


def test_each_node_has_its_share_and_a_lost_one_loses_only_that(world: World) -> None:
    for name in "ab":
        world.start(name)
    objects = some(60)
    assert set(world.put(objects)) == {Outcome.OK}
    own = {n: {k for k in objects if owner(k, ["a", "b"]) == n} for n in "ab"}
    assert {n: stored(world.nodes[n]) for n in "ab"} == {n: len(own[n]) for n in "ab"}
    assert world.get(list(objects)) == objects
    assert world.store.exists_many([*objects, key()]) == [True] * 60 + [False]

    world.kill("b")
    assert set(world.get(list(objects))) == own["a"]
    # its keys are the next node's now, at once
    lost = {k: objects[k] for k in own["b"]}
    assert set(world.put(lost)) == {Outcome.OK}
    assert world.get(list(objects)) == objects


def test_a_node_that_joins_takes_its_share_and_what_it_lacks_is_found_where_it_was(
    world: World,
) -> None:
    world.start("a")
    objects = some(40)
    world.put(objects)
    world.start("b")
    assert {owner(k, ["a", "b"]) for k in objects} == {"a", "b"}
    assert world.get(list(objects)) == objects
    assert all(world.store.exists_many(list(objects)))
    more = some(40)
    world.put(more)
    assert stored(world.nodes["b"]) == sum(owner(k, ["a", "b"]) == "b" for k in more)


def test_a_node_that_is_gone_for_good_leaves_nothing_in_its_clients(world: World) -> None:
    for name in "ab":
        world.start(name)
    objects = some(20)
    world.put(objects)
    assert set(world.store._clients) == {"a", "b"}
    world.kill("b")
    until(lambda: set(world.members.nodes()) == {"a"})
    world.get(list(objects))
    assert set(world.store._clients) == {"a"}


def test_the_pool_of_a_lost_node_is_let_go_by_clients_that_ask_for_nothing(world: World) -> None:
    for name in "ab":
        world.start(name)
    world.put(some(20))
    both = mapped_pools()
    assert len(both) >= 2
    world.kill("b")
    world.start("b")  # its memory may be needed at once
    until(lambda: len(mapped_pools()) == len(both) - 1)
    world.kill("a")
    until(lambda: len(mapped_pools()) == len(both) - 2)


def test_a_killed_node_comes_back_with_its_disk_and_all_hits_with_it(world: World) -> None:
    for name in "ab":
        world.start(name)
    objects = some(40)
    world.put(objects)
    num_own = stored(world.nodes["b"])
    until(lambda: on_disk(world.nodes["b"]) == num_own)
    world.kill("b")
    assert len(world.get(list(objects))) == 40 - num_own
    world.start("b")
    until(lambda: on_disk(world.nodes["b"]) == num_own)
    assert world.get(list(objects)) == objects


def test_redis_lost_and_empty_again_changes_no_answer(tmp_path: Path) -> None:
    server = EmbeddedRedis()
    link = tmp_path / "redis.sock"
    link.symlink_to(server.start().removeprefix("unix://"))
    with make_world(f"unix://{link}", tmp_path) as world:
        for name in "ab":
            world.start(name)
        objects = some(30)
        world.put(objects)
        server.kill()
        server.stop()
        time.sleep(0.5)
        assert world.get(list(objects)) == objects
        with EmbeddedRedis() as url:  # it has lost all it held
            link.unlink()
            link.symlink_to(url.removeprefix("unix://"))
            time.sleep(LIVENESS_S + 0.5)
            assert set(world.members.nodes()) == {"a", "b"}
            assert world.get(list(objects)) == objects


def test_everything_killed_comes_back_from_the_disks(tmp_path: Path) -> None:
    objects = some(20)
    for turn in range(2):
        with EmbeddedRedis() as url, make_world(url, tmp_path) as world:
            for name in "ab":
                world.start(name)
            if turn == 0:
                world.put(objects)
            until(lambda world=world: sum(map(on_disk, world.nodes.values())) == 20)
            assert world.get(list(objects)) == objects
            for name in "ab":
                world.kill(name)


def test_a_hot_object_is_copied_and_outlives_its_owner(world: World) -> None:
    for name in "ab":
        world.start(name, hot_reads_per_s=0.5)
    objects = some(1)
    [name] = objects
    world.put(objects)

    def read_and_copied() -> bool:
        # reads count once the owner knows of another node, whenever that is
        assert world.get([name]) == objects
        return stored(world.nodes["a"]) + stored(world.nodes["b"]) == 2

    until(read_and_copied)
    world.kill(owner(name, ["a", "b"]))
    assert world.get([name]) == objects


def test_without_any_node_there_are_no_hits_and_no_errors() -> None:
    store = StoreCluster(FixedNodes([]))
    assert store.exists_many([key()]) == [False]
    assert store.get_many([key()], lambda i, view: None)[0].outcome is Outcome.UNAVAILABLE
    item = PutItem(key(), 1, lambda view: None)
    assert store.put_many([item])[0].outcome is Outcome.UNAVAILABLE
    store.close()


def test_heat_grows_with_the_rate_and_cools() -> None:
    time = [0.0]
    heat = HeatMap(lambda: time[0], reads_per_s=1.0, max_copies=3)
    name = key()
    for _ in range(60):
        time[0] += 2.0
        assert heat.note_read(name) == 1  # half a read a second
    for _ in range(400):
        time[0] += 0.1
        copies = heat.note_read(name)
    assert copies == 3
    time[0] += 60
    assert heat.note_read(name) == 1
