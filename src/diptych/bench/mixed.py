"""`diptych bench mixed`: what a long prompt costs where its prefix is known, and those that run.

One engine serves all rows; each has its own scheduler, so that settings can differ.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import replace
from typing import Any

from diptych.bench.offline import (
    add_engine_arguments,
    count,
    engine_arguments,
    model_directory,
    percentile,
    report,
    say,
)
from diptych.bench.traffic import Gaps, Traffic
from diptych.config import EngineConfig
from diptych.engine.arguments import engine_config
from diptych.engine.core import EngineCore
from diptych.engine.device import choose_device
from diptych.engine.executor import UniprocExecutor

# a warm prefix is to cost no more than this share of a cold one
GOAL_WARM_SHARE = 0.15


_CELLS = ("quiet_p50_s", "p50_s", "p99_s", "max_s", "first_token_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--prefix-len", type=int, default=8192, help="tokens that two prompts share")
    add("--new-tokens", type=count, default=64, help="tokens of each beyond them")
    add("--num-iters", type=count, default=5, help="prompts of each kind")
    add("--num-running", type=count, default=32, help="requests that decode meanwhile")
    add("--context", type=count, default=1024, help="prompt tokens of each of those")
    add("--prompt-len", type=count, default=8192, help="tokens of a prompt that arrives")
    add("--arrivals", type=count, default=6, help="prompts that arrive, one after another")
    add(
        "--thresholds",
        type=int,
        nargs="*",
        default=[0, 2048, 512],
        metavar="TOKENS",
        help="values of --long-prefill-token-threshold to compare; 0 sets none",
    )
    add(
        "--step-tokens",
        type=int,
        nargs="*",
        default=[2048, 512],
        metavar="TOKENS",
        help="lower values of --max-num-batched-tokens to compare, without a threshold",
    )
    add_engine_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report."""
    directory = model_directory(args)
    arguments = engine_arguments(args, enable_prefix_caching=True)
    if arguments["max_model_len"] is None:
        arguments["max_model_len"] = _room(args)
    executor = UniprocExecutor(engine_config(str(directory), arguments))
    try:
        figures = _measure(args, executor)
    finally:
        executor.shutdown()
    report("mixed", args, str(choose_device(args.device)), figures)
    return 0


def _measure(args: argparse.Namespace, executor: UniprocExecutor) -> dict[str, Any]:
    """Both tables, printed row by row."""
    rng = random.Random(args.seed)

    def traffic(config: EngineConfig) -> Traffic:
        vocab_size = executor.model_config.vocab_size
        return Traffic(EngineCore(config, executor), rng, vocab_size)

    prefix = _prefix_row(args, traffic(executor.config))
    say(f"{'first token, ms':34} {'cold':>8} {'warm':>8} {'share':>6}")
    say(
        f"{f'{args.prefix_len} known + {args.new_tokens} new tokens':34}"
        f" {prefix['cold_s'] * 1e3:8.1f} {prefix['warm_s'] * 1e3:8.1f}"
        f" {prefix['warm_share']:6.3f}  goal {GOAL_WARM_SHARE}"
    )
    stalls = []
    say(f"ms between tokens of {args.num_running} requests while {args.prompt_len} tokens arrive")
    head = ("p50 quiet", "p50", "p99", "max", "first token")
    say(f"{'threshold':>9} {'tokens a step':>13} " + " ".join(f"{name:>11}" for name in head))
    for config in _configs(args, executor.config):
        gaps = traffic(config).stalls(
            args.num_running, args.context, args.prompt_len, args.arrivals
        )
        stalls.append(row := _stall_row(config, gaps))
        cells = " ".join(f"{row[name] * 1e3:11.2f}" for name in _CELLS)
        threshold = config.long_prefill_token_threshold
        say(f"{threshold:9} {config.max_num_batched_tokens:13} {cells}")
    return {"prefix": prefix, "stalls": stalls}


def _configs(args: argparse.Namespace, base: EngineConfig) -> list[EngineConfig]:
    """What the rows of stalls try: the engine has room for each."""
    thresholds = [replace(base, long_prefill_token_threshold=n) for n in args.thresholds]
    return thresholds + [replace(base, max_num_batched_tokens=n) for n in args.step_tokens]


def _prefix_row(args: argparse.Namespace, traffic: Traffic) -> dict[str, Any]:
    """Medians of the time to the first token, the prefix computed before and not."""
    cold_s: list[float] = []
    warm_s: list[float] = []
    traffic.first_token_s(traffic.random_tokens(args.prefix_len))  # not counted
    for _ in range(args.num_iters):
        prefix = traffic.random_tokens(args.prefix_len)
        for times in (cold_s, warm_s):
            prompt = prefix + traffic.random_tokens(args.new_tokens)
            times.append(traffic.first_token_s(prompt))
    traffic.drain([])
    cold, warm = statistics.median(cold_s), statistics.median(warm_s)
    return {
        "prefix_len": args.prefix_len,
        "new_tokens": args.new_tokens,
        "cold_s": cold,
        "warm_s": warm,
        "warm_share": warm / cold,
        "cold_runs_s": cold_s,
        "warm_runs_s": warm_s,
    }


def _stall_row(config: EngineConfig, gaps: Gaps) -> dict[str, Any]:
    return {
        "long_prefill_token_threshold": config.long_prefill_token_threshold,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "quiet_p50_s": percentile(gaps.quiet_s, 50),
        "p50_s": percentile(gaps.meanwhile_s, 50),
        "p99_s": percentile(gaps.meanwhile_s, 99),
        "max_s": max(gaps.meanwhile_s),
        "first_token_s": statistics.median(gaps.first_token_s),
        "num_gaps": len(gaps.meanwhile_s),
    }


def _room(args: argparse.Namespace) -> int:
    """A context that holds the longest prompt, and the running ones for all their steps."""
    longest: int = max(args.prefix_len + args.new_tokens, args.prompt_len, args.context + 4096)
    return -(-(longest + 1) // 256) * 256
