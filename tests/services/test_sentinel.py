"""The directory as the master that Sentinels watch: when it dies, all goes on with another."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.config import RedisConfig
from diptych.embedded_redis import find_server
from diptych.errors import ConfigError, UnavailableError
from diptych.launcher import child
from diptych.redis_client import RedisClient
from diptych.redis_url import open_redis, without_password
from diptych.registry import Heartbeat, Registry, Watch, WorkerRecord

WORKER = WorkerRecord(
    worker_id="w1",
    incarnation="i1",
    role="prefill",
    address="127.0.0.1:1",
    admin_address="",
    model="tiny",
    kv_namespace="ns",
)
PASSWORD = "a:b@c/d"
WATCHED = f"""
sentinel monitor directory 127.0.0.1 {{master}} 1
sentinel auth-pass directory "{PASSWORD}"
sentinel down-after-milliseconds directory 1000
sentinel failover-timeout directory 2000
"""


@dataclass
class Servers:
    """A master, a replica and a Sentinel; `url` names a second one before it, which is silent."""

    master: subprocess.Popen[bytes]
    run_id: str
    url: str


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        [find_server(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def said(port: int, *lines: str) -> str:
    """What a server answers to commands; empty where nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall("".join(f"{line}\r\n" for line in [*lines, "PING"]).encode())
            answer = b""
            while not answer.endswith(b"+PONG\r\n") and (part := connection.recv(65536)):
                answer += part
            return answer.decode()
    except OSError:
        return ""


def until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@contextmanager
def serving(tmp_path: Path, ports: list[int]) -> Iterator[Servers]:
    first, second, watcher = ports
    common = ["--save", "", "--bind", "127.0.0.1", "--requirepass", PASSWORD]
    common += ["--masterauth", PASSWORD, "--dir", str(tmp_path)]
    auth = f'AUTH "{PASSWORD}"'
    with ExitStack() as stack:
        master = stack.enter_context(process("--port", str(first), *common))
        ids: list[str] = []

        def has_id() -> bool:
            ids.extend(re.findall(r"run_id:(\w+)", said(first, auth, "INFO server")))
            return bool(ids)

        until(has_id)
        replica = ["--port", str(second), "--replicaof", f"127.0.0.1 {first}"]
        replica += ["--repl-diskless-sync-delay", "0"]
        stack.enter_context(process(*replica, *common))
        # a Sentinel that looks before it has a replica looks again after ten seconds only
        until(lambda: "state=online" in said(first, auth, "INFO replication"))
        config = tmp_path / "sentinel.conf"
        config.write_text(f"port {watcher}\nbind 127.0.0.1\n{WATCHED.format(master=first)}")
        stack.enter_context(process(str(config), "--sentinel", "--dir", str(tmp_path)))
        until(lambda: str(second) in said(watcher, "SENTINEL REPLICAS directory"))
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{watcher}"
        yield Servers(master, ids[0], f"redis+sentinel://:a%3Ab%40c%2Fd@{hosts}/directory/1")


def config(url: str) -> RedisConfig:
    return RedisConfig(redis=url, heartbeat_s=0.05, liveness_s=5.0)


async def run_id(registry: Registry) -> str:
    """The master's; empty while there is none."""
    try:
        return await registry.redis.run_id()
    except UnavailableError:
        return ""


async def until_so(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.02)


@pytest.mark.anyio
async def test_members_go_on_with_another_master(tmp_path: Path) -> None:
    with serving(tmp_path, child.free_ports(3)) as servers:
        registry = Registry(config(servers.url))
        async with (
            Heartbeat(registry, lambda: WORKER),
            Watch(registry, WorkerRecord) as watch,
        ):
            await until_so(lambda: "w1" in watch.members)
            servers.master.kill()
            servers.master.wait()
            async with asyncio.timeout(60):
                while await run_id(registry) in ("", servers.run_id):
                    assert "w1" in watch.members, "membership is frozen meanwhile"
                    await asyncio.sleep(0.05)
            again = Registry(config(servers.url))
            async with asyncio.timeout(60):
                while "w1" not in (await again.members(WorkerRecord)).records:
                    await asyncio.sleep(0.05)
            await again.close()
        await registry.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://a:1,b:2", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://a:1,/directory", "'' is no host:port"),
        ("redis+sentinel://a:x/directory", "Port"),
        ("redis+sentinel://a:1/directory/none", "invalid literal"),
    ],
)
def test_a_url_that_names_no_sentinels_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        RedisClient(config(url))
    assert refused.value.param == "redis"


@pytest.mark.parametrize("way", ["redis", "redis+sentinel"])
@pytest.mark.parametrize("secret", ["ge/heim", "ge?heim", "ge#heim", "ge@heim", "[geheim"])
def test_a_password_that_is_not_encoded_is_not_shown(way: str, secret: str) -> None:
    url = f"{way}://me:{secret}@127.0.0.1:x/service"
    assert "heim" not in without_password(url)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1") as refused:
        RedisClient(config(url))
    assert not any(part in str(refused.value) for part in ("ge/", "ge?", "ge#", "heim", "'ge"))
    assert refused.value.__suppress_context__


def test_options_of_a_url_are_not_shown_and_what_is_no_url_is_refused() -> None:
    assert "geheim" not in RedisClient(config("redis://127.0.0.1:1?password=geheim")).problem
    for url in ("redis://[::1", "127.0.0.1:6379", "http://127.0.0.1:1"):
        with pytest.raises(ConfigError, match="bad Redis URL"):
            RedisClient(config(url))


@pytest.mark.anyio
async def test_names_and_passwords_are_those_of_the_servers_and_not_shown() -> None:
    url = "rediss+sentinel://me:s%40cret@[::1]:5,two/directory"
    opened = open_redis(url, 1.0)
    pool = opened.redis.connection_pool
    assert pool.connection_kwargs["username"] == "me"
    assert pool.connection_kwargs["password"] == "s@cret"
    hosts = [s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in hosts] == [("::1", 5), ("two", 26379)]
    assert not any(each.get("password") for each in hosts)
    await opened.close()
    assert "s%40cret" not in RedisClient(config(url)).problem
