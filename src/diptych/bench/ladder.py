"""`diptych bench ladder`: decode and prefill over batch and context, beside floor and peer.

Time per output token (TPOT) is the time for 144 output tokens less the time for 16, over 128, each
the best of two: what prompts cost falls out. docs/benchmarks.md has all definitions.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from diptych.bench import ladder_table, peer_vllm
from diptych.bench.ladder_plot import can_plot, plot
from diptych.bench.ladder_record import DecodeRow, Ladder, TimeRow
from diptych.bench.offline import (
    add_engine_arguments,
    make_llm,
    model_directory,
    random_prompts,
    say,
    settings_of,
)
from diptych.bench.report import DEFAULT_DIRECTORY, environment, write_result
from diptych.bench.roofline import Hardware, Roofline
from diptych.bench.startup import timed_start
from diptych.engine.llm import LLM
from diptych.errors import ConfigError
from diptych.inputs import TokensPrompt
from diptych.models.config import ModelConfig
from diptych.sampling_params import SamplingParams

POINTS = "1@1k 8@1k 32@1k 64@1k 128@1k 256@1k 8@8k 32@8k 4@32000"
PREFILL = "1x1024 1x8192 1x32000 16x1024"
QUICK_POINTS = "1@1k 8@1k 32@1k 64@1k"
QUICK_PREFILL = "1x1024 1x8192"
LATENCY = "8x32+128"
BUDGET_S, QUICK_BUDGET_S = 170.0, 40.0
SHORT, LONG = 16, 144
ROUNDS = 2
# a quantity's runs go on until there are this many, or they took this long
_RUNS, _RUNS_S = 5, 2.0
# requests of a step, whatever the device
_ALWAYS_FIT = 64


class Point(NamedTuple):
    """`batch` requests of `length` prompt tokens and, for latency, `output` tokens."""

    batch: int
    length: int
    output: int = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--quick", action="store_true", help=f"only {QUICK_POINTS}, prefill {QUICK_PREFILL}")
    add("--points", nargs="*", metavar="BATCH@CONTEXT", help=f"decode; default {POINTS}")
    add("--prefill", nargs="*", metavar="BATCHxLENGTH", help=f"default {PREFILL}")
    add("--latency", nargs="*", metavar="BATCHxIN+OUT", help=f"default {LATENCY}")
    add("--budget-s", type=float, help=f"for measuring; default {BUDGET_S:.0f}, or less if quick")
    add("--bandwidth-tb-per-s", type=float, default=4.3, help="of the memory, for the floor")
    add("--peak-tflop-per-s", type=float, default=790.0, help="of matmuls, for the floor")
    add("--attention-tflop-per-s", type=float, default=600.0, help="of prefill attention")
    add("--weight-bytes", type=int, help="of one weight, for the floor; the dtype's if absent")
    add("--kv-bytes", type=int, help="of one element of KV, for the floor; the dtype's if absent")
    add("--from-json", type=Path, help="measure nothing: table and plot of an earlier record")
    add_engine_arguments(parser)
    parser.set_defaults(model="shape:llama-3.1-8b", result_dir=DEFAULT_DIRECTORY)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report, plot."""
    if args.from_json is not None:
        ladder = _read(args.from_json)
        ladder_table.show(ladder)
        _plot(ladder, args.from_json.with_suffix(".png"))
        return 0
    points = _chosen(args, "points", POINTS, QUICK_POINTS)
    prefill = _chosen(args, "prefill", PREFILL, QUICK_PREFILL)
    latency = _chosen(args, "latency", LATENCY, LATENCY)
    arguments = _room(args, [*points, *prefill, *latency])
    llm, start_up = timed_start(lambda: make_llm(args, **arguments))
    with llm:
        ladder = Ladder(
            roofline=_roofline(args, llm),
            start_up=start_up,
            device=llm.device,
            device_name=environment(llm.device)["device"],
            peer=peer_vllm.applies(args.model, args.dtype, llm.device),
        )
        ladder_table.show_start(ladder)
        try:
            _Measure(llm, args, ladder).run(prefill, latency, points)
        finally:
            # what was measured before a failure is kept
            ladder_table.show_end(ladder)
            _write(args, ladder)
    return 0


def _write(args: argparse.Namespace, ladder: Ladder) -> None:
    payload = {"settings": settings_of(args), **ladder.to_json()}
    name = "ladder-quick" if args.quick else "ladder"
    path = write_result(name, payload, device=ladder.device, directory=args.result_dir)
    if args.output_json is not None:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_bytes(path.read_bytes())
    _plot(ladder, path.with_suffix(".png"))
    say(f"wrote {path}")


class _Measure:
    """Fills a ladder, printing each row when it is there, until the budget is spent."""

    def __init__(self, llm: LLM, args: argparse.Namespace, ladder: Ladder) -> None:
        self._llm = llm
        self._ladder = ladder
        self._rng = random.Random(args.seed)
        default = QUICK_BUDGET_S if args.quick else BUDGET_S
        budget_s = default if args.budget_s is None else args.budget_s
        self._deadline_s = time.monotonic() + budget_s
        self._floor_s = self._spent_s = 0.0

    def run(
        self, prefill: Sequence[Point], latency: Sequence[Point], points: Sequence[Point]
    ) -> None:
        for point in prefill:
            if self._affords(point, self._roofline.prefill_s(point.batch, point.length) * 3):
                row = self._time_row(point, self._roofline.prefill_s(point.batch, point.length))
                self._ladder.prefill.append(row)
                ladder_table.show_prefill(self._ladder, row)
        for point in latency:
            floor_s = self._roofline.batch_s(*point)
            if self._affords(point, floor_s * 3):
                row = self._time_row(point, floor_s)
                self._ladder.latency.append(row)
                ladder_table.show_latency(self._ladder, row)
        for point in points:
            if self._affords(point, self._round_floor_s(point)):
                decode = self._decode_row(point)
                self._ladder.decode.append(decode)
                ladder_table.show_decode(self._ladder, decode)

    @property
    def _roofline(self) -> Roofline:
        return self._ladder.roofline

    def _time_row(self, point: Point, floor_s: float) -> TimeRow:
        """Several runs after one that is not counted."""
        prompts = self._prompts(point)
        self._time(prompts, point.output)
        runs: list[float] = []
        while len(runs) < 2 or (len(runs) < _RUNS and sum(runs) < _RUNS_S):
            runs.append(self._time(prompts, point.output))
        self._count(floor_s * len(runs), sum(runs))
        return TimeRow(
            batch=point.batch,
            input_len=point.length,
            output_len=point.output,
            time_s=statistics.median(runs),
            runs_s=runs,
            floor_s=floor_s,
        )

    def _decode_row(self, point: Point) -> DecodeRow:
        prompts = self._prompts(point)
        short: list[float] = []
        long: list[float] = []
        for _ in range(ROUNDS):
            short.append(self._time(prompts, SHORT))
            long.append(self._time(prompts, LONG))
            self._count(self._round_floor_s(point), short[-1] + long[-1])
            if time.monotonic() + short[-1] + long[-1] > self._deadline_s:
                break
        return DecodeRow(
            batch=point.batch,
            context=point.length,
            tpot_s=(min(long) - min(short)) / (LONG - SHORT),
            short_s=short,
            long_s=long,
            floor_s=self._roofline.decode_s(point.batch, point.length),
            # a step that makes token k reads the prompt and k - 1 tokens
            mean_context=point.length + (SHORT + LONG - 1) / 2,
        )

    def _round_floor_s(self, point: Point) -> float:
        """Least seconds of one round: both prefills and all steps."""
        step_s = self._roofline.decode_s(point.batch, point.length)
        return 2 * self._roofline.prefill_s(point.batch, point.length) + (SHORT + LONG) * step_s

    def _affords(self, point: Point, floor_s: float) -> bool:
        """Whether a row fits the budget if it is as far from its floor as what was measured."""
        factor = self._spent_s / self._floor_s if self._floor_s else 1.0
        left_s = self._deadline_s - time.monotonic()
        if floor_s * factor > left_s:
            name = f"{point.batch} x {point.length}"
            self._ladder.skipped.append(name)
            say(f"{name} left out: {left_s:.0f} s of --budget-s are left")
            return False
        return True

    def _count(self, floor_s: float, spent_s: float) -> None:
        self._floor_s += floor_s
        self._spent_s += spent_s

    def _prompts(self, point: Point) -> list[TokensPrompt]:
        vocab_size = self._llm.model_config.vocab_size
        return random_prompts(self._rng, point.batch, point.length, vocab_size)

    def _time(self, prompts: list[TokensPrompt], output_len: int) -> float:
        """Seconds until all prompts have `output_len` greedy tokens."""
        params = SamplingParams(
            temperature=0.0, ignore_eos=True, max_tokens=output_len, detokenize=False
        )
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start
        assert all(len(o.outputs[0].token_ids) == output_len for o in outputs)
        return elapsed_s


def parse_point(text: str) -> Point:
    """`8@1k`, `16x1024` or `8x32+128`; `k` is 1,024.

    Raises:
        ConfigError: it is something else.
    """
    match = re.fullmatch(r"(\d+)[@x](\d+)(k?)(?:\+(\d+))?", text)
    if match is None or 0 in (int(match[1]), int(match[2]), int(match[4] or 1)):
        raise ConfigError(f"{text!r} is no point: write 8@1k, 16x1024 or 8x32+128")
    return Point(int(match[1]), int(match[2]) * (1024 if match[3] else 1), int(match[4] or 1))


def _chosen(args: argparse.Namespace, name: str, default: str, quick: str) -> list[Point]:
    """Points of a flag, which may be given as several values or as one with commas."""
    given: list[str] | None = getattr(args, name)
    texts = (quick if args.quick else default).split() if given is None else given
    return [parse_point(part) for text in texts for part in text.replace(",", " ").split()]


def _room(args: argparse.Namespace, points: Sequence[Point]) -> dict[str, int]:
    """Limits of the engine that the points need, where the flags set none."""
    if not points:
        raise ConfigError("there is nothing to measure")
    room = {}
    if args.max_model_len is None:
        config = ModelConfig.from_directory(model_directory(args))
        longest = max(point.length for point in points) + max(LONG, *(p.output for p in points))
        # to whole blocks of any size
        room["max_model_len"] = min(-(-longest // 256) * 256, config.max_position)
    most = max(point.batch for point in points)
    if args.max_num_seqs is None and most > _ALWAYS_FIT:
        room["max_num_seqs"] = max(most, 256)
    return room


def _roofline(args: argparse.Namespace, llm: LLM) -> Roofline:
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
        kv_bytes=args.kv_bytes or itemsize,
    )


def _read(path: Path) -> Ladder:
    try:
        return Ladder.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no record of a ladder: {error!r}") from error


def _plot(ladder: Ladder, path: Path) -> None:
    if not ladder.decode:
        return
    if can_plot():
        plot(ladder, path)
        say(f"wrote {path}")
    else:
        say("no plot: matplotlib is not installed (extra `plot`); --from-json draws it later")
