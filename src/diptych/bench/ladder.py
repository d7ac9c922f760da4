"""`diptych bench ladder`: decode, prefill, latency and throughput, beside floor and peer.

One engine measures all rows, in this order and until `--budget-s` is spent; `--resume` takes the
rows of an earlier record and measures only those that it lacks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path

from diptych.bench import ladder_table, peer_vllm
from diptych.bench.hardware import add_hardware_arguments, roofline_of, variant
from diptych.bench.ladder_plot import can_plot, plot
from diptych.bench.ladder_record import Ladder
from diptych.bench.measure import LONG, Measure
from diptych.bench.offline import (
    add_engine_arguments,
    make_llm,
    model_directory,
    say,
    settings_of,
)
from diptych.bench.points import Point, parse_points
from diptych.bench.report import DEFAULT_DIRECTORY, environment, write_result
from diptych.bench.startup import timed_start
from diptych.errors import ConfigError
from diptych.models.config import ModelConfig

# by kind of row: the default, and that of --quick
POINTS = {
    "prefill": ("1x1024 1x8192 1x32000 16x1024", "1x1024 1x8192"),
    "latency": ("8x32+128", "8x32+128"),
    "throughput": ("1000x1024+128 1000x256+256", ""),
    "decode": (
        "1@1k 8@1k 32@1k 64@1k 128@1k 256@1k 8@8k 32@8k 4@32000",
        "1@1k 8@1k 32@1k 64@1k",
    ),
}
BUDGET_S, QUICK_BUDGET_S = 300.0, 40.0
# requests of a step by default, on a CPU and on a GPU of much memory
_ALWAYS_FIT, _ROOMY = 64, 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of this benchmark."""
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer rows: decode and prefill as their defaults say")
    for kind, metavar in (
        ("points", "BATCH@CONTEXT"),
        ("prefill", "BATCHxLENGTH"),
        ("latency", "BATCHxIN+OUT"),
        ("throughput", "REQUESTSxIN+OUT"),
    ):
        full, quick = POINTS["decode" if kind == "points" else kind]
        add(f"--{kind}", nargs="*", metavar=metavar, help=f"default {full}; quick: {quick or '-'}")
    add("--budget-s", type=float, help=f"for measuring; default {BUDGET_S:.0f}, or less if quick")
    add("--resume", type=Path, metavar="JSON", help="keep the rows of this record, add the others")
    add("--from-json", type=Path, help="measure nothing: table and plot of an earlier record")
    add("--markdown", action="store_true", help="with --from-json: only a table in Markdown")
    add_hardware_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(model="shape:llama-3.1-8b", result_dir=DEFAULT_DIRECTORY)


def main(args: argparse.Namespace) -> int:
    """Measure, print, report, plot."""
    if args.from_json is not None:
        ladder = _read(args.from_json)
        if args.markdown:
            ladder_table.show_markdown(ladder)
            return 0
        ladder_table.show(ladder)
        _plot(ladder, args.from_json.with_suffix(".png"))
        return 0
    earlier = None if args.resume is None else _read(args.resume)
    todo = _todo(args, earlier)
    arguments = _room(args, todo)
    llm, start_up = timed_start(lambda: make_llm(args, **arguments))
    with llm:
        ladder = Ladder(
            roofline=roofline_of(args, llm),
            start_up=start_up,
            device=llm.device,
            device_name=environment(llm.device)["device"],
            peer=not variant(llm) and peer_vllm.applies(args.model, args.dtype, llm.device),
        )
        if earlier is not None:
            ladder.take_rows(earlier)
        ladder_table.show_start(ladder)
        budget = _Budget(args)
        try:
            _fill(ladder, Measure(llm, ladder.roofline, args.seed, budget.deadline_s), todo, budget)
        finally:
            # what was measured before a failure is kept
            ladder_table.show_end(ladder)
            _write(args, ladder, variant(llm))
    return 0


class _Budget:
    """Whether the next row still fits, if it is as far from its floor as those before."""

    def __init__(self, args: argparse.Namespace) -> None:
        default = QUICK_BUDGET_S if args.quick else BUDGET_S
        budget_s = default if args.budget_s is None else args.budget_s
        self.deadline_s = time.monotonic() + budget_s

    @property
    def left_s(self) -> float:
        return self.deadline_s - time.monotonic()

    def affords(self, least_s: float, times_floor: float) -> bool:
        return least_s * times_floor <= self.left_s


def _fill(
    ladder: Ladder, measure: Measure, todo: Mapping[str, list[Point]], budget: _Budget
) -> None:
    """Measure each row, printing it when it is there, until the budget is spent."""
    for kind, points in todo.items():
        for point in points:
            if budget.affords(measure.least_s(kind, point), measure.times_floor):
                ladder.add(kind, measure.row(kind, point))
                ladder_table.show_last(ladder, kind)
            else:
                name = f"{point.batch} x {point.length}"
                ladder.skipped.append(name)
                say(f"{name} left out: {budget.left_s:.0f} s of --budget-s are left")


def _todo(args: argparse.Namespace, earlier: Ladder | None) -> dict[str, list[Point]]:
    """The points of each kind that the flags ask for and the earlier record lacks."""
    todo = {}
    for kind, (full, quick) in POINTS.items():
        given: list[str] | None = getattr(args, "points" if kind == "decode" else kind)
        points = parse_points([quick if args.quick else full] if given is None else given)
        known = set() if earlier is None else earlier.points(kind)
        todo[kind] = [point for point in points if point not in known]
    return todo


def _room(args: argparse.Namespace, todo: Mapping[str, list[Point]]) -> dict[str, int]:
    """Limits of the engine that the points need, where the flags set none."""
    points = [point for kind in todo.values() for point in kind]
    if not points:
        raise ConfigError("there is nothing to measure")
    room = {}
    if args.max_model_len is None:
        config = ModelConfig.from_directory(model_directory(args))
        longest = max(point.length for point in points) + max(LONG, *(p.output for p in points))
        # to whole blocks of any size
        room["max_model_len"] = min(-(-longest // 256) * 256, config.max_position)
    # how many of a throughput row run at once is for the engine to say
    together = [point.batch for kind in todo if kind != "throughput" for point in todo[kind]]
    if args.max_num_seqs is None and max(together, default=0) > _ALWAYS_FIT:
        room["max_num_seqs"] = max(_ROOMY, *together)
    return room


def _write(args: argparse.Namespace, ladder: Ladder, variant: str) -> None:
    payload = {"settings": settings_of(args), **ladder.to_json()}
    name = "ladder-quick" if args.quick else "ladder"
    path = write_result(name + variant, payload, device=ladder.device, directory=args.result_dir)
    if args.output_json is not None:
        args.output_json.parent.mkdir(parents=True, exist_ok=True)
        args.output_json.write_bytes(path.read_bytes())
    _plot(ladder, path.with_suffix(".png"))
    say(f"wrote {path}")


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
