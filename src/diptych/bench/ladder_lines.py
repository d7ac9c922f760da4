"""A ladder's rows as lines of a table: ours, the peer's, the goal, the floor."""

from __future__ import annotations

from dataclasses import dataclass

from diptych.bench import peer_vllm
from diptych.bench.ladder_record import DecodeRow, Ladder, TimeRow
from diptych.bench.peer_vllm import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure.

    Attributes:
        kind: the part of the table, a key of `HEADS`.
        name: the row.
        ours, floor: in the unit of the kind; a floor is the best possible.
        figure: the peer's and the goal, where they belong here.
        digits: after the point.
        more_is_better: of rates, not of times.
        rest: further columns, as text.
    """

    kind: str
    name: str
    ours: float
    floor: float | None = None
    figure: Figure | None = None
    digits: int
    more_is_better: bool = False
    rest: str = ""

    @property
    def times_floor(self) -> float | None:
        if self.floor is None:
            return None
        return self.floor / self.ours if self.more_is_better else self.ours / self.floor

    def meets(self, wanted: float) -> bool:
        """Whether ours is as good."""
        return self.ours >= wanted if self.more_is_better else self.ours <= wanted


# by kind: its name with the unit, and the names of the further columns
HEADS = {
    "start": ("start-up, s", ""),
    "prefill": ("prefill, ms", f" {'tok/s':>8} {'TFLOP/s':>7}"),
    "latency": ("latency, ms", f" {'tok/s':>8} {'TFLOP/s':>7} {'TB/s':>5}"),
    "throughput": (
        "throughput, tok/s",
        f" {'req/s':>8} {'in/s':>8} {'out/s':>8} {'TFLOP/s':>7}",
    ),
    "decode": ("TPOT, ms", f" {'tok/s':>8} {'TFLOP/s':>7} {'TB/s':>5}"),
}


def lines(ladder: Ladder) -> list[Line]:
    """All lines, part by part."""
    found = start_lines(ladder)
    for kind in ("prefill", "latency", "throughput", "decode"):
        found += [line(ladder, kind, row) for row in getattr(ladder, kind)]
    return found


def start_lines(ladder: Ladder) -> list[Line]:
    start = ladder.start_up
    return [
        Line(
            kind="start",
            name=name,
            ours=seconds,
            figure=figure if ladder.peer else None,
            digits=2,
        )
        for name, seconds, figure in (
            ("own imports", start.own_imports_s, peer_vllm.IMPORTS_S),
            ("engine ready", start.ready_s, peer_vllm.READY_S),
        )
    ]


def line(ladder: Ladder, kind: str, row: TimeRow | DecodeRow) -> Line:
    """The line of one row of this kind."""
    if isinstance(row, DecodeRow):
        return _decode(ladder, row)
    return {"prefill": _prefill, "latency": _latency, "throughput": _throughput}[kind](ladder, row)


def tpot_figure(ladder: Ladder, row: DecodeRow) -> Figure | None:
    """The peer's milliseconds per token, if its figures belong here."""
    return peer_vllm.TPOT_MS.get((row.batch, row.context)) if ladder.peer else None


def _prefill(ladder: Ladder, row: TimeRow) -> Line:
    rates = ladder.prefill_rates(row)
    figure = peer_vllm.PREFILL_MS.get((row.batch, row.input_len))
    return Line(
        kind="prefill",
        name=f"{row.batch} x {row.input_len}",
        ours=row.time_s * 1e3,
        floor=row.floor_s * 1e3,
        figure=figure if ladder.peer else None,
        digits=1,
        rest=f" {rates['tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}",
    )


def _latency(ladder: Ladder, row: TimeRow) -> Line:
    rates = ladder.batch_rates(row)
    figure = peer_vllm.LATENCY_MS.get((row.batch, row.input_len, row.output_len))
    return Line(
        kind="latency",
        name=f"{row.batch} x {row.input_len} + {row.output_len}",
        ours=row.time_s * 1e3,
        floor=row.floor_s * 1e3,
        figure=figure if ladder.peer else None,
        digits=1,
        rest=f" {rates['output_tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}"
        f" {rates['tb_per_s']:5.2f}",
    )


def _throughput(ladder: Ladder, row: TimeRow) -> Line:
    """Of the tokens that the peer's figure counts: all, or those of the output."""
    key = (row.batch, row.input_len, row.output_len)
    of_output = key in peer_vllm.OUTPUT_TOKENS_PER_S
    table = peer_vllm.OUTPUT_TOKENS_PER_S if of_output else peer_vllm.TOTAL_TOKENS_PER_S
    rates = ladder.request_rates(row)
    ours = rates["output_tokens_per_s" if of_output else "total_tokens_per_s"]
    return Line(
        kind="throughput",
        name=f"{row.batch}x{row.input_len}+{row.output_len} {'output' if of_output else 'total'}",
        ours=ours,
        floor=ours * rates["times_floor"],
        figure=table.get(key) if ladder.peer else None,
        digits=0,
        more_is_better=True,
        rest=f" {rates['requests_per_s']:8.2f} {rates['input_tokens_per_s']:8.0f}"
        f" {rates['output_tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}",
    )


def _decode(ladder: Ladder, row: DecodeRow) -> Line:
    rates = ladder.decode_rates(row)
    # the difference of two long times is only as good as both
    note = "  one round" if len(row.long_s) < 2 else ""
    return Line(
        kind="decode",
        name=f"{row.batch} @ {row.context}",
        ours=row.tpot_s * 1e3,
        floor=row.floor_s * 1e3,
        figure=tpot_figure(ladder, row),
        digits=3,
        rest=f" {rates['tokens_per_s']:8.0f} {rates['tflop_per_s']:7.0f}"
        f" {rates['tb_per_s']:5.2f}{note}",
    )
