"""Arming the fault points of processes (`diptych.fault_points`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

REACH_S = 120.0


class Pause:
    """`with Pause(folders, point) as pause:` the first process to reach the point waits there.

    Args:
        folders: the folders of the processes that may be meant, by their names.
    """

    def __init__(self, folders: dict[str, Path], point: str) -> None:
        self._folders = folders
        self._point = point

    def __enter__(self) -> Self:
        for folder in self._folders.values():
            (folder / self._point).touch()
        return self

    def reached(self, timeout_s: float = REACH_S) -> str:
        """The name of the process that waits at the point; the others pass it from now on."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for name, folder in self._folders.items():
                if (folder / f"{self._point}.at").exists():
                    self._disarm()
                    return name
            time.sleep(0.005)
        raise AssertionError(f"nobody reached {self._point} of {', '.join(self._folders)}")

    def release(self) -> None:
        """Let it go on."""
        _remove(folder / f"{self._point}.at" for folder in self._folders.values())

    def _disarm(self) -> None:
        _remove(folder / self._point for folder in self._folders.values())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._disarm()
        self.release()


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
