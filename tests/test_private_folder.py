"""Folders of killed processes are removed by the next; those of others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from diptych.private_folder import make_private_folder

MAKE = (
    "import sys, time\nfrom diptych.private_folder import make_private_folder\n"
    "print(make_private_folder('diptych-x-', 4000), flush=True)\ntime.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def started() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", MAKE], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_process_leaves_nothing_for_long_and_a_living_one_keeps_its_folder() -> None:
    killed, gone = started()
    living, kept = started()
    with killed, living:
        (gone / "socket").touch()
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        assert gone.exists()
        ours = make_private_folder("diptych-x-", 4000)
        assert not gone.exists()
        assert kept.exists()
        assert ours.exists()
        make_private_folder("diptych-x-", 4000)
        assert ours.exists(), "this process lives"
        living.kill()


def test_what_names_no_owner_or_one_elsewhere_or_is_a_link_stays(temporary: Path) -> None:
    target = temporary / "elsewhere"
    for name, owner in (
        ("diptych-x-none", None),
        ("diptych-x-words", "not a pid"),
        ("diptych-x-container", "1999999 5 pid:[1]"),
        ("elsewhere", f"1999999 5 {os.readlink('/proc/self/ns/pid')}"),
    ):
        (temporary / name).mkdir()
        if owner is not None:
            (temporary / name / ".owner").write_text(owner)
    (temporary / "diptych-x-link").symlink_to(target)
    made = make_private_folder("diptych-x-", 4000)
    assert {path.name for path in temporary.iterdir()} == {
        "diptych-x-none",
        "diptych-x-words",
        "diptych-x-container",
        "diptych-x-link",
        "elsewhere",
        made.name,
    }


def test_a_reused_number_is_another_process(temporary: Path) -> None:
    folder = temporary / "diptych-x-old"
    folder.mkdir()
    (folder / ".owner").write_text(f"{os.getpid()} 1 {os.readlink('/proc/self/ns/pid')}")
    make_private_folder("diptych-x-", 4000)
    assert not folder.exists()


def test_a_long_temporary_path_is_avoided(temporary: Path) -> None:
    made = make_private_folder("diptych-x-", 10)
    assert made.parent == Path("/tmp")
    (made / ".owner").unlink()
    made.rmdir()
