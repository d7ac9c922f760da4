"""`diptych bench latency`: seconds that one batch takes from prompt to last token."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diptych.bench.hardware import add_hardware_arguments, roofline_of, variant
from diptych.bench.offline import (
    add_engine_arguments,
    count,
    make_llm,
    model_directory,
    percentile,
    random_prompts,
    report,
    say,
)
from diptych.bench.roofline import Roofline
from diptych.errors import ConfigError
from diptych.sampling_params import SamplingParams

if TYPE_CHECKING:
    from diptych.engine.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)
COMPARED_BATCH_SIZES = (1, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--input-len", type=count, default=32, help="prompt tokens of a request")
    add("--output-len", type=count, default=128, help="tokens that each request generates")
    add("--batch-size", type=count, default=8, help="requests that run together")
    add("--num-iters-warmup", type=int, default=10, help="batches before measuring")
    add("--num-iters", type=count, default=30, help="batches that are measured")
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--compare", choices=["transformers"], default=None, help="measure this one beside ours")
    add_hardware_arguments(parser)
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    if args.compare:
        return _compare(args)
    with make_llm(args) as llm:
        run = _our_run(llm, args, args.batch_size, temperature=args.temperature)
        latencies = _measure({"ours": run}, args)["ours"]
        device, roofline, kind = llm.device, roofline_of(args, llm), variant(llm)
    figures = _summary(latencies, args, roofline)
    say(f"Avg latency: {figures['avg_latency'] * 1e3:.2f} ms")
    for percent in PERCENTILES:
        say(f"{percent}% percentile latency: {figures['percentiles'][str(percent)] * 1e3:.2f} ms")
    say(
        f"At the median: {figures['requests_per_s']:.2f} requests/s, tok/s: "
        f"{figures['input_tokens_per_s']:.1f} input, {figures['output_tokens_per_s']:.1f} output, "
        f"{figures['total_tokens_per_s']:.1f} total"
    )
    say(
        f"{figures['tb_per_s']:.2f} TB/s, {figures['tflop_per_s']:.1f} TFLOP/s, "
        f"{figures['times_floor']:.2f} x the floor of {figures['floor_s'] * 1e3:.2f} ms "
        f"(at {args.bandwidth_tb_per_s} TB/s)"
    )
    report(f"latency{kind}", args, device, figures)
    return 0


def _compare(args: argparse.Namespace) -> int:
    """Ours and `transformers.generate`, greedy, in turns, on the same threads and weights."""
    from diptych.bench.peer_transformers import TransformersPeer

    model_directory(args)
    if args.load_format == "dummy":
        raise ConfigError("--compare needs real weights, so that both run the same model")
    args.dtype = "float32"
    with make_llm(args) as llm:
        peer = TransformersPeer(llm.model_config.path, llm.device, args.num_threads)
        prompt = _prompts(args, 1, llm)[0]["prompt_token_ids"]
        runs: dict[str, Callable[[], None]] = {
            "transformers b=1": lambda: peer.generate([prompt], args.output_len)
        }
        for size in COMPARED_BATCH_SIZES:
            runs[f"diptych b={size}"] = _our_run(llm, args, size, temperature=0.0)
        latencies = _measure(runs, args)
        device, threads = llm.device, peer.num_threads
    figures = _ratios(latencies, args.output_len)
    say(f"float32, {threads} threads, {args.input_len} in, {args.output_len} out, greedy")
    for name, row in figures["rates"].items():
        say(f"{name:>18}: {row['tokens_per_s']:8.1f} tok/s  {row['ratio']:5.2f}x")
    report("latency-vs-transformers", args, device, {"num_threads_used": threads, **figures})
    return 0


def _our_run(
    llm: LLM, args: argparse.Namespace, batch_size: int, *, temperature: float
) -> Callable[[], None]:
    prompts = _prompts(args, batch_size, llm)
    params = SamplingParams(
        temperature=temperature, ignore_eos=True, max_tokens=args.output_len, seed=args.seed
    )

    def run() -> None:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert all(len(o.outputs[0].token_ids) == args.output_len for o in outputs)

    return run


def _prompts(args: argparse.Namespace, count: int, llm: LLM) -> list[Any]:
    rng = random.Random(args.seed)
    return random_prompts(rng, count, args.input_len, llm.model_config.vocab_size)


def _measure(
    runs: dict[str, Callable[[], None]], args: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each run, the runs taken in turns so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for iteration in range(args.num_iters_warmup + args.num_iters):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if iteration >= args.num_iters_warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _summary(
    latencies: list[float], args: argparse.Namespace, roofline: Roofline
) -> dict[str, Any]:
    """Latencies, and the rates of the median one."""
    shape = (args.batch_size, args.input_len, args.output_len)
    median, floor_s = statistics.median(latencies), roofline.batch_s(*shape)
    num_input, num_output = (args.batch_size * n for n in (args.input_len, args.output_len))
    return {
        "avg_latency": statistics.fmean(latencies),
        "latencies": latencies,
        "percentiles": {str(p): percentile(latencies, p) for p in PERCENTILES},
        "requests_per_s": args.batch_size / median,
        "input_tokens_per_s": num_input / median,
        "output_tokens_per_s": num_output / median,
        "total_tokens_per_s": (num_input + num_output) / median,
        "tb_per_s": roofline.batch_bytes(*shape) / median / 1e12,
        "tflop_per_s": roofline.batch_flops(*shape) / median / 1e12,
        "floor_s": floor_s,
        "times_floor": median / floor_s,
    }


def _ratios(latencies: dict[str, list[float]], output_len: int) -> dict[str, Any]:
    """Tokens per second at the median, and the ratio to the first row."""
    rates = {}
    for name, seconds in latencies.items():
        batch_size = int(name.rpartition("=")[2])
        rates[name] = batch_size * output_len / statistics.median(seconds)
    base = next(iter(rates.values()))
    return {
        "rates": {n: {"tokens_per_s": r, "ratio": r / base} for n, r in rates.items()},
        "latencies": latencies,
    }
