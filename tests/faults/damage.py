"""Damage to KV where it lies."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

_BLOCK = 4096


def spoil_pool(pid: int, others: Iterable[int] = ()) -> int:
    """Flip a bit in every piece of a process's memory files that holds something; how many.

    Args:
        others: processes whose memory it may have mapped besides its own.

    Raises:
        FileNotFoundError: it has none yet.
    """
    foreign = {path.stat().st_ino for other in others for path in _memory_files(other)}
    own = {path.stat().st_ino: path for path in _memory_files(pid)}
    count = 0
    for path in (own[number] for number in own.keys() - foreign):
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
            for start in range(0, len(pool), _BLOCK):
                if any(pool[start : start + 64]):
                    pool[start + 8] ^= 1
                    count += 1
    if not count:
        raise FileNotFoundError(f"process {pid} has nothing in memory of its own")
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


def _memory_files(pid: int) -> list[Path]:
    return [
        path
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(path).startswith("/memfd:")
    ]
