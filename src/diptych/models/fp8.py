"""Matrices of e4m3: loaded, or rounded while loaded, and applied to rows that are rounded too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.errors import ModelLoadError
from diptych.kernels.dispatch import Ops
from diptych.kernels.fp8_tensor import E4M3, TILE, Fp8Tensor, Rows, dequantise, quantise_rows
from diptych.models.fp8_scheme import Fp8Scheme
from diptych.models.loader import Weights
from diptych.models.matrix import Matrix, make_matrix


class Fp8Matrix:
    """The weight as it lies, for devices that multiply e4m3; results are of `dtype`."""

    def __init__(
        self, ops: Ops, weight: Fp8Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias
        self._dtype = dtype
        self.tile = TILE if weight.is_tiled else 0

    def __call__(self, x: Rows) -> Tensor:
        return self._ops.fp8_linear(self._rounded(x), self._weight, self._dtype, self._bias)

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        if self._bias is not None:
            return self(x)
        return self._ops.fp8_linear_parts(self._rounded(x), self._weight, self._dtype)

    def gated(self, x: Rows, tile: int | None) -> Rows:
        if self._bias is None:
            return self._ops.fp8_gated_linear(self._rounded(x), self._weight, self._dtype, tile)
        y = self._ops.silu_mul(self(x))
        return y if tile is None else self._ops.quantise_rows(y, tile)

    def _rounded(self, x: Rows) -> Fp8Tensor:
        return self._ops.quantise_rows(x, self.tile) if isinstance(x, Tensor) else x


class EmulatedFp8Matrix:
    """The same numbers for a CPU: what was rounded is multiplied as floats."""

    def __init__(
        self, ops: Ops, weight: Fp8Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._matrix = make_matrix(ops, dequantise(weight).to(dtype), bias)
        self._dtype = dtype
        self.tile = TILE if weight.is_tiled else 0

    def __call__(self, x: Rows) -> Tensor:
        return self._matrix(self._rounded(x))

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        return self._matrix.onto(residual, self._rounded(x))

    def gated(self, x: Rows, tile: int | None) -> Rows:
        return self._matrix.gated(self._rounded(x), tile)

    def _rounded(self, x: Rows) -> Tensor:
        rows = self._ops.quantise_rows(x, self.tile) if isinstance(x, Tensor) else x
        return dequantise(rows).to(self._dtype)


def make_fp8_matrix(ops: Ops, weight: Fp8Tensor, bias: Tensor | None, dtype: torch.dtype) -> Matrix:
    """The matrix of `weight`, `[N, K]`, for inputs of `dtype`."""
    if weight.values.device.type == "cpu":
        return EmulatedFp8Matrix(ops, weight, bias, dtype)
    return Fp8Matrix(ops, weight, bias, dtype)


def load_fp8(
    scheme: Fp8Scheme, weights: Weights, names: Sequence[str], rows: Sequence[int], columns: int
) -> Fp8Tensor:
    """The modules `names` of `rows[i]` rows each, one below the other; as they lie in the
    checkpoint, or rounded one after another."""
    values: list[Tensor] = []
    scales: list[Tensor] = []
    if scheme.tiled and any(count % TILE for count in rows[:-1]):
        raise ModelLoadError(f"{names[0]} has {rows[0]} rows, which squares of {TILE} do not fit")
    for name, count in zip(names, rows, strict=True):
        part = (_stored if scheme.stored else _rounded)(scheme, weights, name, count, columns)
        values.append(part.values)
        scales.append(part.scale)
    if len(values) == 1:
        return Fp8Tensor(values[0], scales[0])
    return Fp8Tensor(_joined(values), torch.cat(scales))


def _joined(values: list[Tensor]) -> Tensor:
    """`torch.cat`, which not every build has for e4m3."""
    return torch.cat([part.view(torch.uint8) for part in values]).view(E4M3)


def _rounded(scheme: Fp8Scheme, weights: Weights, name: str, rows: int, columns: int) -> Fp8Tensor:
    weight = weights.load([f"{name}.weight"], [rows], columns)
    return quantise_squares(weight) if scheme.tiled else quantise_rows(weight)


def quantise_squares(weight: Tensor) -> Fp8Tensor:
    """`weight`, `[N, K]`, in e4m3 with a scale for each square of TILE."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % TILE, 0, -rows % TILE))
    high, wide = padded.shape[0] // TILE, padded.shape[1] // TILE
    squares = padded.view(high, TILE, wide, TILE).transpose(1, 2).reshape(high * wide, -1)
    values, scale = quantise_rows(squares)
    values = values.view(high, wide, TILE, TILE).transpose(1, 2).reshape(padded.shape)
    return Fp8Tensor(values[:rows, :columns].contiguous(), scale.view(high, wide))


def _stored(scheme: Fp8Scheme, weights: Weights, name: str, rows: int, columns: int) -> Fp8Tensor:
    values = weights.load([f"{name}.weight"], [rows], columns, dtype=E4M3)
    if scheme.tiled:
        inverse = f"{name}.weight_scale_inv"
        scale_name = inverse if inverse in weights else f"{name}.weight_scale"
        high, wide = -(-rows // TILE), -(-columns // TILE)
        scale = weights.load([scale_name], [high], wide, dtype=torch.float32)
    else:
        scale_name = f"{name}.weight_scale"
        scale = _scale_of_rows(weights, scale_name, rows, values.device)
    if not bool(((scale >= 0) & scale.isfinite()).all()):
        raise ModelLoadError(f"tensor {scale_name} has scales that are negative or not finite")
    return Fp8Tensor(values, scale)


def _scale_of_rows(weights: Weights, name: str, rows: int, device: torch.device) -> Tensor:
    """`[rows, 1]`, from one number for all or one for each."""
    shape = weights.shape(name)
    if shape in ((), (1,)):
        return torch.full((rows, 1), weights.number(name), device=device)
    if math.prod(shape[1:]) != 1:
        raise ModelLoadError(f"tensor {name} has shape {shape}, not {(rows, 1)}")
    return weights.load([name], [rows], *shape[1:], dtype=torch.float32).view(rows, 1)
