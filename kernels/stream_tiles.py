"""Which products the streamed kernel computes, and in which tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diptych.kernels.fp8_tensor import E4M3

MOST_ROWS = 128
# a head's, more rows of which the library multiplies faster
_WIDE = 1 << 16
_WIDE_MOST_ROWS = 64
# a smaller weight is not worth it
_LEAST_WEIGHTS = 1 << 20
# columns of a part, at least
_LEAST_PART = 1024


@dataclass(frozen=True, slots=True)
class StreamTiles:
    """How a product is cut.

    Attributes:
        rows, weight_rows, columns: of a tile: rows of x and of the weight, columns of both.
        stages: tiles in shared memory.
        warps: of a program.
        splits: parts of the columns, each a program's.
        lag: products that may be under way when the next starts.
    """

    rows: int
    weight_rows: int
    columns: int
    stages: int
    warps: int
    splits: int = 1
    lag: int = 0


# by rows of x, the fastest within a step of 32 layers (docs/decisions/0008-streamed-linears.md)
_PLAIN = {
    8: StreamTiles(8, 64, 128, 6, 4),
    16: StreamTiles(16, 64, 256, 5, 4),
    32: StreamTiles(32, 64, 128, 9, 4, lag=1),
    64: StreamTiles(64, 64, 128, 6, 4, lag=1),
    128: StreamTiles(128, 64, 128, 4, 4, lag=1),
}
_SPLITS = {8: 4, 16: 2, 32: 2, 64: 2, 128: 2}
_GATED = {
    8: StreamTiles(8, 64, 128, 3, 4),
    16: StreamTiles(16, 64, 128, 3, 4),
    32: StreamTiles(32, 64, 128, 5, 4, lag=1),
    64: StreamTiles(64, 64, 128, 4, 4, lag=1),
    128: StreamTiles(128, 64, 64, 3, 4, lag=1),
}
_HEAD = {
    8: StreamTiles(8, 64, 128, 4, 4),
    16: StreamTiles(16, 64, 128, 3, 4),
    32: StreamTiles(32, 128, 128, 2, 8),
    64: StreamTiles(64, 128, 128, 2, 4),
}
# of e4m3: twice the columns, so that tiles have as many bytes
_FP8 = {
    8: StreamTiles(8, 64, 256, 6, 4),
    16: StreamTiles(16, 64, 256, 5, 4),
    32: StreamTiles(32, 64, 256, 9, 4, lag=1),
    64: StreamTiles(64, 64, 256, 6, 4, lag=1),
    128: StreamTiles(128, 64, 128, 9, 4, lag=1),
}
_FP8_SPLITS = {8: 4, 16: 4, 32: 2, 64: 2, 128: 2}
_FP8_GATED = {
    8: StreamTiles(8, 64, 256, 3, 4),
    16: StreamTiles(16, 64, 256, 3, 4),
    32: StreamTiles(32, 64, 256, 5, 4, lag=1),
    64: StreamTiles(64, 64, 256, 4, 4, lag=1),
    128: StreamTiles(128, 64, 128, 3, 4, lag=1),
}


def should_stream(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these where it runs, and is the faster way."""
    most = MOST_ROWS if len(weight) < _WIDE else min(MOST_ROWS, _WIDE_MOST_ROWS)
    return (
        1 <= len(x) <= most
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, E4M3)
        and weight.numel() >= _LEAST_WEIGHTS
        # addresses of rows are multiples of 16 bytes
        and weight.shape[1] * weight.itemsize % 16 == 0
        and x.is_contiguous()
        and weight.is_contiguous()
    )


@functools.cache
def stream_tiles(
    num_rows: int,
    width: int,
    size: int,
    parts: bool = False,
    gated: bool = False,
    fp8: bool = False,
) -> StreamTiles:
    """Tiles for `[num_rows, size] @ [width, size].T`; in parts of `size` only if `parts`."""
    rows = max(8, 1 << (num_rows - 1).bit_length())
    if fp8:
        splits = min(_FP8_SPLITS[rows], max(size // _LEAST_PART, 1)) if parts else 1
        return replace((_FP8_GATED if gated else _FP8)[rows], splits=splits)
    if gated:
        return _GATED[rows]
    if width >= _WIDE and rows in _HEAD:
        return _HEAD[rows]
    splits = min(_SPLITS[rows], max(size // _LEAST_PART, 1)) if parts else 1
    return replace(_PLAIN[rows], splits=splits)
