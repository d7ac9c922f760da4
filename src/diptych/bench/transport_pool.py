"""What the transport benchmark reads from and into: pools of known bytes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.transports.base import Endpoint, Memory, Runs, Transport
from diptych.connectors.transports.memory import HostMemory, memory_of
from diptych.errors import TransferError, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

_START_TIMEOUT_S = 60.0
_SEED = 11
_MOST_COMPARED = 4096


def make_transport(name: str, device: str) -> Transport:
    """By name, for a pool on that device.

    Raises:
        TransferError: no transport is called that, or it is not installed.
    """
    from diptych.connectors.transports.choose import TransportSettings, open_transports

    return open_transports([name], TransportSettings(device=device))[0]


class Pool(Protocol):
    """Memory on one device; `memory` is what transports see of it."""

    memory: Memory
    num_bytes: int

    def fill(self) -> None:
        """Put the source's bytes in."""
        ...

    def clear(self) -> None: ...

    def check(self, runs: Runs) -> None:
        """Compare runs with the source's bytes: all of them, or some thousands of very many.

        Raises:
            TransferError: other bytes came.
        """
        ...

    def seconds_to_copy(self, device: str, runs: Runs) -> float:
        """Of one plain copy of the runs' bytes from a pool on `device`, in this process."""
        ...


def make_pool(device: str, num_bytes: int) -> Pool:
    """Fresh memory; on the host in a memfd, as an engine's pool is."""
    return HostPool(num_bytes) if device == "cpu" else DevicePool(device, num_bytes)


class HostPool:
    """Memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        self._host = HostMemory.shared(num_bytes)
        self.memory: Memory = self._host
        self.num_bytes = num_bytes
        self._other: NDArray[np.uint8] | None = None

    def fill(self) -> None:
        self._host.array[:] = self._bytes()

    def clear(self) -> None:
        self._host.array[:] = 0

    def check(self, runs: Runs) -> None:
        wanted = self._bytes()
        for src, dst, length in _some(runs):
            if not np.array_equal(self._host.array[dst : dst + length], wanted[src : src + length]):
                raise TransferError(f"other bytes came than were sent, at {dst}")

    def seconds_to_copy(self, device: str, runs: Runs) -> float:
        if self._other is None:
            self._other = self._bytes()
        ours, theirs = self._host.array, self._other
        start_s = time.perf_counter()
        for src, dst, length in _triples(runs):
            np.copyto(ours[dst : dst + length], theirs[src : src + length])
        return time.perf_counter() - start_s

    def _bytes(self) -> NDArray[np.uint8]:
        words = np.random.default_rng(_SEED).integers(0, 1 << 63, self.num_bytes // 8, np.int64)
        return words.view(np.uint8)


class DevicePool:
    """Memory of a GPU."""

    def __init__(self, device: str, num_bytes: int) -> None:
        import torch

        self._torch = torch
        self._data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.memory: Memory = memory_of(self._data)
        self.num_bytes = num_bytes
        self._other: Tensor | None = None

    def fill(self) -> None:
        self._data.copy_(self._bytes())
        self._wait()

    def clear(self) -> None:
        self._data.zero_()
        self._wait()

    def check(self, runs: Runs) -> None:
        wanted = self._bytes()
        for src, dst, length in _some(runs):
            if not self._data[dst : dst + length].equal(wanted[src : src + length]):
                raise TransferError(f"other bytes came than were sent, at {dst}")

    def seconds_to_copy(self, device: str, runs: Runs) -> float:
        if self._other is None:
            self._other = self._torch.zeros(self.num_bytes, dtype=self._torch.uint8, device=device)
        size = runs.num_bytes
        self._wait()
        start_s = time.perf_counter()
        # one call: the link's own rate, without the cost of a call per run
        self._data[:size].copy_(self._other[:size], non_blocking=True)
        self._wait()
        return time.perf_counter() - start_s

    def _bytes(self) -> Tensor:
        generator = self._torch.Generator(self._data.device)
        generator.manual_seed(_SEED)
        words = self._torch.empty(
            self.num_bytes // 8, dtype=self._torch.int64, device=self._data.device
        )
        return words.random_(generator=generator).view(self._torch.uint8)

    def _wait(self) -> None:
        self._torch.cuda.synchronize(self._data.device)


@contextmanager
def running_source(transport: str, device: str, num_bytes: int) -> Iterator[Endpoint]:
    """A process that serves a pool of random bytes over one transport; yields its endpoint.

    Raises:
        TransferError: the transport does not work here.
        UnavailableError: it did not start.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(transport, device, num_bytes, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise UnavailableError("the source process did not start")
        answer = ours.recv_bytes()
        if answer[:1] == b"!":
            raise TransferError(answer[1:].decode())
        yield Endpoint.decode(answer[1:])
    finally:
        ours.close()
        process.join(10.0)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(transport: str, device: str, num_bytes: int, pipe: Connection) -> None:
    from diptych.connectors.transports.thread import TransferThread

    try:
        pool = make_pool(device, num_bytes)
        pool.fill()
        thread = TransferThread([make_transport(transport, device)], pool.memory, "bench-source")
        pipe.send_bytes(b"=" + thread.start().encode())
    except TransferError as error:
        pipe.send_bytes(b"!" + error.message.encode())
        return
    try:
        pipe.recv_bytes()
    except EOFError:
        thread.close()


def _triples(runs: Runs) -> Iterator[tuple[int, int, int]]:
    return zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True)


def _some(runs: Runs) -> list[tuple[int, int, int]]:
    return list(_triples(runs))[:: -(-len(runs) // _MOST_COMPARED)]
