"""Named points at which a test pauses this process, and steps of its wall clock. Off by default.

The environment variable `DIPTYCH_FAULT_POINTS`, read once, names a folder of this process (and its
engine) alone. A file there with a point's name arms the point: the first thread that reaches it
renames the file to `<name>.at` and goes on when that is gone, or after `MAX_PAUSE_S`. The file
`wall_step` holds seconds by which the wall clock is off. Without the variable `reach` does nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "DIPTYCH_FAULT_POINTS"
MAX_PAUSE_S = 60.0
_POLL_S = 0.005


class FaultPoints:
    """The points of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def reach(self, name: str) -> None:
        """Pause here if the point is armed. Blocks the thread, and so the loop that runs on it."""
        reached = self._folder / f"{name}.at"
        try:
            (self._folder / name).rename(reached)
        except OSError:
            return
        until = time.monotonic() + MAX_PAUSE_S
        while reached.exists() and time.monotonic() < until:
            time.sleep(_POLL_S)

    def wall_step_s(self) -> float:
        """Seconds by which the wall clock was stepped."""
        try:
            return float((self._folder / "wall_step").read_text())
        except (OSError, ValueError):
            return 0.0


def _no_point(name: str) -> None:
    return


def _no_step() -> float:
    return 0.0


_folder = os.environ.get(VARIABLE)
_points = FaultPoints(Path(_folder)) if _folder else None
reach = _points.reach if _points else _no_point
wall_step_s = _points.wall_step_s if _points else _no_step
