"""`diptych bench kvstore`: bytes per second into and out of a store node of this host.

Next to them stands a plain memory copy of the same bytes in the same run: the bound for any store
that copies, and what makes figures of different machines comparable. The byte stream also stands
next to a bare socket, its own bound. With `--peers` other stores are measured by the same bytes in
the same run. All take turns, round by round, and are compared round by round: a ratio is the median
of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.offline import report, say
from diptych.bench.store_floor import running_floor
from diptych.bench.store_node import running_node
from diptych.bench.store_subjects import (
    Buffer,
    Ours,
    Subject,
    has_mooncake,
    running_mooncake,
    running_redis,
)
from diptych.config import MIB
from diptych.connectors.store_client import StoreClient
from diptych.connectors.store_cluster import FixedNodes, StoreCluster
from diptych.connectors.store_views import leased
from diptych.errors import UnavailableError

_VIEW_BATCH = 64
_VIEW_BYTES = 2 * MIB
_LOOKUP_PAGES = 1000
_CALLS = 21
_WARM_UP = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    sizes = [2 * MIB, 128 << 10]
    add("--object-bytes", type=int, nargs="+", default=sizes, help="sizes of the objects")
    add("--set-bytes", type=int, default=256 * MIB, help="bytes per round: more than any cache")
    add("--rounds", type=int, default=5, help="rounds that are measured")
    ways = ["memory", "stream"]
    add("--transport", nargs="+", choices=ways, default=ways, help="which to measure")
    add("--peers", action="store_true", help="Redis and, where it is installed, Mooncake too")
    add("--output-json", type=Path, default=None, help="write the figures to this file")
    add("--result-dir", type=Path, default=None, help="write a dated record into this folder")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    with ExitStack() as stack:
        address = stack.enter_context(running_node(max(4 * args.set_bytes, 256 * MIB)))
        subjects: dict[str, Subject] = {}
        for transport in args.transport:
            client = StoreClient(address, transport=transport, timeout_s=60.0)
            stack.callback(client.close)
            subjects[transport] = Ours(client)
        if "stream" in subjects:
            subjects["socket"] = stack.enter_context(running_floor(args.set_bytes))
        if args.peers:
            subjects["redis"] = stack.enter_context(running_redis())
        if args.peers and has_mooncake():
            subjects["mooncake"] = stack.enter_context(running_mooncake(4 * args.set_bytes))
        rows = [row for size in args.object_bytes for row in _rows(subjects, size, args)]
        calls = {"view_s": _views(address), "lookup_s": _lookup(address)}
    say(f"mapped view {1e6 * calls['view_s']:.1f} us each, by batches of {_VIEW_BATCH}")
    say(f"look-up of {_LOOKUP_PAGES} pages {1e3 * calls['lookup_s']:.2f} ms")
    ratios = _ratios(rows)
    # what else the machine was doing
    figures = {"load_average": os.getloadavg()[0], "calls": calls, "rows": rows, "ratios": ratios}
    report("kvstore", args, "cpu", figures)
    return 0


def _rows(
    subjects: dict[str, Subject], object_bytes: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row a subject. They take turns in every round, so that what the machine does besides
    meets all of them."""
    count = args.set_bytes // object_bytes
    source = np.random.default_rng(0).integers(0, 256, (count, object_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    # the first rounds touch every page of the pool, which costs more than the copy
    for round_ in range(-_WARM_UP, args.rounds):
        for name, subject in subjects.items():
            step = _round(subject, source, target)
            if round_ >= 0:
                seconds[name].append(step)
    return [
        _row(name, object_bytes, count * object_bytes, steps) for name, steps in seconds.items()
    ]


def _round(subject: Subject, source: Buffer, target: Buffer) -> dict[str, float]:
    keys = [os.urandom(32) for _ in range(len(source))]
    target[:] = 0
    seconds = {
        "put": _timed(partial(subject.put, keys, source)),
        "get": _timed(partial(subject.get, keys, target)),
    }
    if not np.array_equal(source, target):
        raise AssertionError("the store gave other bytes than it took")
    subject.forget(keys)
    return {**seconds, "copy": _timed(partial(_copy, source, target))}


def _row(
    name: str, object_bytes: int, num_bytes: int, steps: list[dict[str, float]]
) -> dict[str, Any]:
    medians = {what: statistics.median(s[what] for s in steps) for what in ("put", "get", "copy")}
    rates = {what: num_bytes / seconds / 1e9 for what, seconds in medians.items()}
    row = {
        "transport": name,
        "object_bytes": object_bytes,
        **{f"{what}_gb_per_s": rate for what, rate in rates.items()},
        "put_ratio": rates["put"] / rates["copy"],
        "get_ratio": rates["get"] / rates["copy"],
        "put_objects_per_s": rates["put"] * 1e9 / object_bytes,
        "get_objects_per_s": rates["get"] * 1e9 / object_bytes,
        "seconds": steps,
    }
    say(
        f"{name:>8} {object_bytes >> 10:6d} KiB:"
        f"  put {row['put_gb_per_s']:5.2f} GB/s ({row['put_ratio']:.2f} of a copy)"
        f"  get {row['get_gb_per_s']:5.2f} GB/s ({row['get_ratio']:.2f})"
        f"  copy {row['copy_gb_per_s']:5.2f} GB/s"
    )
    return row


def _views(address: str) -> float:
    """Seconds for one object to be read in place: found, leased, verified and released."""
    client = StoreClient(address, transport="memory", timeout_s=60.0)
    keys = [os.urandom(32) for _ in range(_VIEW_BATCH)]
    Ours(client).put(keys, np.zeros((_VIEW_BATCH, _VIEW_BYTES), np.uint8))

    def read() -> None:
        with leased(client, keys) as found:
            if None in found.views or not found.verify():
                raise UnavailableError("the store lost an object")

    seconds = statistics.median(_timed(read) for _ in range(_CALLS))
    client.close()
    return seconds / _VIEW_BATCH


def _lookup(address: str) -> float:
    """Seconds to learn which pages of a long prefix are there; half of them are."""
    cluster = StoreCluster(FixedNodes([address]), timeout_s=60.0)
    keys = [os.urandom(32) for _ in range(_LOOKUP_PAGES)]
    [client] = cluster.clients().values()
    Ours(client).put(keys[::2], np.zeros((len(keys[::2]), 4096), np.uint8))

    def ask() -> None:
        if sum(cluster.exists_many(keys)) != len(keys[::2]):
            raise UnavailableError("the store lost an object")

    seconds = statistics.median(_timed(ask) for _ in range(_CALLS))
    cluster.close()
    return seconds


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast our stream is as the others, object size by object size."""
    ours = {row["object_bytes"]: row for row in rows if row["transport"] == "stream"}
    ratios = []
    for row in rows:
        own = ours.get(row["object_bytes"])
        if own is None or row["transport"] in ("memory", "stream"):
            continue
        pairs = list(zip(row["seconds"], own["seconds"], strict=True))
        put, get = (
            statistics.median(theirs[what] / our[what] for theirs, our in pairs)
            for what in ("put", "get")
        )
        kib = row["object_bytes"] >> 10
        say(f"stream / {row['transport']}, {kib} KiB: put {put:.2f}, get {get:.2f}")
        ratios.append(
            {"to": row["transport"], "object_bytes": row["object_bytes"], "put": put, "get": get}
        )
    return ratios


def _copy(source: Buffer, target: Buffer) -> None:
    for row, room in zip(source, target, strict=True):
        np.copyto(room, row)


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start
