"""Checksums of KV by ranges of tokens, equal on both sides however their blocks are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from diptych.connectors.plan_geometry import HEAD_OUTERMOST, PoolGeometry


class Checksums(Protocol):
    """Of one side's pool."""

    def of(self, block_ids: Sequence[int], start: int, end: int) -> int:
        """Of tokens [start, end), which lie in `block_ids` from position 0 on."""
        ...


class HostChecksums:
    """xxh3-64 over `[kv_head, layer, 2, tokens, head_dim]` of a pool in host memory."""

    def __init__(self, pool: NDArray[np.uint8], geometry: PoolGeometry) -> None:
        """`pool` is `[num_bytes]`, of our own layout."""
        assert geometry.axes == HEAD_OUTERMOST
        self._block_size = geometry.block_size
        shape = (
            geometry.num_blocks,
            len(geometry.heads),
            len(geometry.layers),
            geometry.parts,
            geometry.block_size,
            geometry.atom_bytes,
        )
        start = geometry.offset_bytes
        self._blocks = pool[start : start + geometry.num_bytes].reshape(shape)

    def of(self, block_ids: Sequence[int], start: int, end: int) -> int:
        parts = []
        at = start
        while at < end:
            slot = at % self._block_size
            count = min(end - at, self._block_size - slot)
            block = self._blocks[block_ids[at // self._block_size]]
            parts.append(block[:, :, :, slot : slot + count])
            at += count
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=3)
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(whole).data)
