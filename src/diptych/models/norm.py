"""RMSNorm before a matrix."""

from __future__ import annotations

from torch import Tensor

from diptych.kernels.dispatch import Ops
from diptych.kernels.fp8_tensor import Rows


class Norm:
    """RMSNorm whose result is as the matrix after it takes it.

    Args:
        weight: `[N]`.
        tile: of that matrix.
    """

    def __init__(self, ops: Ops, weight: Tensor, eps: float, tile: int | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._eps = eps
        self._tile = tile

    def __call__(self, x: Tensor) -> Rows:
        """`[T, N]` to the same."""
        if self._tile is None:
            return self._ops.rms_norm(x, self._weight, self._eps)
        return self._ops.rms_norm_fp8(x, self._weight, self._eps, self._tile)

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Rows, Tensor]:
        """Of their sum, and the sum; x is what `Matrix.onto` gave."""
        if x is None:
            return self(residual), residual
        if self._tile is None:
            return self._ops.add_rms_norm(x, residual, self._weight, self._eps)
        return self._ops.add_rms_norm_fp8(x, residual, self._weight, self._eps, self._tile)
