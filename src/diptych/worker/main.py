"""The entry point of every worker process; `prefill` and `decode` are this with their role."""

from __future__ import annotations

import asyncio

from diptych.config import EngineConfig, RedisConfig, WorkerConfig
from diptych.engine.core_client import EngineCoreClient
from diptych.models.fetch import resolve_model
from diptych.observe import run_until_signal
from diptych.worker.process import WorkerProcess


def run(role: str, config: WorkerConfig, engine: EngineConfig, redis: RedisConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `role`: prefill, decode or aggregated.

    Raises:
        SystemExit: it could not start, or the engine died; the reason is on stderr.
    """

    async def main(stop: asyncio.Event) -> None:
        process = WorkerProcess(
            role,
            config,
            engine,
            redis,
            resolve_model=resolve_model,
            start_engine=start_engine,
        )
        await process.main(stop)

    run_until_signal(role, main)


async def start_engine(config: EngineConfig) -> EngineCoreClient:
    """An engine process, ready."""
    client = EngineCoreClient()
    await client.start(config)
    return client
