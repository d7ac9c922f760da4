"""The directory against a real server: entries follow the table, and come back when Redis does."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from diptych.config import RedisConfig
from diptych.embedded_redis import EmbeddedRedis
from diptych.errors import UnavailableError
from diptych.redis_client import RedisClient
from diptych.services.kvstore.arena import Arena
from diptych.services.kvstore.directory import Directory, DirectoryWriter, Holder
from diptych.services.kvstore.objects import ObjectTable
from diptych.services.kvstore.tiers import Tiers

PAGE = 4096


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


class World:
    """A table and what the directory says of it."""

    def __init__(self, url: str, pages: int = 20, redis: RedisClient | None = None) -> None:
        self.table = ObjectTable(Arena(pages * PAGE), lambda: 0.0)
        self.tiers = Tiers(self.table)
        self.prefix = os.urandom(4).hex()
        self.redis = redis or RedisClient(RedisConfig(redis=url, registry_prefix=self.prefix))
        self.directory = Directory(self.redis)

    def writer(self, life_s: float = 60.0, incarnation: str = "i1") -> DirectoryWriter:
        return DirectoryWriter(
            self.directory, self.tiers, "n1", incarnation, interval_s=0.02, life_s=life_s
        )

    def put(self, *numbers: int) -> None:
        reserved = self.table.put_start([(key(n), 100 + n) for n in numbers])
        self.table.put_end([(r.put_id, 0) for r in reserved])

    async def holders(self, *numbers: int) -> list[list[Holder]]:
        return await self.directory.lookup(["n1", "n2"], [key(n) for n in numbers])

    async def agrees(self) -> bool:
        """Whether the directory names exactly the table's objects, among the first 30."""
        try:
            found = await self.holders(*range(30))
        except UnavailableError:
            return False
        there = self.table.inventory()
        return found == [
            [Holder("n1", "dram", there[key(n)])] if key(n) in there else [] for n in range(30)
        ]


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis() as url:
        yield url


@pytest.fixture
async def world(url: str) -> AsyncIterator[World]:
    world = World(url)
    yield world
    await world.redis.close()


@pytest.mark.anyio
async def test_entries_follow_puts_and_evictions_and_go_with_the_node(world: World) -> None:
    world.put(1, 2)
    async with world.writer():
        await until(world.agrees)
        assert (await world.holders(1, 9))[0] == [Holder("n1", "dram", 101)]
        for number in range(3, 22):
            world.put(number)
        assert world.table.counters.evictions_total
        await until(world.agrees)
    assert await world.holders(20) == [[]]


@pytest.mark.anyio
async def test_an_inventory_larger_than_a_batch_arrives_whole(url: str) -> None:
    world = World(url, pages=4000)
    world.put(*range(2500))
    async with world.writer():

        async def whole() -> bool:
            return all(await world.holders(*range(2500)))

        await until(whole)
    await world.redis.close()


@pytest.mark.anyio
async def test_a_dead_node_takes_its_entries_with_it(world: World) -> None:
    world.put(1)
    await world.directory.begin("n1", "i1", 60.0)
    assert await world.directory.apply("n1", "i1", 60.0, world.tiers.take_changes())
    assert (await world.holders(1))[0]
    # the last it says; it renews its life for half a second
    assert await world.directory.apply("n1", "i1", 0.5, world.tiers.take_changes())

    async def forgotten() -> bool:
        return await world.holders(1) == [[]]

    await until(forgotten)


@pytest.mark.anyio
async def test_a_silent_or_replaced_node_cannot_add_to_what_it_lost(world: World) -> None:
    changes = world.tiers.take_changes()
    assert not await world.directory.apply("n1", "i1", 60.0, changes)
    await world.directory.begin("n1", "i2", 60.0)
    assert not await world.directory.apply("n1", "i1", 60.0, changes)
    await world.directory.end("n1", "i1")
    assert await world.directory.apply("n1", "i2", 60.0, changes)


@pytest.mark.anyio
async def test_the_inventory_is_announced_again_when_redis_comes_back_empty(tmp_path: Path) -> None:
    link = tmp_path / "redis.sock"
    first = EmbeddedRedis()
    link.symlink_to(first.start().removeprefix("unix://"))
    world = World(f"unix://{link}")
    world.put(1, 2, 3)
    async with world.writer():
        await until(world.agrees)
        first.kill()
        first.stop()
        world.put(4)  # while nobody listens
        await asyncio.sleep(0.1)
        link.unlink()
        with EmbeddedRedis() as second:
            link.symlink_to(second.removeprefix("unix://"))
            await until(world.agrees)
            assert (await world.holders(4))[0]
    await world.redis.close()


@pytest.mark.anyio
async def test_what_a_restarted_redis_remembers_from_before_is_replaced(tmp_path: Path) -> None:
    """It came back from an old dump: the marker is there, and so are entries that are not true."""
    link = tmp_path / "redis.sock"
    first = EmbeddedRedis()
    link.symlink_to(first.start().removeprefix("unix://"))
    world = World(f"unix://{link}")
    world.put(1, 2)
    async with world.writer(life_s=60.0):
        await until(world.agrees)
        with EmbeddedRedis() as second:
            config = RedisConfig(redis=second, registry_prefix=world.prefix)
            restored = World(second, redis=RedisClient(config))
            restored.put(8, 9)
            await restored.directory.begin("n1", "i1", 30.0)
            await restored.directory.apply("n1", "i1", 30.0, restored.tiers.take_changes())
            await restored.redis.close()
            link.unlink()
            link.symlink_to(second.removeprefix("unix://"))
            first.kill()
            first.stop()
            await until(world.agrees)
            assert await world.holders(8, 9) == [[], []]
    await world.redis.close()


class LostDirectory(Directory):
    """One whose server does not answer."""

    num_asked = 0

    async def run_id(self) -> str:
        self.num_asked += 1
        raise UnavailableError("nobody is there")


class DeafDirectory(LostDirectory):
    """One that fails when it is cancelled, so that the cancellation is lost."""

    async def run_id(self) -> str:
        self.num_asked += 1
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise UnavailableError("nobody is there")


@pytest.mark.anyio
async def test_changes_do_not_pile_up_while_redis_is_lost(world: World) -> None:
    directory = world.directory = LostDirectory(world.redis)

    async def asked_again() -> bool:
        return directory.num_asked >= before + 2

    async with world.writer():
        for number in range(100):
            world.put(number)
        before = directory.num_asked
        await until(asked_again)
        assert world.tiers.take_changes() == ({}, set())


@pytest.mark.anyio
async def test_a_node_ends_though_a_cancellation_gets_lost_with_redis(world: World) -> None:
    directory = world.directory = DeafDirectory(world.redis)

    async def asked() -> bool:
        return directory.num_asked > 0

    async def serve() -> None:
        async with world.writer():
            await until(asked)

    await asyncio.wait_for(serve(), 30)


@pytest.mark.anyio
async def test_an_entry_that_no_node_made_is_no_holder(world: World) -> None:
    strange = [b"\xff\xfe", b"dram", b"dram:x", b"a:b:c", b"dram:" + b"9" * 5000, b"\x1b[2J:1"]
    world.put(1)
    async with world.writer():
        await until(world.agrees)
        for value in strange:
            await world.redis.run(
                world.redis.script("redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])"),
                [world.redis.key("directory", "n1")],
                [key(9), value],
            )
            assert await world.holders(1, 9) == [[Holder("n1", "dram", 101)], []]
