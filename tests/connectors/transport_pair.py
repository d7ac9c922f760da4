"""A reader in this process and sources in others, for the transport tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from diptych.connectors.transports.base import (
    KV,
    Endpoint,
    Peer,
    ReadHandle,
    ReadState,
    Runs,
    Transport,
)
from diptych.connectors.transports.memory import HostMemory
from diptych.connectors.transports.self_test import LANDING, PROBE, Probe
from tests.connectors.transport_source import pattern

SCRIPT = Path(__file__).with_name("transport_source.py")
SOURCES = Path(__file__).resolve().parents[2] / "src"
MIB = 1 << 20
UNTOUCHED = 0xAA


class Source:
    """A process that serves `num_bytes` of `pattern`."""

    def __init__(
        self, incarnation: str, num_bytes: int, *transports: str, **environment: str
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), incarnation, str(num_bytes), *transports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCES), **environment},
        )
        assert self._process.stdout is not None
        self.endpoint = Endpoint.decode(bytes.fromhex(self._process.stdout.readline()))

    def write(self, offset: int, value: int) -> None:
        """Change one byte of its pool."""
        self._tell(f"{offset} {value}")

    def read_for_ever(self, endpoint: Endpoint) -> None:
        """Make it read another source until it is killed."""
        self._tell(f"read {endpoint.encode().hex()}")

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> int:
        """End it in order; its exit code."""
        if self.alive():
            self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
            self._process.communicate(timeout=60)
        if self.alive():
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return self._process.returncode


@contextlib.contextmanager
def running_source(
    incarnation: str, num_bytes: int, *transports: str, **environment: str
) -> Iterator[Source]:
    source = Source(incarnation, num_bytes, *transports, **environment)
    try:
        yield source
    finally:
        source.close()


class Reader:
    """A transport with a pool of `num_bytes`, polled by hand."""

    def __init__(self, transport: Transport, num_bytes: int) -> None:
        self.transport = transport
        self.memory = HostMemory.shared(num_bytes)
        self.memory.array[:] = UNTOUCHED
        self.probe = Probe.make("cpu", "reader")
        transport.register(KV, self.memory)
        transport.register(PROBE, self.probe.probe)
        transport.register(LANDING, self.probe.landing)

    def read(self, peer: Peer, runs: Runs, within_s: float = 60.0, region: str = KV) -> ReadHandle:
        return self.transport.read(peer, region, runs, deadline_s=time.monotonic() + within_s)

    def wait(self, handle: ReadHandle, limit_s: float = 120.0) -> ReadState:
        """Poll until it is no longer pending."""
        self.until(lambda: self.transport.poll(handle) is not ReadState.PENDING, limit_s)
        return handle.state

    def until(self, done: Callable[[], bool], limit_s: float = 120.0) -> None:
        end_s = time.monotonic() + limit_s
        while not done():
            assert time.monotonic() < end_s, "it did not happen in time"
            self.transport.progress()
            time.sleep(0.0002)

    def close(self) -> None:
        self.transport.close()


def shuffled(num_bytes: int, unit: int, seed: int = 0) -> Runs:
    """All of a pool, unit by unit, from and to places in no order."""
    rng = np.random.default_rng(seed)
    count = num_bytes // unit
    src, dst = rng.permutation(count) * unit, rng.permutation(count) * unit
    return Runs(src.astype(np.int64), dst.astype(np.int64), np.full(count, unit, np.int64))


def expected(runs: Runs, num_bytes: int) -> np.ndarray:
    """The reader's pool after the runs were read."""
    pool, source = np.full(num_bytes, UNTOUCHED, np.uint8), pattern(num_bytes)
    for src, dst, length in zip(runs.src, runs.dst, runs.length, strict=True):
        pool[dst : dst + length] = source[src : src + length]
    return pool


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))
