"""What the offline benchmarks share: the engine's flags, random prompts, the report."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diptych.bench.report import environment, write_result
from diptych.engine.llm import LLM
from diptych.inputs import TokensPrompt


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine under test, of the random seed and of the report."""
    add = parser.add_argument
    add("--model", default="smollm2", help="smollm2, a directory, a hub id, or a .gguf file")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--load-format", default="auto", help="auto, or dummy for random weights")
    add("--num-threads", type=int, default=None, help="CPU threads of torch")
    add("--max-model-len", type=int, default=None, help="longest prompt plus output")
    add("--max-num-seqs", type=int, default=None, help="most requests per step")
    add("--max-num-batched-tokens", type=int, default=None, help="most tokens per step")
    add("--attention-backend", default="auto", help="auto, torch or triton")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    add("--seed", type=int, default=0, help="seed of prompts and sampling")
    add("--output-json", type=Path, default=None, help="write the figures to this file")
    add("--result-dir", type=Path, default=None, help="write a dated record into this folder")


def make_llm(args: argparse.Namespace) -> LLM:
    """The engine that the flags describe."""
    return LLM(
        args.model,
        device=args.device,
        dtype=args.dtype,
        load_format=args.load_format,
        num_threads=args.num_threads,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        attention_backend=args.attention_backend,
        enable_prefix_caching=args.enable_prefix_caching,
        seed=args.seed,
    )


def random_prompts(
    rng: random.Random, count: int, length: int, vocab_size: int
) -> list[TokensPrompt]:
    """`count` prompts of `length` random token ids."""
    return [{"prompt_token_ids": rng.choices(range(vocab_size), k=length)} for _ in range(count)]


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def say(text: str) -> None:
    """One line of the benchmark's answer on standard output."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def report(name: str, args: argparse.Namespace, device: str, figures: Mapping[str, Any]) -> None:
    """Write the figures where the flags ask for it."""
    settings = {k: v for k, v in vars(args).items() if _is_setting(k, v)}
    payload = {"settings": settings, **figures}
    if args.output_json is not None:
        record = {"name": name, **environment(device), **payload}
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if args.result_dir is not None:
        path = write_result(name, payload, device=device, directory=args.result_dir)
        logging.getLogger(__name__).info("wrote %s", path)


def _is_setting(name: str, value: Any) -> bool:
    plain = value is None or isinstance(value, str | int | float | bool)
    return plain and name not in ("output_json", "result_dir", "command", "kind")
