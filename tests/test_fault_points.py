"""Fault points: off unless the environment names a folder; then a file pauses one thread, once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from diptych.fault_points import VARIABLE, FaultPoints


def until(path: Path, there: bool) -> None:
    deadline = time.monotonic() + 60
    while path.exists() is not there:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_armed_point_pauses_one_thread_until_its_file_is_gone(tmp_path: Path) -> None:
    points = FaultPoints(tmp_path)
    (tmp_path / "here").touch()
    threads = [threading.Thread(target=points.reach, args=("here",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(tmp_path / "here.at", there=True)
    until(tmp_path / "here", there=False)
    while sum(thread.is_alive() for thread in threads) > 1:
        time.sleep(0.005)
    time.sleep(0.05)
    assert sum(thread.is_alive() for thread in threads) == 1
    (tmp_path / "here.at").unlink()
    for thread in threads:
        thread.join(60)


def test_points_that_are_not_armed_pause_nobody(tmp_path: Path) -> None:
    points = FaultPoints(tmp_path)
    (tmp_path / "elsewhere").touch()
    points.reach("here")
    assert (tmp_path / "elsewhere").exists()


def test_the_wall_clock_of_a_process_is_stepped_by_its_file(tmp_path: Path) -> None:
    code = "import time; from diptych.clock import SystemClock; print(SystemClock().unix())"
    (tmp_path / "wall_step").write_text("-7200")
    environment = {**os.environ, VARIABLE: str(tmp_path)}
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True
    )
    assert abs(time.time() - 7200 - float(out.stdout)) < 60
    environment.pop(VARIABLE)
    out = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=True
    )
    assert abs(time.time() - float(out.stdout)) < 60
