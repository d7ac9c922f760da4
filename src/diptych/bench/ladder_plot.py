"""TPOT against batch as a picture, with the floor drawn. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diptych.bench import peer_vllm
from diptych.bench.ladder_lines import tpot_figure
from diptych.bench.ladder_record import DecodeRow, Ladder


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(ladder: Ladder, path: Path) -> None:
    """Write a PNG: a colour per context, our line, the peer's crosses, the floor dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    contexts = sorted({row.context for row in ladder.decode})
    for number, context in enumerate(contexts):
        rows = sorted((r for r in ladder.decode if r.context == context), key=lambda r: r.batch)
        _draw_context(axes, ladder, rows, f"C{number}")
    axes.set_xscale("log", base=2)
    batches = sorted({row.batch for row in ladder.decode})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms per output token")
    axes.set_title(f"{ladder.roofline.model.path.name} on {ladder.device_name}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def _draw_context(axes: Any, ladder: Ladder, rows: list[DecodeRow], colour: str) -> None:
    context, batches = rows[0].context, [row.batch for row in rows]
    ours = [row.tpot_s * 1e3 for row in rows]
    axes.plot(batches, ours, "o-", color=colour, label=f"context {context}")
    # the floor bends between the measured batches
    steps = sorted({2 ** (n / 8) for n in range(8 * 10 + 1) if batches[0] <= 2 ** (n / 8)})
    grid = [batches[0], *(b for b in steps if b < batches[-1]), batches[-1]]
    floor = [ladder.roofline.decode_s(b, context) * 1e3 for b in grid]
    marker = "--" if len(batches) > 1 else "_"
    axes.plot(grid, floor, marker, color=colour, alpha=0.7, label=f"floor, context {context}")
    peers = [(r.batch, f.peer) for r in rows if (f := tpot_figure(ladder, r)) is not None]
    if peers:
        label = f"{peer_vllm.NAME}, context {context}"
        axes.plot(*zip(*peers, strict=True), "x", color=colour, label=label)
