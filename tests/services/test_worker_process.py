"""A worker process from loading to drained, with an engine that computes nothing."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from diptych.config import EngineConfig, KVTransferConfig, RedisConfig, WorkerConfig
from diptych.connectors.store_settings import StoreSettings
from diptych.embedded_redis import EmbeddedRedis
from diptych.engine.request import FinishReason
from diptych.errors import ConfigError, DrainingError, EngineDeadError, ModelLoadError
from diptych.launcher.child import free_ports
from diptych.proto import worker_pb2
from diptych.registry import Registry, StoreRecord, WorkerRecord
from diptych.rpc import open_channel
from diptych.worker.process import WorkerProcess
from tests.services.test_worker_service import error_of
from tests.services.worker_fakes import FakeEngine, FakeRouter, until
from tests.tiny_models import make_tiny_model

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("one_event_loop")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as url:
        yield url


class Worker:
    """A `WorkerProcess` as a task, with an engine that becomes ready when it is let."""

    def __init__(self, model: Path, role: str = "aggregated", **more: Any) -> None:
        self.engine = FakeEngine()
        self.engine_config: EngineConfig | None = None
        self.stop = asyncio.Event()
        self.loaded = asyncio.Event()
        port, admin_port = free_ports(2)
        self.config = WorkerConfig(
            port=port, admin_port=admin_port, worker_id="w", **more.pop("worker", {})
        )
        process = WorkerProcess(
            role,
            self.config,
            EngineConfig(model="tiny", **more.pop("engine", {})),
            more.pop("redis", RedisConfig()),
            resolve_model=lambda name, revision: model,
            start_engine=self._start_engine,
        )
        self.task = asyncio.ensure_future(process.main(self.stop))

    async def _start_engine(self, config: EngineConfig) -> FakeEngine:
        self.engine_config = config
        await self.loaded.wait()
        return self.engine

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.config.port}"

    async def probe(self, path: str) -> tuple[int, str]:
        url = f"http://127.0.0.1:{self.config.admin_port}{path}"
        try:
            async with aiohttp.ClientSession() as http, http.get(url) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientConnectionError:
            return 0, ""

    async def until_ready(self) -> None:
        self.loaded.set()
        async with asyncio.timeout(60):
            while (await self.probe("/readyz"))[0] != 200:
                assert not self.task.done(), self.task.exception()
                await asyncio.sleep(0.02)

    async def until_unready_for(self, reason: str) -> None:
        async with asyncio.timeout(60):
            while True:
                status, text = await self.probe("/readyz")
                if status == 503 and reason in text:
                    return
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(model: Path, role: str = "aggregated", **more: Any) -> AsyncIterator[Worker]:
    worker = Worker(model, role, **more)
    try:
        yield worker
    finally:
        worker.stop.set()
        await asyncio.wait_for(asyncio.gather(worker.task, return_exceptions=True), 60)


async def test_a_worker_is_ready_when_its_engine_is(model: Path) -> None:
    async with running(model, engine={"served_model_name": "mine"}) as worker:
        await worker.until_unready_for("the engine is loading")
        assert (await worker.probe("/livez"))[0] == 200
        await worker.until_ready()
        async with open_channel(worker.address) as channel:
            info = await FakeRouter(channel).stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        assert (info.worker_id, info.model, info.address) == ("w", "mine", worker.address)
        metrics = (await worker.probe("/metrics"))[1]
        labels = 'engine="w",model_name="mine"'
        assert f"vllm:num_requests_running{{{labels}}} 0.0" in metrics
        blocks = [line for line in metrics.splitlines() if line.startswith("diptych:kv_blocks_")]
        assert {float(line.split()[-1]) for line in blocks} == {64.0}, "all free from the start"
        assert f'vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}}' in metrics
    assert worker.task.exception() is None


async def test_a_stop_drains_what_runs_then_ends_cleanly(model: Path) -> None:
    async with running(model) as worker:
        await worker.until_ready()
        async with open_channel(worker.address) as channel:
            router = FakeRouter(channel)
            info = await router.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
            router.worker = info.incarnation
            await router.open()
            await router.submit("a")
            worker.stop.set()
            await worker.until_unready_for("draining")
            assert isinstance(await error_of(router.submit("b")), DrainingError)
            assert not worker.task.done()
            worker.engine.emit("a#1", 0, [7], FinishReason.STOP)
            await router.read()
            await asyncio.wait_for(worker.task, 60)
    assert not worker.engine.aborted


async def test_a_drain_gives_up_at_its_deadline(model: Path) -> None:
    async with running(model, worker={"drain_s": 0.2}) as worker:
        await worker.until_ready()
        async with open_channel(worker.address) as channel:
            router = FakeRouter(channel)
            info = await router.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
            router.worker = info.incarnation
            await router.open()
            await router.submit("a")
            worker.stop.set()
            await asyncio.wait_for(worker.task, 60)
    assert worker.engine.aborted == ["a#1"]


async def test_a_stop_while_loading_ends_at_once(model: Path) -> None:
    async with running(model) as worker:
        await worker.until_unready_for("loading")
        worker.stop.set()
        await asyncio.wait_for(worker.task, 60)


async def test_a_dead_engine_ends_the_process_with_its_error(model: Path) -> None:
    async with running(model) as worker:
        await worker.until_ready()
        worker.engine.end(EngineDeadError("the engine process ended with code -9"))
        with pytest.raises(EngineDeadError, match="code -9"):
            await asyncio.wait_for(worker.task, 60)


async def test_a_fault_in_what_runs_beside_the_engine_ends_the_process(
    model: Path,
) -> None:
    """Else nobody would carry what engines say to each other, and nobody would know."""
    async with running(model) as worker:
        await worker.until_ready()
        worker.engine.say("no message")  # type: ignore[arg-type]
        with pytest.raises(AttributeError):
            await asyncio.wait_for(worker.task, 60)


async def never_started(config: EngineConfig) -> FakeEngine:
    raise AssertionError("the engine was started")


async def test_a_connector_of_nonsense_is_named_before_anything_loads(model: Path) -> None:
    process = WorkerProcess(
        "decode",
        WorkerConfig(),
        EngineConfig(kv_transfer_config=KVTransferConfig(kv_connector="NoConnector")),
        RedisConfig(),
        resolve_model=lambda name, revision: model,
        start_engine=never_started,
    )
    with pytest.raises(ConfigError, match="kv_connector must be one of"):
        await process.main(asyncio.Event())


async def test_a_port_in_use_is_named_before_anything_loads(model: Path) -> None:
    async with running(model) as first:
        await first.until_ready()
        second = WorkerProcess(
            "decode",
            WorkerConfig(port=first.config.port),
            EngineConfig(),
            RedisConfig(),
            resolve_model=lambda name, revision: model,
            start_engine=never_started,
        )
        with pytest.raises(ConfigError, match=f"{first.config.port}.*in use"):
            await second.main(asyncio.Event())


async def test_a_model_that_cannot_be_had_says_why() -> None:
    def broken(name: str, revision: str | None) -> Path:
        raise ModelLoadError("model.safetensors is truncated")

    process = WorkerProcess(
        "aggregated",
        WorkerConfig(),
        EngineConfig(),
        RedisConfig(),
        resolve_model=broken,
        start_engine=never_started,
    )
    with pytest.raises(ModelLoadError, match="truncated"):
        await process.main(asyncio.Event())


async def test_a_split_worker_needs_a_store_or_a_registry(model: Path) -> None:
    async with running(model, "decode") as worker:
        with pytest.raises(ConfigError, match="kvstore"):
            await asyncio.wait_for(asyncio.shield(worker.task), 60)


async def test_the_store_of_a_split_worker_is_the_configured_one(model: Path) -> None:
    async with running(model, "prefill", worker={"kvstore": "10.0.0.1:9"}) as worker:
        await worker.until_ready()
        assert worker.engine_config is not None
        transfer = worker.engine_config.kv_transfer_config
        assert transfer is not None
        assert (transfer.kv_connector, transfer.is_producer) == ("DirectConnector", True)
        settings = StoreSettings.of(transfer.kv_connector_extra_config)
        assert settings == StoreSettings(kvstore="10.0.0.1:9")


async def test_a_split_worker_waits_for_a_store_then_registers_and_leaves(
    model: Path, redis_url: str
) -> None:
    redis = RedisConfig(redis=redis_url, heartbeat_s=0.05)
    registry = Registry(redis)
    store = StoreRecord(
        node_id="s",
        incarnation="i",
        address="10.0.0.1:9",
        admin_address="10.0.0.1:8",
        boot_id="b",
        pool_bytes=1,
    )
    async with running(model, "decode", redis=redis) as worker:
        await worker.until_unready_for("no KV store is registered yet")
        await registry.announce(store)
        await worker.until_ready()
        assert worker.engine_config is not None
        assert worker.engine_config.kv_transfer_config is not None
        extra = worker.engine_config.kv_transfer_config.kv_connector_extra_config
        settings = StoreSettings.of(extra)
        assert (settings.redis, settings.heartbeat_s) == (redis_url, 0.05)
        assert not settings.write_through  # prefill has stored what decode takes
        record = (await registry.members(WorkerRecord)).records["w"]
        assert (record.role, record.address, record.model) == ("decode", worker.address, "tiny")
        assert record.admin_address == f"127.0.0.1:{worker.config.admin_port}"
        worker.stop.set()
        await asyncio.wait_for(worker.task, 60)
        assert (await registry.members(WorkerRecord)).records == {}
    await registry.close()


async def test_without_redis_a_worker_is_not_ready_and_says_so(model: Path) -> None:
    redis = RedisConfig(redis=f"redis://127.0.0.1:{free_ports(1)[0]}", heartbeat_s=0.05)
    async with running(model, redis=redis) as worker:
        worker.loaded.set()
        await worker.until_unready_for("not registered yet: ")
    await until(worker.task.done)
    assert worker.task.exception() is None
