"""How the C allocator of an engine process treats freed memory."""

from __future__ import annotations

import ctypes
import logging

logger = logging.getLogger(__name__)

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# the most that glibc accepts; larger tensors come from mmap
MMAP_THRESHOLD = 32 << 20
TRIM_THRESHOLD = 512 << 20


def keep_freed_memory() -> bool:
    """Let freed tensors stay with the process instead of going back to the system; idempotent.

    By default glibc gives the top of the heap back, so that a tensor of a megabyte may cost more in
    page faults at each call than the arithmetic on it (gathering the KV of 8 sequences: 1.3 ms
    instead of 0.07 ms). Memory in use does not grow; what was used once is kept for reuse.

    Returns:
        Whether the allocator took it; other C libraries than glibc do not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        logger.debug("this C library has no mallopt")
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
    )
