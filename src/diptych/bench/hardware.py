"""Flags of the hardware's rates, and the roofline that they give an engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from diptych.bench.roofline import Hardware, Roofline

if TYPE_CHECKING:
    from diptych.engine.llm import LLM


def add_hardware_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the rates; the defaults are what an H200 was seen to reach."""
    add = parser.add_argument
    add("--bandwidth-tb-per-s", type=float, default=4.3, help="of the memory, for the floor")
    add("--peak-tflop-per-s", type=float, help="of matmuls, for the floor; 790, or 1490 for fp8")
    add("--attention-tflop-per-s", type=float, default=600.0, help="of prefill attention")
    add("--weight-bytes", type=int, help="of one weight, for the floor; as loaded if absent")
    add("--kv-bytes", type=int, help="of one element of KV, for the floor; the cache's if absent")


_PEAK, _FP8_PEAK = 790.0, 1490.0


def has_fp8_weights(llm: LLM) -> bool:
    """Whether its linear layers are of eight bits."""
    return llm.config.quantization is not None or llm.model_config.quantization is not None


def has_fp8_kv(llm: LLM) -> bool:
    """Whether its KV cache is of eight bits."""
    return llm.config.kv_cache_dtype.startswith("fp8")


def variant(llm: LLM) -> str:
    """What to add to a record's name, so that figures of eight bits stand alone."""
    return "-fp8" * has_fp8_weights(llm) + "-fp8kv" * has_fp8_kv(llm)


def roofline_of(args: argparse.Namespace, llm: LLM) -> Roofline:
    """The roofline of this engine's model on the hardware of the flags."""
    import torch

    from diptych.engine.device import choose_dtype

    fp8 = has_fp8_weights(llm)
    itemsize = choose_dtype(args.dtype, llm.model_config, torch.device(llm.device)).itemsize
    return Roofline(
        model=llm.model_config,
        hardware=Hardware(
            bytes_per_s=args.bandwidth_tb_per_s * 1e12,
            flops_per_s=(args.peak_tflop_per_s or (_FP8_PEAK if fp8 else _PEAK)) * 1e12,
            attention_flops_per_s=args.attention_tflop_per_s * 1e12,
        ),
        weight_bytes=args.weight_bytes or (1 if fp8 else itemsize),
        head_bytes=args.weight_bytes or itemsize,
        kv_bytes=args.kv_bytes or (1 if has_fp8_kv(llm) else itemsize),
    )
