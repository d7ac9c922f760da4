"""`diptych bench kernels`: time of each Triton kernel against what the hardware allows.

Shapes are those of one layer of an 8B Llama (32 query heads, 8 KV heads of 128). A floor is the
larger of bytes over the memory's bandwidth and operations over the matrix units' rate, as measured
on an H200. Times are medians over CUDA-graph replays, so that launching costs nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from diptych.bench.report import DEFAULT_DIRECTORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--device", default="cuda", help="cuda or cuda:N")
    add("--block-size", type=int, nargs="+", default=[64, 16], help="tokens of a KV block")
    add("--num-layers", type=int, default=32, help="layers that share a block of the cache")
    add("--bandwidth-tb-per-s", type=float, default=4.3, help="of the memory, for the floor")
    add("--peak-tflop-per-s", type=float, default=790.0, help="of bfloat16 matmuls, for the floor")
    add("--attention-backend", default="triton", help="triton, or fa3 for prefill attention")
    add("--tune", action="store_true", help="time attention over tile shapes instead")
    add("--only", default="", help="cases whose name contains this")
    add("--result-dir", type=Path, default=DEFAULT_DIRECTORY, help="folder of the dated record")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    from diptych.bench.kernel_times import run  # torch, which the help does without

    return run(args)
