"""A ladder on the screen, one line a row, or as a table in Markdown."""

from __future__ import annotations

import textwrap

from diptych.bench import peer_vllm
from diptych.bench.ladder_lines import HEADS, Line, line, lines, start_lines
from diptych.bench.ladder_record import Ladder
from diptych.bench.offline import say

_COLUMNS = f"{'ours':>8} {'peer':>8} {'goal':>8} {'floor':>8} {'/floor':>7}"


def show(ladder: Ladder) -> None:
    """The whole table."""
    _say_peer(ladder)
    _say_lines(lines(ladder))
    show_end(ladder)


def show_start(ladder: Ladder) -> None:
    """What is known before the first row."""
    _say_peer(ladder)
    _say_lines(start_lines(ladder))


def show_last(ladder: Ladder, kind: str) -> None:
    """The row of this kind that was measured last."""
    rows = getattr(ladder, kind)
    if len(rows) == 1:
        _say_head(kind)
    _say_line(line(ladder, kind, rows[-1]))


def show_end(ladder: Ladder) -> None:
    """What all rows together say."""
    measured = ladder.saturation()
    most = max((row.batch for row in ladder.decode), default=0)
    found = f"above {most}" if measured is None else f"{measured:.0f}"
    say(f"saturation batch {found}, predicted {ladder.roofline.saturation_batch:.0f}")
    wanted = {f"{one.kind} {one.name}": (one, one.figure) for one in lines(ladder) if one.figure}
    if wanted:
        missed = [name for name, (one, figure) in wanted.items() if not one.meets(figure.goal)]
        far = sum(one.meets(figure.stretch) for one, figure in wanted.values())
        say(f"goals met: {len(wanted) - len(missed)} of {len(wanted)}, beyond them: {far}")
        if missed:
            say(textwrap.fill(f"missed: {', '.join(missed)}", 80))


def show_markdown(ladder: Ladder) -> None:
    """The table for a document."""
    say("| | ours | peer | goal | floor |\n|---|---|---|---|---|")
    for one in lines(ladder):
        peer, goal, _ = one.figure or (None, None, None)
        cells = (f"{v:,.{one.digits}f}" if v else "" for v in (one.ours, peer, goal, one.floor))
        say(f"| {HEADS[one.kind][0]}: {one.name} | {' | '.join(cells)} |")


def _say_peer(ladder: Ladder) -> None:
    if ladder.peer:
        say(f"peer: {peer_vllm.NAME}, the same shape on one {peer_vllm.DEVICE}")


def _say_lines(found: list[Line]) -> None:
    for before, one in zip([None, *found], found, strict=False):
        if before is None or before.kind != one.kind:
            _say_head(one.kind)
        _say_line(one)


def _say_head(kind: str) -> None:
    name, rest = HEADS[kind]
    say(f"{name:20} {_COLUMNS}{rest}")


def _say_line(one: Line) -> None:
    peer, goal, _ = one.figure or (None, None, None)
    cells = " ".join(_cell(value, one.digits) for value in (one.ours, peer, goal, one.floor))
    say(f"{one.name:20} {cells} {_cell(one.times_floor, 2, 7)}{one.rest}")


def _cell(value: float | None, digits: int, width: int = 8) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
