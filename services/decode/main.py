"""Entry point of the decode service."""

from __future__ import annotations

from diptych.config import EngineConfig, RedisConfig, WorkerConfig
from diptych.worker import main as worker


def run(config: WorkerConfig, engine: EngineConfig, redis: RedisConfig) -> None:
    """Serve as a decode worker until SIGTERM or SIGINT.

    Raises:
        SystemExit: it could not start, or the engine died; the reason is on stderr.
    """
    worker.run("decode", config, engine, redis)
