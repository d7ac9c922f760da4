"""A real router in this process, in front of fake workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from diptych.config import EngineConfig, RedisConfig, RouterConfig
from diptych.services.router import main
from diptych.services.router.dispatch import DispatchTimes
from diptych.services.router.worker_link import LinkTimes
from diptych.text.tokenizer import Tokenizer
from tests.services.fake_worker import FakeWorker
from tests.tiny_models import TURN_END, make_tiny_model

ANSWER = "The capital of France is Paris, they said."
# calls wait long: in a process that gets no time to run, every answer is late
TIMES = LinkTimes(poll_s=0.2, call_s=60.0, submit_s=60.0, resume_s=0.2, silence_s=60.0)


def tiny_script(path: Path, text: str = ANSWER) -> list[int]:
    """The tokens of `text`, then end-of-sequence."""
    tokenizer = Tokenizer.from_directory(path)
    return [
        *tokenizer.encode(text, add_special_tokens=False),
        *tokenizer.encode(TURN_END, add_special_tokens=False),
    ]


def tiny_directory(base: Path) -> Path:
    return make_tiny_model(base / "tiny", max_position_embeddings=1024)


@dataclass(frozen=True)
class Running:
    """Where the router listens, and a client session."""

    url: str
    grpc: str
    admin: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any, Any]:
        """Status, JSON and headers of a POST."""
        async with self.session.post(f"{self.url}{path}", json=body, **kwargs) as response:
            return response.status, await response.json(), response.headers

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(f"{self.url}{path}") as response:
            return response.status, await response.text()

    async def metric(self, line: str) -> float:
        """The value of one line of the router's metrics; 0 where it is absent."""
        async with self.session.get(f"{self.admin}/metrics") as response:
            text = await response.text()
        found = [part for part in text.splitlines() if part.startswith(line + " ")]
        return float(found[0].rpartition(" ")[2]) if found else 0.0


@asynccontextmanager
async def running_router(
    model: Path,
    workers: Sequence[FakeWorker],
    *,
    dispatch_times: DispatchTimes | None = None,
    link_times: LinkTimes = TIMES,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        config = RouterConfig(port=0, workers=[w.address for w in workers] or ["127.0.0.1:1"])
        ports = await stack.enter_async_context(
            main.serve(
                _replace(config, settings),
                RedisConfig(),
                EngineConfig(model=str(model), served_model_name="tiny"),
                link_times=link_times,
                dispatch_times=dispatch_times,
            )
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = Running(
            url=f"http://127.0.0.1:{ports.http}",
            grpc=f"127.0.0.1:{ports.grpc}",
            admin=f"http://127.0.0.1:{ports.admin}",
            session=session,
        )
        if wait_ready:
            await until(lambda: _is_ready(running, len(workers)))
        yield running


async def _is_ready(running: Running, num_workers: int) -> bool:
    counts = [
        await running.metric(f'diptych:workers_ready{{role="{role}"}}')
        for role in ("prefill", "decode", "aggregated")
    ]
    return sum(counts) == num_workers


def _replace(config: RouterConfig, settings: dict[str, Any]) -> RouterConfig:
    import dataclasses

    return dataclasses.replace(config, **settings)


async def until(holds: Any, timeout_s: float = 60.0) -> None:
    """Wait until `holds()` (plain or async) is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            value = holds()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.01)
