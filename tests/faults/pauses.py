"""Arming the fault points of processes (`diptych.fault_points`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

REACH_S = 120.0
# A point may be passed after the answer has ended: of who releases what was held for it.
AFTER_ANSWER_S = 3.0

Asked = TypeVar("Asked")


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
            if name := self._waiting():
                self._disarm()
                return name
            time.sleep(0.005)
        raise AssertionError(f"nobody reached {self._point} of {', '.join(self._folders)}")

    def reached_by(self, ask: Callable[[], Future[Asked]]) -> tuple[str, Future[Asked]]:
        """As `reached`, by a request, and what becomes of it. It is asked anew where it ended
        without: who gets no time to run for seconds is taken for lost, and it goes another way."""
        deadline = time.monotonic() + REACH_S
        while time.monotonic() < deadline:
            asked = ask()
            ended_at = None
            while ended_at is None or time.monotonic() - ended_at < AFTER_ANSWER_S:
                if time.monotonic() > deadline:
                    break
                if name := self._waiting():
                    self._disarm()
                    return name, asked
                if ended_at is None and asked.done():
                    ended_at = time.monotonic()
                time.sleep(0.005)
        raise AssertionError(f"nobody reached {self._point} of {', '.join(self._folders)}")

    def _waiting(self) -> str | None:
        at = f"{self._point}.at"
        return next((n for n, folder in self._folders.items() if (folder / at).exists()), None)

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
