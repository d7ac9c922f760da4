"""Matrices of eight-bit floats with scales, and the plain-torch meaning of the ops on them.

The type is e4m3: 4 bits of exponent, 3 of mantissa, no infinity, at most 448.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diptych.kernels.reference import add_rms_norm, rms_norm, silu_mul

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# rows and columns that share a scale, in the field's tiled checkpoints
TILE = 128
# a row of zeros has a scale too
_LEAST_SCALE = 1e-12


class Fp8Tensor(NamedTuple):
    """`values * scale`.

    Attributes:
        values: `[R, K]` e4m3.
        scale: float32, `[R, 1]` for one a row, `[R, ceil(K / TILE)]` for one a row and TILE
            columns, `[ceil(R / TILE), ceil(K / TILE)]` for one a square.
    """

    values: Tensor
    scale: Tensor

    @property
    def is_tiled(self) -> bool:
        """Whether the scales of a weight are of squares; where rows are few, both are the same."""
        return self.scale.shape[0] != self.values.shape[0] or self.scale.shape[1] != 1


# rows as a matrix takes them
Rows = Tensor | Fp8Tensor


def quantise_rows(x: Tensor, tile: int = 0) -> Fp8Tensor:
    """`x`, `[T, K]`, in e4m3: each row's, or each `tile` columns', greatest number becomes 448."""
    rows, columns = x.shape
    width = tile or columns
    padded = x.float()
    if columns % width:
        padded = torch.nn.functional.pad(padded, (0, -columns % width))
    parts = padded.view(rows, padded.shape[1] // width, width)
    # not divided: a GPU divides by a number in its own way
    scale = (parts.abs().amax(-1) * (1.0 / E4M3_MAX)).clamp(min=_LEAST_SCALE)
    values = (parts / scale[..., None]).to(E4M3)
    return Fp8Tensor(values.view(padded.shape)[:, :columns].contiguous(), scale)


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, tile: int = 0) -> Fp8Tensor:
    """`quantise_rows(rms_norm(x, weight, eps), tile)` for x = `[T, N]`."""
    return quantise_rows(rms_norm(x, weight, eps), tile)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tile: int = 0
) -> tuple[Fp8Tensor, Tensor]:
    """`add_rms_norm`, the first of the pair as `quantise_rows` gives it."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return quantise_rows(normed, tile), total


def dequantise(x: Fp8Tensor) -> Tensor:
    """`[R, K]` float32."""
    (rows, columns), scale = x.values.shape, x.scale
    if scale.shape[0] != rows:
        scale = scale.repeat_interleave(TILE, 0)[:rows]
    if scale.shape[1] != 1:
        scale = scale.repeat_interleave(TILE, 1)[:, :columns]
    return x.values.float() * scale


def fp8_linear(
    x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`, summed in float32.

    Args:
        x: `[T, K]`, scales by row, or by row and TILE columns where the weight's are tiled.
        weight: `[N, K]`, scales by row, or by square of TILE.
        dtype: of the result; bias: `[N]`.

    Returns:
        `[T, N]`.
    """
    y = torch.nn.functional.linear(dequantise(x), dequantise(weight))
    return (y if bias is None else y + bias.float()).to(dtype)


def fp8_gated_linear(
    x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, tile: int | None = None
) -> Rows:
    """`silu_mul(fp8_linear(x, weight, dtype))` for weight = `[2N, K]` = (gate, up).

    Args:
        tile: of `quantise_rows`, which the result has then gone through; None leaves it in `dtype`.
    """
    y = silu_mul(fp8_linear(x, weight, dtype))
    return y if tile is None else quantise_rows(y, tile)


def fp8_linear_parts(x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """`fp8_linear` without a bias, or float32 parts of it, as `reference.linear_parts`."""
    return fp8_linear(x, weight, dtype)
