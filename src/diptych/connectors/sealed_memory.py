"""Memory of another process: mapped only where its size is sealed.

Whoever maps a file that shrinks afterwards is killed (SIGBUS) by the next access. A memfd that is
sealed against it cannot shrink, whatever its owner does.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from diptych.errors import TransferError

# its size never changes, so whoever maps it cannot be hurt by a truncation
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def map_sealed(fd: int, num_bytes: int, what: str, access: int = mmap.ACCESS_WRITE) -> mmap.mmap:
    """The first `num_bytes` of a descriptor that came from another process.

    Args:
        what: names the memory in the error.
        access: of `mmap`; ACCESS_WRITE writes through to the owner's memory.

    Raises:
        TransferError: it is smaller than that, or not sealed at its size.
        OSError: it is no memfd, or cannot be mapped.
    """
    seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    if seals & SIZE_SEALS != SIZE_SEALS or not 0 < num_bytes <= os.fstat(fd).st_size:
        raise TransferError(f"{what} is not sealed at its size")
    return mmap.mmap(fd, num_bytes, access=access)
