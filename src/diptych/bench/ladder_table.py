"""A ladder on the screen: one line a row, the peer, the goal and the floor beside it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from diptych.bench import peer_vllm
from diptych.bench.ladder_record import DecodeRow, Ladder, TimeRow
from diptych.bench.offline import say
from diptych.bench.peer_vllm import Figure

_HEAD = f"{'ours':>8} {'peer':>8} {'goal':>8} {'floor':>8} {'/floor':>7}"


def show(ladder: Ladder) -> None:
    """The whole table."""
    show_start(ladder)
    for kind, show_row in _SHOW.items():
        rows = getattr(ladder, kind)
        for row in rows:
            show_row(ladder, row, row is rows[0])
    show_end(ladder)


def show_start(ladder: Ladder) -> None:
    start = ladder.start_up
    if ladder.peer:
        say(f"peer: {peer_vllm.NAME}, the same shape on one {peer_vllm.DEVICE}")
    say(f"{'start-up, s':16} {_HEAD}")
    _say_row("own imports", start.own_imports_s, _figure(ladder, peer_vllm.IMPORTS_S), None, 2)
    _say_row("engine ready", start.ready_s, _figure(ladder, peer_vllm.READY_S), None, 2)


def show_last(ladder: Ladder, kind: str) -> None:
    """The row that was measured last."""
    rows = getattr(ladder, kind)
    _SHOW[kind](ladder, rows[-1], len(rows) == 1)


def _show_prefill(ladder: Ladder, row: TimeRow, is_first: bool) -> None:
    if is_first:
        say(f"{'prefill, ms':16} {_HEAD} {'tok/s':>8} {'TFLOP/s':>7}")
    rates = ladder.prefill_rates(row)
    _say_row(
        f"{row.batch} x {row.input_len}",
        row.time_s * 1e3,
        _prefill_figure(ladder, row),
        row.floor_s * 1e3,
        1,
        f" {rates['tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}",
    )


def _show_latency(ladder: Ladder, row: TimeRow, is_first: bool) -> None:
    if is_first:
        say(f"{'latency, ms':16} {_HEAD} {'tok/s':>8} {'TFLOP/s':>7} {'TB/s':>5}")
    rates = ladder.batch_rates(row)
    _say_row(
        f"{row.batch} x {row.input_len} + {row.output_len}",
        row.time_s * 1e3,
        _latency_figure(ladder, row),
        row.floor_s * 1e3,
        1,
        f" {rates['output_tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}"
        f" {rates['tb_per_s']:5.2f}",
    )


def _show_throughput(ladder: Ladder, row: TimeRow, is_first: bool) -> None:
    """In the unit of the peer's figure: all tokens, or output tokens, per second."""
    if is_first:
        say(f"{'throughput':16} {_HEAD} {'req/s':>8} {'in/s':>8} {'out/s':>8} {'TFLOP/s':>7}")
    unit, figure = _throughput_figure(ladder, row)
    rates = ladder.request_rates(row)
    peer, goal = figure if figure is not None else (None, None)
    ours = rates[f"{unit}_tokens_per_s"]
    cells = " ".join(_cell(v, 0) for v in (ours, peer, goal, ours * rates["times_floor"]))
    say(
        f"{f'{row.batch}x{row.input_len}+{row.output_len}':16} {cells}"
        f" {_cell(rates['times_floor'], 2, 7)} {rates['requests_per_s']:8.2f}"
        f" {rates['input_tokens_per_s']:8.0f} {rates['output_tokens_per_s']:8.0f}"
        f" {rates['tflop_per_s']:7.0f}  {unit} tok/s"
    )


def _show_decode(ladder: Ladder, row: DecodeRow, is_first: bool) -> None:
    if is_first:
        say(f"{'TPOT, ms':16} {_HEAD} {'tok/s':>8} {'TFLOP/s':>7} {'TB/s':>5}")
    rates = ladder.decode_rates(row)
    # the difference of two long times is only as good as both
    note = "  one round" if len(row.long_s) < 2 else ""
    _say_row(
        f"{row.batch} @ {row.context}",
        row.tpot_s * 1e3,
        tpot_figure(ladder, row),
        row.floor_s * 1e3,
        3,
        f" {rates['tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f} {rates['tb_per_s']:5.2f}{note}",
    )


def show_end(ladder: Ladder) -> None:
    measured = ladder.saturation()
    most = max((row.batch for row in ladder.decode), default=0)
    found = f"above {most}" if measured is None else f"{measured:.0f}"
    say(f"saturation batch {found}, predicted {ladder.roofline.saturation_batch:.0f}")
    results = goals(ladder)
    if results:
        missed = [name for name, met in results.items() if not met]
        say(f"goals met: {len(results) - len(missed)} of {len(results)}")
        if missed:
            say(textwrap.fill(f"missed: {', '.join(missed)}", 80))


def tpot_figure(ladder: Ladder, row: DecodeRow) -> Figure | None:
    """The peer's milliseconds per token, if its figures belong here."""
    return _figure(ladder, peer_vllm.TPOT_MS.get((row.batch, row.context)))


def goals(ladder: Ladder) -> dict[str, bool]:
    """Which goals were met, of the rows that have one."""
    start = ladder.start_up
    times: list[tuple[str, float, Figure | None]] = [
        ("imports", start.own_imports_s, _figure(ladder, peer_vllm.IMPORTS_S)),
        ("ready", start.ready_s, _figure(ladder, peer_vllm.READY_S)),
    ]
    for row in ladder.prefill:
        name = f"prefill {row.batch}x{row.input_len}"
        times.append((name, row.time_s * 1e3, _prefill_figure(ladder, row)))
    for row in ladder.latency:
        name = f"latency {row.batch}x{row.input_len}+{row.output_len}"
        times.append((name, row.time_s * 1e3, _latency_figure(ladder, row)))
    for decode in ladder.decode:
        name = f"TPOT {decode.batch}@{decode.context}"
        times.append((name, decode.tpot_s * 1e3, tpot_figure(ladder, decode)))
    met = {name: time <= figure.goal for name, time, figure in times if figure is not None}
    for row in ladder.throughput:
        unit, figure = _throughput_figure(ladder, row)
        if figure is not None:
            rate = ladder.request_rates(row)[f"{unit}_tokens_per_s"]
            met[f"throughput {row.batch}x{row.input_len}+{row.output_len}"] = rate >= figure.goal
    return met


def _prefill_figure(ladder: Ladder, row: TimeRow) -> Figure | None:
    return _figure(ladder, peer_vllm.PREFILL_MS.get((row.batch, row.input_len)))


def _latency_figure(ladder: Ladder, row: TimeRow) -> Figure | None:
    key = (row.batch, row.input_len, row.output_len)
    return _figure(ladder, peer_vllm.LATENCY_MS.get(key))


def _throughput_figure(ladder: Ladder, row: TimeRow) -> tuple[str, Figure | None]:
    """Which tokens count for a row, and the peer's."""
    key = (row.batch, row.input_len, row.output_len)
    if key in peer_vllm.OUTPUT_TOKENS_PER_S:
        return "output", _figure(ladder, peer_vllm.OUTPUT_TOKENS_PER_S[key])
    return "total", _figure(ladder, peer_vllm.TOTAL_TOKENS_PER_S.get(key))


def _figure(ladder: Ladder, figure: Figure | None) -> Figure | None:
    return figure if ladder.peer else None


def _say_row(
    name: str, ours: float, figure: Figure | None, floor: float | None, digits: int, rest: str = ""
) -> None:
    peer, goal = figure if figure is not None else (None, None)
    ratio = None if floor is None else ours / floor
    cells = " ".join(_cell(value, digits) for value in (ours, peer, goal, floor))
    say(f"{name:16} {cells} {_cell(ratio, 2, 7)}{rest}")


def _cell(value: float | None, digits: int, width: int = 8) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


_SHOW: Mapping[str, Callable[[Ladder, Any, bool], None]] = {
    "prefill": _show_prefill,
    "latency": _show_latency,
    "throughput": _show_throughput,
    "decode": _show_decode,
}
