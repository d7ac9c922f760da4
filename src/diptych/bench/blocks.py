"""`diptych bench blocks`: what the KV block size costs decode, prefill and transfers.

An engine is built for each size. Transfers pay per run of bytes: the blocks of a prompt, or fewer
where neighbours lie side by side in both pools.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from diptych.bench.hardware import add_hardware_arguments, roofline_of
from diptych.bench.measure import LONG, Measure
from diptych.bench.offline import add_engine_arguments, make_llm, report, say
from diptych.bench.points import Point, parse_points
from diptych.bench.worn_pool import runs_of_prompt
from diptych.connectors.base import KVLayout
from diptych.engine.kv_cache import block_bytes
from diptych.models.config import ModelConfig

if TYPE_CHECKING:
    from diptych.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--block-sizes", type=int, nargs="+", default=[16, 32, 64], metavar="TOKENS")
    add("--points", nargs="*", default=["8@8k", "64@1k"], metavar="BATCH@CONTEXT", help="decode")
    add("--prefill", nargs="*", default=["1x8192"], metavar="BATCHxLENGTH", help="prefill")
    add("--prompt-len", type=int, default=8192, help="tokens of the prompt that is transferred")
    add_hardware_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(model="shape:llama-3.1-8b")


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    points = {"decode": parse_points(args.points), "prefill": parse_points(args.prefill)}
    rows = []
    device = "cpu"
    for block_size in args.block_sizes:
        with make_llm(args, block_size=block_size, **_room(args, points)) as llm:
            device = llm.device
            rows.append(_measure(args, llm, block_size, points))
        say(_line(rows[-1]))
    report("blocks", args, device, {"rows": rows})
    return 0


def _room(args: argparse.Namespace, points: dict[str, list[Point]]) -> dict[str, int]:
    if args.max_model_len is not None:
        return {}
    longest = max((p.length for kind in points.values() for p in kind), default=1) + LONG
    return {"max_model_len": -(-longest // 256) * 256}


def _measure(
    args: argparse.Namespace, llm: LLM, block_size: int, points: dict[str, list[Point]]
) -> dict[str, Any]:
    roofline = roofline_of(args, llm)
    measure = Measure(llm, roofline, args.seed)
    found: dict[str, Any] = {"block_size": block_size}
    for kind, chosen in points.items():
        found[kind] = [asdict(measure.row(kind, point)) for point in chosen]
    return found | transfer(llm.model_config, block_size, roofline.kv_bytes, args.prompt_len)


def transfer(model: ModelConfig, block_size: int, kv_bytes: int, prompt_len: int) -> dict[str, int]:
    """Runs of bytes that carry a prompt's KV: its blocks, and what merging neighbours leaves of
    them in a pool that has been used for long."""
    layout = KVLayout(
        num_blocks=1,
        num_kv_heads=model.num_kv_heads,
        num_layers=model.num_layers,
        block_size=block_size,
        head_dim=model.head_dim,
        dtype={1: "int8", 2: "bfloat16", 4: "float32"}[kv_bytes],
    )
    return {
        "block_bytes": block_bytes(layout),
        "num_blocks": -(-prompt_len // block_size),
        "num_runs": runs_of_prompt(prompt_len, block_size),
    }


def _line(row: dict[str, Any]) -> str:
    """One block size on the screen."""
    cells = [f"block {row['block_size']:3}"]
    for decode in row["decode"]:
        cells.append(f"{decode['batch']}@{decode['context']} {decode['tpot_s'] * 1e3:.3f} ms")
    for prefill in row["prefill"]:
        time_ms = prefill["time_s"] * 1e3
        cells.append(f"prefill {prefill['batch']}x{prefill['input_len']} {time_ms:.1f} ms")
    cells.append(f"{row['num_blocks']} blocks of {row['block_bytes'] / (1 << 20):g} MiB")
    return "  ".join([*cells, f"{row['num_runs']} runs"])
