"""Whether products may stream on a device: it is of the kind, and a check at first use is right."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from diptych.kernels.fp8_tensor import E4M3, dequantise, quantise_rows
from diptych.kernels.stream_tiles import should_stream, stream_tiles

_log = logging.getLogger(__name__)

# rows, outputs and inputs that no tile divides; a tile's variants are compiled once for all sizes
_SHAPES = ((3, 1008, 1552), (17, 1008, 1552))
# of e4m3, compiled only where weights are
_FP8_SHAPES = ((17, 1008, 1552),)
_TOLERANCE = 1e-2


def can_stream(x: Tensor, weight: Tensor) -> bool:
    """Whether `streamed_linear` takes these, serves here, and is the faster way."""
    return should_stream(x, weight) and streams(x.device, x.dtype == E4M3)


@functools.cache
def streams(device: torch.device, fp8: bool = False) -> bool:
    """Whether `streamed_linear` serves here, for bfloat16 or e4m3. The first call on a GPU runs it,
    so it is not to be made in a capture."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        if fp8:
            worst = max(_fp8_difference(device, *shape) for shape in _FP8_SHAPES)
        else:
            worst = max(_difference(device, *shape) for shape in _SHAPES)
    # an experimental part of Triton may raise anything; the library multiplies as well
    except Exception as error:
        _log.warning("products of few rows do not stream: %s", error)
        return False
    # NaN is not below it
    if not worst < _TOLERANCE:
        _log.warning("products of few rows do not stream: they differ by %.3g", worst)
        return False
    return True


@torch.inference_mode()
def _difference(device: torch.device, rows: int, width: int, size: int) -> float:
    """From the library's product, relative."""
    from diptych.kernels.streamed_linear import streamed_linear

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, size, generator=generator, device=device).bfloat16()
    weight = torch.randn(width, size, generator=generator, device=device).bfloat16()
    out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device=device)
    streamed_linear(x, weight, stream_tiles(rows, width, size), out=out)
    exact = x.float() @ weight.float().T
    return float((out.float() - exact).norm() / exact.norm())


@torch.inference_mode()
def _fp8_difference(device: torch.device, rows: int, width: int, size: int) -> float:
    """From the exact product of the same rounded numbers, relative."""
    from diptych.kernels.streamed_linear import streamed_linear

    generator = torch.Generator(device).manual_seed(0)
    x, weight = (
        quantise_rows(torch.randn(count, size, generator=generator, device=device))
        for count in (rows, width)
    )
    out = torch.full((rows, width), torch.nan, dtype=torch.bfloat16, device=device)
    streamed_linear(
        x.values,
        weight.values,
        stream_tiles(rows, width, size, fp8=True),
        w_scale=weight.scale,
        x_scale=x.scale,
        out=out,
    )
    exact = dequantise(x) @ dequantise(weight).T
    return float((out.float() - exact).norm() / exact.norm())
