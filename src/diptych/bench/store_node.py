"""A store node in a process of its own, for benchmarks."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from diptych.config import KVStoreConfig, RedisConfig
from diptych.errors import UnavailableError
from diptych.launcher.child import free_ports

_START_TIMEOUT_S = 30.0


@contextmanager
def running_node(pool_bytes: int, **settings: object) -> Iterator[str]:
    """Yields the node's address; the node ends with the block."""
    from diptych.services.kvstore.main import run as run_kvstore  # not for the help

    [port] = free_ports(1)
    config = KVStoreConfig(port=port, pool_bytes=pool_bytes, **settings)  # type: ignore[arg-type]
    process = multiprocessing.get_context("spawn").Process(
        target=run_kvstore, args=(config, RedisConfig())
    )
    process.start()
    try:
        _wait_until_open(port)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.join()


def _wait_until_open(port: int) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise UnavailableError("the store did not start")
