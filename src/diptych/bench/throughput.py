"""`diptych bench throughput`: tokens per second over many requests at once, offline."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diptych.bench import peer_vllm
from diptych.bench.hardware import add_hardware_arguments, roofline_of, variant
from diptych.bench.offline import (
    add_engine_arguments,
    count,
    make_llm,
    random_prompts,
    report,
    say,
)
from diptych.bench.roofline import Roofline
from diptych.bench.sharegpt import first_turns, usual_lengths
from diptych.errors import ConfigError
from diptych.sampling_params import SamplingParams

if TYPE_CHECKING:
    from diptych.engine.llm import LLM

DEFAULT_OUTPUT_LEN = 128


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the benchmark."""

    prompt_token_ids: list[int]
    output_len: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--dataset-name", choices=["random", "sharegpt"], default="random")
    add("--dataset-path", type=Path, default=None, help="ShareGPT's JSON file")
    add("--num-prompts", type=count, default=1000, help="requests")
    add("--input-len", type=count, default=1024, help="prompt tokens of a random request")
    add(
        "--output-len",
        type=int,
        default=None,
        help="tokens of a request; 128 for random ones, the answer's length for ShareGPT",
    )
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--disable-detokenize", action="store_true", help="make no text")
    add_hardware_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    with make_llm(args) as llm:
        samples = _samples(args, llm)
        params = [
            SamplingParams(
                temperature=args.temperature,
                ignore_eos=True,
                max_tokens=s.output_len,
                detokenize=not args.disable_detokenize,
            )
            for s in samples
        ]
        start = time.perf_counter()
        outputs = llm.generate([s.prompt_token_ids for s in samples], params)
        elapsed_s = time.perf_counter() - start
        device, roofline, kind = llm.device, roofline_of(args, llm), variant(llm)
    num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
    num_output = sum(len(o.outputs[0].token_ids) for o in outputs)
    figures = _figures(len(outputs), num_prompt, num_output, elapsed_s)
    figures |= _against_floor(samples, elapsed_s, roofline)
    say(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.1f} total tok/s, "
        f"{figures['input_tokens_per_second']:.1f} input tok/s, "
        f"{figures['output_tokens_per_second']:.1f} output tok/s"
    )
    say(
        f"{figures['tflop_per_s']:.1f} TFLOP/s, {figures['kv_tb_per_s']:.2f} TB/s of KV, "
        f"{figures['times_floor']:.2f} x the floor of {figures['floor_s']:.2f} s "
        f"(at {args.bandwidth_tb_per_s} TB/s)"
    )
    if not kind:
        _say_peer(args, device, figures)
    say(f"Total num prompt tokens: {num_prompt}")
    say(f"Total num output tokens: {num_output}")
    report(f"throughput{kind}", args, device, figures)
    return 0


def _say_peer(args: argparse.Namespace, device: str, figures: dict[str, Any]) -> None:
    """What the peer reached, where it was measured with the same settings on the same device."""
    if args.dataset_name != "random" or not peer_vllm.applies(args.model, args.dtype, device):
        return
    key = (args.num_prompts, args.input_len, args.output_len or DEFAULT_OUTPUT_LEN)
    for name, kind, table in (
        ("total", "tokens_per_second", peer_vllm.TOTAL_TOKENS_PER_S),
        ("output", "output_tokens_per_second", peer_vllm.OUTPUT_TOKENS_PER_S),
    ):
        if key in table:
            peer, goal, _ = table[key]
            say(f"{peer_vllm.NAME}: {peer:.0f} {name} tok/s, ours {figures[kind] / peer:.2f} x")
            say(f"goal {goal:.0f} {name} tok/s: {'met' if figures[kind] >= goal else 'missed'}")


def _figures(
    num_requests: int, num_prompt: int, num_output: int, elapsed_s: float
) -> dict[str, Any]:
    return {
        "elapsed_time": elapsed_s,
        "num_requests": num_requests,
        "total_num_tokens": num_prompt + num_output,
        "requests_per_second": num_requests / elapsed_s,
        "tokens_per_second": (num_prompt + num_output) / elapsed_s,
        "input_tokens_per_second": num_prompt / elapsed_s,
        "output_tokens_per_second": num_output / elapsed_s,
    }


def _against_floor(
    samples: Sequence[Sample], elapsed_s: float, roofline: Roofline
) -> dict[str, float]:
    """Rates of what must be computed and read (weights, once for many requests, left out)."""
    shapes = [(1, len(sample.prompt_token_ids), sample.output_len) for sample in samples]
    floor_s = sum(roofline.throughput_s(*shape) for shape in shapes)
    flops = sum(roofline.batch_flops(*shape) for shape in shapes)
    kv_s = sum((n_out - 1) * roofline.kv_s(1, n_in + n_out / 2) for _, n_in, n_out in shapes)
    return {
        "tflop_per_s": flops / elapsed_s / 1e12,
        "kv_tb_per_s": kv_s * roofline.hardware.bytes_per_s / elapsed_s / 1e12,
        "floor_s": floor_s,
        "times_floor": elapsed_s / floor_s,
    }


def _samples(args: argparse.Namespace, llm: LLM) -> list[Sample]:
    rng = random.Random(args.seed)
    if args.dataset_name == "random":
        output_len = args.output_len or DEFAULT_OUTPUT_LEN
        prompts = random_prompts(rng, args.num_prompts, args.input_len, llm.model_config.vocab_size)
        return [Sample(p["prompt_token_ids"], output_len) for p in prompts]
    if args.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt needs --dataset-path")
    turns = list(first_turns(args.dataset_path))
    rng.shuffle(turns)
    samples: list[Sample] = []
    for prompt, answer in turns:
        if len(samples) == args.num_prompts:
            break
        found = usual_lengths(
            llm.get_tokenizer(), prompt, answer, args.output_len, llm.max_model_len
        )
        if found is not None:
            samples.append(Sample(*found))
    if not samples:
        raise ConfigError(f"{args.dataset_path} has no conversation of a fitting length")
    return samples
