"""`diptych bench transport`: bytes per second between two processes, by each transport.

A source process serves a pool of random bytes; this one reads runs of several sizes, adjacent and
scattered, and the KV of a prompt as the transfer plan cuts it. What came is compared with what was
there. Next to the figures stands a plain copy of the same runs in the same run (between the two
devices, on GPUs): the bound.

    diptych bench transport                                       # one host's memory
    diptych bench transport --device cuda:1 --source-device cuda:0
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diptych.bench.offline import report, say
from diptych.bench.transport_pool import (
    Pool,
    make_pool,
    make_transport,
    running_source,
)
from diptych.config import MIB
from diptych.connectors.plan import BlockTable, Share, plan_read
from diptych.connectors.plan_geometry import PoolGeometry, Span
from diptych.connectors.transports.base import ReadState, Runs
from diptych.connectors.transports.choose import NAMES
from diptych.connectors.transports.orders import ReadOrder
from diptych.connectors.transports.thread import TransferThread
from diptych.errors import TransferError

_READ_DEADLINE_S = 60.0
# Llama 3.1 8B in bf16: 8 KV heads of 128, 32 layers
_HEADS, _LAYERS, _ATOM_BYTES, _PROMPT_TOKENS = 8, 32, 256, 4096


class Case(NamedTuple):
    """One thing to read."""

    name: str
    runs: Runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--transport", nargs="+", choices=NAMES, help="which to measure; all that fit if absent")
    add("--device", default="cpu", help="where the reader's pool lies: cpu or cuda:N")
    add("--source-device", default=None, help="where the source's pool lies; as --device if absent")
    sizes = [2 * MIB, 128 << 10, 32 << 10]
    add("--run-bytes", type=int, nargs="+", default=sizes, help="sizes of the runs")
    add("--set-bytes", type=int, default=256 * MIB, help="bytes per read")
    add("--prompt", action=argparse.BooleanOptionalAction, help="KV of a 4k prompt (8B) as well")
    add("--rounds", type=int, default=5, help="reads that are measured, after two that are not")
    add("--output-json", type=Path, default=None, help="write the figures to this file")
    add("--result-dir", type=Path, default=None, help="write a dated record into this folder")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    args.source_device = args.source_device or args.device
    on_gpu = [device != "cpu" for device in (args.device, args.source_device)]
    fits = {"shm": not any(on_gpu), "cuda_ipc": all(on_gpu)}
    args.transport = args.transport or [name for name in NAMES if fits.get(name, True)]
    cases = list(_cases(args))
    num_bytes = max(2 * args.set_bytes, 2 * _prompt_bytes() if args.prompt else 0)
    rows: list[dict[str, Any]] = []
    pool = make_pool(args.device, num_bytes)
    for name in args.transport:
        try:
            rows += _measure_transport(name, args, pool, cases)
        except TransferError as error:
            say(f"{name:>8}: {error}")
            rows.append({"transport": name, "error": str(error)})
    what = {"load_average": os.getloadavg()[0], "rows": rows}
    report("transport", args, args.device, what)
    return 0


def _measure_transport(
    name: str,
    args: argparse.Namespace,
    pool: Pool,
    cases: list[Case],
) -> list[dict[str, Any]]:
    rows = []
    with running_source(name, args.source_device, pool.num_bytes) as endpoint:
        thread = TransferThread([make_transport(name, args.device)], pool.memory, "bench-reader")
        try:
            thread.start()
            thread.connect("source", endpoint)
            for case in cases:
                row = {"transport": name, **_measure(thread, pool, case, args)}
                rows.append(row)
                say(
                    f"{name:>8} {case.name:<34} {len(case.runs):6d} runs {row['gb_per_s']:7.2f} "
                    f"GB/s  {row['milliseconds']:8.3f} ms  {row['copy_ratio']:5.2f} of a copy"
                )
        finally:
            thread.close()
    return rows


def _measure(
    thread: TransferThread, pool: Pool, case: Case, args: argparse.Namespace
) -> dict[str, Any]:
    """One read that is checked, one that is not counted, then reads and copies in turn."""
    pool.clear()
    _read(thread, case, "checked")
    pool.check(case.runs)
    reads, copies = [], []
    for round_ in range(-1, args.rounds):
        copied_s = pool.seconds_to_copy(args.source_device, case.runs)
        read_s = _read(thread, case, str(round_))
        if round_ >= 0:
            reads.append(read_s)
            copies.append(copied_s)
    size, read_s, copied_s = (
        case.runs.num_bytes,
        statistics.median(reads),
        statistics.median(copies),
    )
    return {
        "case": case.name,
        "num_runs": len(case.runs),
        "num_bytes": size,
        "gb_per_s": size / read_s / 1e9,
        "copy_gb_per_s": size / copied_s / 1e9,
        "copy_ratio": copied_s / read_s,
        "milliseconds": read_s * 1e3,
        "seconds": reads,
        "copy_seconds": copies,
    }


def _read(thread: TransferThread, case: Case, name: str) -> float:
    """Seconds from the order to its result, as the transfer thread counts them."""
    order = ReadOrder(
        read_id=f"{case.name}/{name}",
        peer_id="source",
        runs=case.runs,
        deadline_s=time.monotonic() + _READ_DEADLINE_S,
    )
    thread.read(order)
    while not (results := thread.take_results()):
        time.sleep(20e-6)
    [result] = results
    if result.state is not ReadState.DONE:
        raise TransferError(f"{case.name}: {result.failure}: {result.detail}")
    return result.seconds


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    rng = np.random.default_rng(0)
    for size in args.run_bytes:
        count = args.set_bytes // size
        label = f"{size >> 10} KiB"
        places = np.arange(count, dtype=np.int64) * size
        length = np.full(count, size, np.int64)
        yield Case(f"{label} adjacent", Runs(places, places, length))
        # every other place at most, so that nothing is adjacent
        src, dst = (rng.permutation(2 * count)[:count] * size for _ in range(2))
        yield Case(f"{label} scattered", Runs(src.astype(np.int64), dst.astype(np.int64), length))
    if args.prompt:
        yield from _prompt_cases(rng)


def _prompt_cases(rng: np.random.Generator) -> Iterator[Case]:
    """The KV of one prompt over fragmented pools, into ranks of 1, 2 and 8 and unlike blocks."""
    for label, block, target_block, heads in (
        ("4k prompt, block 64", 64, 64, 8),
        ("4k prompt, block 64, TP 1 to 2", 64, 64, 4),
        ("4k prompt, block 64, TP 1 to 8", 64, 64, 1),
        ("4k prompt, block 16", 16, 16, 8),
        ("4k prompt, block 16 to 64", 16, 64, 8),
    ):
        source, target = _geometry(block, 8), _geometry(target_block, heads)
        yield Case(label, _plan(source, target, heads, rng))


def _plan(source: PoolGeometry, target: PoolGeometry, heads: int, rng: np.random.Generator) -> Runs:
    tables = [
        BlockTable(rng.permutation(pool.num_blocks)[: _PROMPT_TOKENS // pool.block_size])
        for pool in (source, target)
    ]
    share = Share(0, Span(0, heads), source.layers)
    return plan_read(source, target, share, tables[0], tables[1], 0, _PROMPT_TOKENS)


def _geometry(block_size: int, heads: int) -> PoolGeometry:
    return PoolGeometry(
        num_blocks=2 * _PROMPT_TOKENS // block_size,
        block_size=block_size,
        heads=Span(0, heads),
        layers=Span(0, _LAYERS),
        atom_bytes=_ATOM_BYTES,
    )


def _prompt_bytes() -> int:
    return _PROMPT_TOKENS * _HEADS * _LAYERS * 2 * _ATOM_BYTES
