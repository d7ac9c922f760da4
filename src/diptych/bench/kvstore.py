"""`diptych bench kvstore`: bytes per second into and out of a store node of this host.

Next to them stands a plain memory copy of the same bytes in the same run: the bound for any store
that copies, and what makes figures of different machines comparable.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych.bench.offline import report, say
from diptych.bench.store_node import running_node
from diptych.config import MIB
from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_results import GetResult, Outcome, PutItem, PutResult
from diptych.errors import UnavailableError

Buffer = NDArray[np.uint8]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    sizes = [2 * MIB, 128 << 10]
    add("--object-bytes", type=int, nargs="+", default=sizes, help="sizes of the objects")
    add("--set-bytes", type=int, default=256 * MIB, help="bytes per round: more than any cache")
    add("--rounds", type=int, default=5, help="rounds that are measured")
    add("--transport", nargs="+", default=["memory", "stream"], help="memory, stream")
    add("--output-json", type=Path, default=None, help="write the figures to this file")
    add("--result-dir", type=Path, default=None, help="write a dated record into this folder")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    rows = []
    with running_node(4 * args.set_bytes) as address:
        for transport in args.transport:
            client = StoreClient(address, transport=transport, timeout_s=60.0)
            for object_bytes in args.object_bytes:
                row = _measure(client, object_bytes, args)
                rows.append({"transport": transport, "object_bytes": object_bytes, **row})
                say(
                    f"{transport:>7} {object_bytes >> 10:6d} KiB:"
                    f"  put {row['put_gb_per_s']:5.2f} GB/s ({row['put_ratio']:.2f} of a copy)"
                    f"  get {row['get_gb_per_s']:5.2f} GB/s ({row['get_ratio']:.2f})"
                    f"  copy {row['copy_gb_per_s']:5.2f} GB/s"
                )
            client.close()
    # what else the machine was doing
    report("kvstore", args, "cpu", {"load_average": os.getloadavg()[0], "rows": rows})
    return 0


def _measure(client: StoreClient, object_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    count = args.set_bytes // object_bytes
    source = np.random.default_rng(0).integers(0, 256, (count, object_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    steps: dict[str, list[float]] = {"put": [], "get": [], "copy": []}
    # the first rounds touch every page of the pool, which costs more than the copy
    for round_ in range(-4, args.rounds):
        keys = [os.urandom(32) for _ in range(count)]
        target[:] = 0
        seconds = {
            "put": _timed(partial(_put, client, keys, source)),
            "get": _timed(partial(_get, client, keys, target)),
        }
        if not np.array_equal(source, target):
            raise AssertionError("the store gave other bytes than it took")
        seconds["copy"] = _timed(partial(_copy, source, target))
        if round_ >= 0:
            for step, value in seconds.items():
                steps[step].append(value)
    rates = {s: count * object_bytes / statistics.median(v) / 1e9 for s, v in steps.items()}
    return {
        **{f"{step}_gb_per_s": rate for step, rate in rates.items()},
        "put_ratio": rates["put"] / rates["copy"],
        "get_ratio": rates["get"] / rates["copy"],
        "put_objects_per_s": rates["put"] * 1e9 / object_bytes,
        "get_objects_per_s": rates["get"] * 1e9 / object_bytes,
        "seconds": steps,
    }


def _put(client: StoreClient, keys: list[bytes], source: Buffer) -> None:
    items = [
        PutItem(key, row.nbytes, partial(_fill, row)) for key, row in zip(keys, source, strict=True)
    ]
    _check(client.put_many(items))


def _fill(row: Buffer, view: memoryview) -> None:
    np.copyto(np.frombuffer(view, np.uint8), row)


def _get(client: StoreClient, keys: list[bytes], target: Buffer) -> None:
    def take(at: int, view: memoryview) -> None:
        np.copyto(target[at], np.frombuffer(view, np.uint8))

    _check(client.get_many(keys, take))


def _check(results: Sequence[PutResult | GetResult]) -> None:
    failed = [result.outcome.value for result in results if result.outcome is not Outcome.OK]
    if failed:
        raise UnavailableError(f"the store failed {len(failed)} objects: {failed[0]}")


def _copy(source: Buffer, target: Buffer) -> None:
    for row, room in zip(source, target, strict=True):
        np.copyto(room, row)


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
