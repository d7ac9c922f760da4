"""A worker as a process with an engine process below it: blocks, signals, deaths."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from diptych.errors import EngineDeadError, UnavailableError
from diptych.launcher.child import free_ports
from diptych.proto import common_pb2, worker_pb2
from diptych.rpc import open_channel
from tests.engine.fake_executor import expected_output
from tests.services.test_worker_service import error_of
from tests.services.worker_fakes import FakeRouter
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).resolve().parents[2]

# The real entry point, but for an engine whose executor has no model.
SCRIPT = """
import sys
from pathlib import Path
from diptych.config import EngineConfig, RedisConfig, WorkerConfig
from diptych.engine.core_client import EngineCoreClient
from diptych.worker import main

class Client(EngineCoreClient):
    def __init__(self):
        super().__init__(factory="fake_executor:make_slow_core")

main.EngineCoreClient = Client
port, admin_port, model = sys.argv[1:]
main.run(
    "aggregated",
    WorkerConfig(port=int(port), admin_port=int(admin_port), drain_s=60.0, worker_id="w"),
    EngineConfig(model=model, max_num_seqs=4),
    RedisConfig(),
)
"""


@dataclass
class Child:
    """The worker's process and ports."""

    process: Process
    address: str
    admin: str

    @property
    def engine_pid(self) -> int:
        pid = self.process.pid
        (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(child)

    async def until_ready(self) -> None:
        async with asyncio.timeout(300), aiohttp.ClientSession(self.admin) as http:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with http.get("/readyz") as answer:
                        if answer.status == 200:
                            return
                assert self.process.returncode is None
                await asyncio.sleep(0.05)

    async def metric(self, name: str) -> float:
        async with aiohttp.ClientSession(self.admin) as http, http.get("/metrics") as answer:
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        )

    async def until_metric(self, name: str, value: float) -> None:
        async with asyncio.timeout(60):
            while await self.metric(name) != value:
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Child]:
    model = make_tiny_model(tmp_path / "model", vocab_size=1000)
    port, admin_port = free_ports(2)
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "engine")]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", SCRIPT, str(port), str(admin_port), str(model)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        child = Child(process, f"127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}")
        await child.until_ready()
        yield child
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@contextlib.asynccontextmanager
async def router_of(child: Child) -> AsyncIterator[FakeRouter]:
    async with open_channel(child.address) as channel:
        router = FakeRouter(channel)
        info = await router.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=60)
        router.worker = info.incarnation
        await router.open()
        yield router


def sampling(max_tokens: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(seed=1, max_tokens=max_tokens, temperature=0)


async def read_tokens(router: FakeRouter, **counts: int) -> dict[str, list[int]]:
    """The first tokens of some requests, as many as are asked for of each."""
    tokens: dict[str, list[int]] = {name: [] for name in counts}
    while any(len(tokens[name]) < count for name, count in counts.items()):
        frame = await router.read()
        start = 0
        for name, number in zip(frame.request_ids, frame.token_counts, strict=True):
            tokens.setdefault(name, []).extend(frame.token_ids[start : start + number])
            start += number
    # what a cancelled request still sent is nobody's concern here
    return {name: tokens[name] for name in counts}


async def exit_of(child: Child) -> tuple[int | None, str]:
    _, stderr = await asyncio.wait_for(child.process.communicate(), 60)
    return child.process.returncode, stderr.decode()


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def test_answers_come_and_a_cancel_frees_the_blocks_then_a_signal_ends_all(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as child, router_of(child) as router:
        engine = child.engine_pid
        await router.submit("a", sampling=sampling(5))
        assert await read_tokens(router, a=5) == {"a": expected_output([1, 2, 3], 5)}

        total = await child.metric("diptych:kv_blocks_total")
        await router.submit("b", sampling=sampling(500), prompt_token_ids=list(range(1, 40)))
        await read_tokens(router, b=3)
        assert await child.metric("vllm:num_requests_running") == 1
        assert await child.metric("diptych:kv_blocks_free") < total
        await router.cancel(("b", 1))
        await child.until_metric("vllm:num_requests_running", 0)
        await child.until_metric("diptych:kv_blocks_free", total)
        assert await child.metric("diptych:requests_aborted_total") == 1

        await router.submit("c", sampling=sampling(20))
        await router.submit("d", sampling=sampling(20))
        child.process.terminate()
        # what runs is finished and delivered first
        expected = expected_output([1, 2, 3], 20)
        assert await read_tokens(router, c=20, d=20) == {"c": expected, "d": expected}
        code, stderr = await exit_of(child)
        assert (code, is_gone(engine)) == (0, True), stderr


async def test_a_dead_engine_takes_the_process_with_it(tmp_path: Path) -> None:
    async with running(tmp_path) as child, router_of(child) as router:
        await router.submit("a", sampling=sampling(500))
        await read_tokens(router, a=2)
        os.kill(child.engine_pid, signal.SIGKILL)
        error = await error_of(read_tokens(router, a=500))
        assert isinstance(error, EngineDeadError | UnavailableError)
        code, stderr = await exit_of(child)
    assert code == 1
    assert stderr.splitlines()[-1].startswith("diptych aggregated: the engine is gone")
    assert "Traceback" not in stderr


async def test_an_engine_does_not_outlive_its_service(tmp_path: Path) -> None:
    async with running(tmp_path) as child:
        engine = child.engine_pid
        child.process.kill()
        await child.process.wait()
        async with asyncio.timeout(60):
            while not is_gone(engine):
                await asyncio.sleep(0.05)
