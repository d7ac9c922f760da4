"""Products with a weight: by the streamed kernel for few rows, else by the device's library."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from diptych.kernels.silu_mul import silu_mul
from diptych.kernels.stream_check import can_stream
from diptych.kernels.stream_tiles import stream_tiles

# from here on the library adds to what it writes over at no cost
_MANY_ROWS = 512


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`; arguments as in `reference.linear`."""
    if can_stream(x, weight):
        return _streamed(x, weight, bias=bias, out=out)
    if out is None:
        return functional.linear(x, weight, bias)
    if bias is None and out.dtype == x.dtype:
        return torch.mm(x, weight.t(), out=out)
    return out.copy_(functional.linear(x, weight, bias))


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` in parts, as many as spread a short weight over the GPU."""
    if can_stream(x, weight):
        return _streamed(x, weight, parts=True)
    return functional.linear(x, weight)


def linear_onto(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
    """`linear_parts`, or None where the product has been added to `residual`: the library does that
    as it writes, which saves many rows from being written and read once more."""
    if len(x) < _MANY_ROWS:
        return linear_parts(x, weight)
    residual.addmm_(x, weight.t())
    return None


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_mul(linear(x, weight))`, without its intermediate where it streams."""
    if can_stream(x, weight):
        return _streamed(x, weight, gated=True)
    return silu_mul(functional.linear(x, weight))


def _streamed(
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    parts: bool = False,
    gated: bool = False,
) -> Tensor:
    # only here: another Triton may lack what it is written in
    from diptych.kernels.streamed_linear import streamed_linear

    tiles = stream_tiles(len(x), *weight.shape, parts=parts, gated=gated)
    return streamed_linear(x, weight, tiles, bias=bias, gated=gated, out=out)
