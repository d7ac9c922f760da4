"""Stores under one measure: ours, Redis by pipelines of 8, Mooncake's store by batches of 20.

Each puts and gets a batch of objects as its users would; all but ours are optional.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult
from diptych.embedded_redis import find_server
from diptych.errors import UnavailableError
from diptych.launcher.child import free_ports

Buffer = NDArray[np.uint8]
_REDIS_BATCH = 8
_MOONCAKE_BATCH = 20
_MOONCAKE_LEASE_MS = 1000
_START_TIMEOUT_S = 20.0
# A process that owns the memory; the client of the benchmark owns none.
_MOONCAKE_OWNER = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host, metadata, size, master = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(host, metadata, int(size), 16 << 20, "tcp", "", master) == 0
print("up", flush=True)
time.sleep(3600)
"""


class Subject(Protocol):
    """A store: `source[i]` goes under `keys[i]` and comes back into `target[i]`."""

    def put(self, keys: Sequence[bytes], source: Buffer) -> None: ...
    def get(self, keys: Sequence[bytes], target: Buffer) -> None: ...
    def forget(self, keys: Sequence[bytes]) -> None:
        """Make room, outside of what is timed."""
        ...


class Ours:
    """This store; it evicts by itself."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def put(self, keys: Sequence[bytes], source: Buffer) -> None:
        pairs = zip(keys, source, strict=True)
        _check(self._client.put_many([PutItem.of(key, row.data) for key, row in pairs]))

    def get(self, keys: Sequence[bytes], target: Buffer) -> None:
        _check(self._client.get_into(keys, [row.data for row in target]))

    def forget(self, keys: Sequence[bytes]) -> None:
        return


class RedisPeer:
    """A Redis or Valkey over TCP, by redis-py with hiredis where it is installed."""

    def __init__(self, port: int) -> None:
        import redis

        self._redis = redis.Redis("127.0.0.1", port, socket_timeout=30.0)

    def wait(self) -> None:
        """Until it answers."""
        _until(self._answers, "Redis")

    def put(self, keys: Sequence[bytes], source: Buffer) -> None:
        for start in range(0, len(keys), _REDIS_BATCH):
            with self._redis.pipeline(transaction=False) as pipeline:
                for at in range(start, min(start + _REDIS_BATCH, len(keys))):
                    pipeline.set(keys[at], source[at].data)
                pipeline.execute()

    def get(self, keys: Sequence[bytes], target: Buffer) -> None:
        for start in range(0, len(keys), _REDIS_BATCH):
            values = self._redis.mget(keys[start : start + _REDIS_BATCH])
            for at, value in enumerate(values, start):
                np.copyto(target[at], np.frombuffer(value, np.uint8))

    def forget(self, keys: Sequence[bytes]) -> None:
        self._redis.flushall()

    def _answers(self) -> bool:
        import redis

        with contextlib.suppress(redis.RedisError):
            return bool(self._redis.ping())
        return False


class MooncakePeer:
    """Mooncake's store over TCP, with buffers that it has registered."""

    def __init__(self, metadata: str, master: str, host: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store: Any = MooncakeDistributedStore()
        if self._store.setup(host, metadata, 0, 16 << 20, "tcp", "", master):
            raise UnavailableError("Mooncake's client did not start")
        self._registered: set[int] = set()

    def put(self, keys: Sequence[bytes], source: Buffer) -> None:
        self._move(self._store.batch_put_from, keys, source, 0)

    def get(self, keys: Sequence[bytes], target: Buffer) -> None:
        self._move(self._store.batch_get_into, keys, target, target.shape[1])

    def forget(self, keys: Sequence[bytes]) -> None:
        time.sleep(2 * _MOONCAKE_LEASE_MS / 1000)  # what is leased cannot be removed
        self._store.remove_all()

    def close(self) -> None:
        self._store.close()

    def _move(
        self, call: Callable[..., list[int]], keys: Sequence[bytes], buffer: Buffer, expected: int
    ) -> None:
        start = buffer.ctypes.data
        if start not in self._registered:
            self._store.register_buffer(start, buffer.nbytes)
            self._registered.add(start)
        size = buffer.shape[1]
        for first in range(0, len(keys), _MOONCAKE_BATCH):
            batch = range(first, min(first + _MOONCAKE_BATCH, len(keys)))
            names = [keys[at].hex() for at in batch]
            places = [start + at * size for at in batch]
            codes = call(names, places, [size] * len(batch))
            if any(code != expected for code in codes):
                raise UnavailableError(f"Mooncake failed: {set(codes)}")


@contextlib.contextmanager
def running_redis() -> Iterator[RedisPeer]:
    """A server on a free TCP port, that keeps nothing."""
    [port] = free_ports(1)
    command = [find_server(), "--port", str(port), "--save", "", "--loglevel", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        peer = RedisPeer(port)
        peer.wait()
        yield peer
    finally:
        process.terminate()
        process.wait()


def has_mooncake() -> bool:
    """Whether `mooncake-transfer-engine-non-cuda` is installed."""
    return importlib.util.find_spec("mooncake") is not None


@contextlib.contextmanager
def running_mooncake(pool_bytes: int) -> Iterator[MooncakePeer]:
    """A master, a process that owns the memory, and a client."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    binary = Path(next(iter(spec.submodule_search_locations or []))) / "mooncake_master"
    binary.chmod(0o755)
    rpc, http, metrics, owner, client = free_ports(5)
    master, metadata = f"127.0.0.1:{rpc}", f"http://127.0.0.1:{http}/metadata"
    settings = {
        "rpc_port": rpc,
        "enable_http_metadata_server": 1,
        "http_metadata_server_port": http,
        "metrics_port": metrics,
        "default_kv_lease_ttl": _MOONCAKE_LEASE_MS,
    }
    command = [str(binary), *(f"--{name}={value}" for name, value in settings.items())]
    null = subprocess.DEVNULL
    processes = [subprocess.Popen(command, stdout=null, stderr=null)]
    try:
        time.sleep(1.0)
        place = [f"127.0.0.1:{owner}", metadata, str(pool_bytes), master]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _MOONCAKE_OWNER, *place],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        )
        _await_line(processes[-1])
        peer = MooncakePeer(metadata, master, f"127.0.0.1:{client}")
        try:
            yield peer
        finally:
            peer.close()
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _await_line(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    _until(lambda: b"up" in (process.stdout.read() or b"" if process.stdout else b""), "Mooncake")


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise UnavailableError(f"{what} did not start")
        time.sleep(0.05)


def _check(results: Sequence[PutResult | GetResult]) -> None:
    failed = [result.outcome.value for result in results if result.outcome is not Outcome.OK]
    if failed:
        raise UnavailableError(f"the store failed {len(failed)} objects: {failed[0]}")
