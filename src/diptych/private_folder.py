"""Folders for sockets and files of one process, gone with it: what a killed one leaves, the next
one removes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

_OWNER = ".owner"


def make_private_folder(prefix: str, longest_path: int) -> Path:
    """A fresh folder, after those of the same prefix whose owners are dead were removed.

    Args:
        longest_path: of the folder, in bytes, so that a socket's name has room in it; where the
            temporary folder's is too long it is made under /tmp.
    """
    made = Path(tempfile.mkdtemp(prefix=prefix))
    if len(os.fsencode(made)) > longest_path:
        made.rmdir()
        made = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    (made / _OWNER).write_text(_owner(os.getpid()))
    _remove_orphans(made.parent, prefix)
    return made


def _remove_orphans(parent: Path, prefix: str) -> None:
    """Only real folders of this user that name an owner which is surely gone."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError, ValueError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            written = (folder / _OWNER).read_text()
            pid, _, _ = written.split()
            # a process of another container may have that number, and live
            if _namespace() in written.split() and _owner(int(pid)) != written:
                shutil.rmtree(folder, ignore_errors=True)


def _owner(pid: int) -> str:
    """A process for ever: its id, when it started, and among whom the id counts."""
    try:
        started = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        started = "gone"
    return f"{pid} {started} {_namespace()}"


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid")
