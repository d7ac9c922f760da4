"""Damage to KV where it lies."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

_BLOCK = 4096


def spoil_pool(pid: int) -> int:
    """Flip a bit in every block of a store node's pool that holds something; how many."""
    count = 0
    with open(_pool_of(pid), "r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        for start in range(0, len(pool), _BLOCK):
            if any(pool[start : start + 64]):
                pool[start + 8] ^= 1
                count += 1
    return count


def spoil_files(folder: Path) -> int:
    """Flip a bit in the body of every object's file of a disk tier; how many."""
    count = 0
    for path in folder.glob("[0-9a-f][0-9a-f]/*"):
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
            at = _BLOCK + (path.stat().st_size - _BLOCK) // 8
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1]))
                count += 1
    return count


def _pool_of(pid: int) -> Path:
    """The largest memory file that a process has open.

    Raises:
        FileNotFoundError: it has none yet.
    """
    paths = [
        path
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path).startswith("/memfd:")
    ]
    if not paths:
        raise FileNotFoundError(f"process {pid} has no pool")
    return max(paths, key=lambda path: path.stat().st_size)
