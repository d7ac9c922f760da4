"""Workers come and go through the registry; silence of Redis changes nothing for who is there."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from diptych.clock import SystemClock
from diptych.config import RedisConfig
from diptych.embedded_redis import EmbeddedRedis
from diptych.registry import Heartbeat, Registry, WorkerRecord
from diptych.services.router import membership
from diptych.services.router.membership import Members, registry_membership
from diptych.services.router.routable import Role
from diptych.services.router.worker_link import WorkerLink
from tests.services.fake_worker import DECODE, PREFILL, FakeWorker
from tests.services.router_fixture import TIMES, until

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with EmbeddedRedis() as url:
        yield url


def make_members() -> Members:
    def make_link(address: str, on_change: object) -> WorkerLink:
        return WorkerLink(
            address,
            router_incarnation="r1",
            clock=SystemClock(),
            times=TIMES,
            on_change=on_change,  # type: ignore[arg-type]
        )

    return Members(make_link, lambda model: model == "tiny")


@asynccontextmanager
async def announced(registry: Registry, worker: FakeWorker) -> AsyncIterator[FakeWorker]:
    """A worker that serves and tells the registry so."""
    record = WorkerRecord(
        worker_id=worker.worker_id,
        incarnation="i1",
        role="prefill",
        address=worker.address,
        admin_address="",
        model=worker.model,
        kv_namespace="ns",
    )
    async with Heartbeat(registry, lambda: record):
        yield worker


async def test_links_follow_the_registry(url: str) -> None:
    config = RedisConfig(
        redis=url, registry_prefix=os.urandom(4).hex(), heartbeat_s=0.05, liveness_s=60.0
    )
    registry, members = Registry(config), make_members()
    async with (
        FakeWorker("p1", PREFILL, []) as prefill,
        FakeWorker("d1", DECODE, []) as decode,
        FakeWorker("x1", DECODE, [], model="other") as other,
        registry_membership(members, registry) as watch,
        announced(registry, prefill),
        announced(registry, other),
    ):
        await until(lambda: members.count() == {Role.PREFILL: 1})
        assert watch.problem == ""
        assert members.max_model_len == 1024
        async with announced(registry, decode):
            await until(lambda: members.count() == {Role.PREFILL: 1, Role.DECODE: 1})
        # it has withdrawn, but its stream is open: what it runs may end there
        await until(lambda: decode.address not in watch_addresses(watch.members))
        assert members.count()[Role.DECODE] == 1
        await decode.die()
        await until(lambda: members.count() == {Role.PREFILL: 1})
        await until(lambda: decode.address not in {link.address for link in members.links})
    await registry.close()


async def test_workers_stay_while_redis_is_gone() -> None:
    redis = EmbeddedRedis()
    config = RedisConfig(redis=redis.start(), heartbeat_s=0.05, liveness_s=0.2)
    registry, members = Registry(config), make_members()
    try:
        async with (
            FakeWorker("p1", PREFILL, []) as worker,
            registry_membership(members, registry),
            announced(registry, worker),
        ):
            await until(lambda: members.count() == {Role.PREFILL: 1})
            redis.kill()
            await asyncio.sleep(0.5)  # more than its liveness
            assert members.count() == {Role.PREFILL: 1}
    finally:
        redis.stop()
        await registry.close()


def watch_addresses(records: dict[str, WorkerRecord]) -> set[str]:
    return {record.address for record in records.values()}


async def test_a_worker_that_dies_is_lost_and_returns() -> None:
    members = make_members()
    async with FakeWorker("p1", PREFILL, []) as worker:
        await members.set_addresses([worker.address])
        await until(lambda: members.count() == {Role.PREFILL: 1})
        await worker.die()
        await until(lambda: not members.count())
        await worker.restart()
        await until(lambda: members.count() == {Role.PREFILL: 1})
        await members.close()
        assert members.links == []


async def test_a_worker_that_left_is_not_connected_to_for_long() -> None:
    """Not even by a channel that was closed while it tried: whoever comes to its address soon sees
    nobody."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host, port = silent.getsockname()
        members = make_members()
        await members.set_addresses([f"{host}:{port}"])
        connection, _ = await asyncio.to_thread(silent.accept)
        connection.close()
    await asyncio.sleep(0.5)
    await members.close()
    with socket.create_server((host, port)) as other:
        other.settimeout(5)  # longer than between two tries
        until_s = time.monotonic() + 60
        while await asyncio.to_thread(came, other):
            assert time.monotonic() < until_s


@pytest.mark.parametrize("name", ["p1\nWARNING all is lost", "p" * 257])
async def test_a_worker_whose_name_is_none_gets_no_requests(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What it says of itself would stand in logs and labels, and be told to other workers."""
    members = make_members()
    async with FakeWorker(name, PREFILL, []) as strange, FakeWorker("d1", DECODE, []) as worker:
        await members.set_addresses([strange.address, worker.address])
        await until(lambda: members.count() == {Role.DECODE: 1} and strange.num_asked > 2)
        assert members.count() == {Role.DECODE: 1}
        await members.close()
    said = [line for line in caplog.messages if strange.address in line and "gets no" in line]
    assert said == [f"worker {strange.address} gets no requests: its worker_id is no name"]
    assert not any(name in line for line in caplog.messages)


async def test_addresses_by_the_thousand_cost_a_bounded_number_of_links(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "_MAX_LINKS", 3)
    members = make_members()
    bogus = [f"127.0.0.1:{port}" for port in range(1, 9)]
    async with FakeWorker("p1", PREFILL, []) as worker:
        await members.set_addresses([worker.address])
        await until(lambda: members.count() == {Role.PREFILL: 1})
        for _ in range(2):
            await members.set_addresses([*bogus, worker.address])
        assert len(members.links) == 3
        assert members.count() == {Role.PREFILL: 1}
        assert [line for line in caplog.messages if "announced" in line] == [
            "9 workers are announced; the first 3 get requests"
        ]
        # what goes makes room
        async with FakeWorker("d1", DECODE, []) as late:
            await members.set_addresses([worker.address, late.address])
            await until(lambda: members.count() == {Role.PREFILL: 1, Role.DECODE: 1})
        await members.close()


def came(listening: socket.socket) -> bool:
    """Whether somebody connects in time; they are sent away."""
    try:
        connection, _ = listening.accept()
    except TimeoutError:
        return False
    connection.close()
    return True


async def test_a_fault_while_workers_are_followed_does_not_freeze_them(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(RedisConfig(redis=url, registry_prefix=os.urandom(4).hex()))
    members = make_members()
    follow, faults = members.set_addresses, ["out of descriptors, say"]

    async def faulty(addresses: list[str]) -> None:
        if addresses and faults:
            raise RuntimeError(faults.pop())
        await follow(addresses)

    monkeypatch.setattr(members, "set_addresses", faulty)
    async with (
        FakeWorker("p1", PREFILL, []) as worker,
        registry_membership(members, registry),
        announced(registry, worker),
    ):
        await until(lambda: members.count() == {Role.PREFILL: 1})
        assert not faults
    await registry.close()
