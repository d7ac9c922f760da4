"""Flags of the hardware's rates, and the roofline that they give an engine."""

from __future__ import annotations

import argparse

from diptych.bench.roofline import Hardware, Roofline
from diptych.engine.llm import LLM


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the rates; the defaults are what an H200 was seen to reach."""
    add = parser.add_argument
    add("--bandwidth-tb-per-s", type=float, default=4.3, help="of the memory, for the floor")
    add("--peak-tflop-per-s", type=float, default=790.0, help="of matmuls, for the floor")
    add("--attention-tflop-per-s", type=float, default=600.0, help="of prefill attention")
    add("--weight-bytes", type=int, help="of one weight, for the floor; the dtype's if absent")
    add("--kv-bytes", type=int, help="of one element of KV, for the floor; the cache's if absent")


def roofline_of(args: argparse.Namespace, llm: LLM) -> Roofline:
    """The roofline of this engine's model on the hardware of the flags."""
    import torch

    from diptych.engine.device import choose_dtype

    itemsize = choose_dtype(args.dtype, llm.model_config, torch.device(llm.device)).itemsize
    return Roofline(
        model=llm.model_config,
        hardware=Hardware(
            bytes_per_s=args.bandwidth_tb_per_s * 1e12,
            flops_per_s=args.peak_tflop_per_s * 1e12,
            attention_flops_per_s=args.attention_tflop_per_s * 1e12,
        ),
        weight_bytes=args.weight_bytes or itemsize,
        kv_bytes=args.kv_bytes or (1 if llm.config.kv_cache_dtype.startswith("fp8") else itemsize),
    )
