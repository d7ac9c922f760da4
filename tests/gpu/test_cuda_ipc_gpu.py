"""A GPU's memory, mapped from another process: from another GPU where there are two."""

from __future__ import annotations

import multiprocessing
import time

import numpy as np
import pytest
import torch

from diptych.bench.transport_pool import make_pool, make_transport, running_source
from diptych.connectors.transports.base import ReadState, Runs
from diptych.connectors.transports.links import LinkState
from diptych.connectors.transports.orders import ReadOrder, ReadResult
from diptych.connectors.transports.thread import TransferThread

MIB = 1 << 20
SIZE = 64 * MIB
SOURCE = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
pytestmark = pytest.mark.timeout(120)


def scattered(unit: int, count: int, odd: int = 0) -> Runs:
    rng = np.random.default_rng(unit)
    places = SIZE // unit - 1
    src, dst = (rng.permutation(places)[:count].astype(np.int64) * unit for _ in range(2))
    return Runs(src + odd, dst + odd, np.full(count, unit - odd, np.int64))


def read(thread: TransferThread, runs: Runs, name: str, within_s: float = 30.0) -> ReadResult:
    deadline_s = time.monotonic() + within_s
    thread.read(ReadOrder(read_id=name, peer_id="source", runs=runs, deadline_s=deadline_s))
    while time.monotonic() < deadline_s + 10.0:
        for result in thread.take_results():
            if result.state is not ReadState.QUARANTINED:
                return result
        time.sleep(1e-4)
    raise AssertionError("the read gave no result")


def test_runs_of_every_size_arrive_whole() -> None:
    pool = make_pool("cuda:0", SIZE)
    cases = [(2 * MIB, 20, 0), (128 << 10, 400, 0), (4096, 10_000, 0), (4096, 3000, 1), (48, 99, 0)]
    with running_source("cuda_ipc", SOURCE, SIZE) as endpoint:
        thread = TransferThread([make_transport("cuda_ipc", "cuda:0")], pool.memory, "reader")
        thread.start()
        try:
            thread.connect("source", endpoint)
            for unit, count, odd in cases:
                runs = scattered(unit, count, odd)
                pool.clear()
                result = read(thread, runs, f"{unit}/{odd}")
                assert result.state is ReadState.DONE, result.detail
                assert result.transport == "cuda_ipc"
                pool.check(runs)
        finally:
            thread.close()


def test_a_source_that_is_killed_leaves_its_reader_whole() -> None:
    """Its reads end, whatever they bring; the reader's GPU goes on, and reads another source."""
    pool = make_pool("cuda:0", SIZE)
    thread = TransferThread([make_transport("cuda_ipc", "cuda:0")], pool.memory, "reader")
    thread.start()
    try:
        with running_source("cuda_ipc", SOURCE, SIZE) as endpoint:
            thread.connect("source", endpoint)
            assert read(thread, scattered(4096, 1000), "before").state is ReadState.DONE
            [child] = multiprocessing.active_children()
            child.kill()
            child.join()
            for i in range(50):
                read(thread, scattered(4096, 10_000), f"after {i}")
        thread.disconnect("source")
        with running_source("cuda_ipc", SOURCE, SIZE) as endpoint:
            thread.connect("source", endpoint)
            runs = scattered(128 << 10, 100)
            pool.clear()
            assert read(thread, runs, "another").state is ReadState.DONE
            pool.check(runs)
            assert thread.links()["source"].state is LinkState.READY
        torch.cuda.synchronize()
    finally:
        thread.close()
