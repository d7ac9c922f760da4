"""xxh3-64, the checksum of stored objects, computed while other threads run."""

from __future__ import annotations

import xxhash


def xxh3_64(data: bytes | bytearray | memoryview) -> int:
    """xxh3-64 of the bytes, seed 0.

    The function of one call keeps the interpreter for as long as it takes in every xxhash before
    version 4: threads that hash megabytes would hash one after another, and the model's thread
    would wait for each. `update` never does.
    """
    digest = xxhash.xxh3_64()
    digest.update(data)
    return digest.intdigest()
