"""A model's matrices, each in the form that is fastest for its device and type."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from diptych.kernels.dispatch import Ops
from diptych.kernels.fp8_tensor import Rows

# the order made for this many rows serves 1 and hundreds as well; the one made for 1 row is up to
# half as fast for 2 to 16
_ROWS_HINT = 16


class Matrix(Protocol):
    """One weight matrix, ready to be applied.

    Attributes:
        tile: of `quantise_rows`, which its inputs are to go through; None: they stay as they are.
    """

    @property
    def tile(self) -> int | None: ...

    def __call__(self, x: Rows) -> Tensor:
        """`[T, K]` to `[T, N]`: `x @ weight.T + bias`."""
        ...

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        """The same, or float32 parts of it, `[S, T, N]`, for `Norm.add` to add to `residual`,
        `[T, N]`; or None, where it has been added, in place."""
        ...

    def gated(self, x: Rows, tile: int | None) -> Rows:
        """`[T, K]` to `[T, N / 2]`: silu of the first half, times the second.

        Args:
            tile: of the matrix that takes it.
        """
        ...


class PlainMatrix:
    """The weight as it lies, `[N, K]`."""

    tile = None

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Rows) -> Tensor:
        return self._ops.linear(_plain(x), self._weight, self._bias)

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """Write to `out`, `[T, N]`, contiguous, which may be of another dtype; return it."""
        return self._ops.linear(x, self._weight, self._bias, out)

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        if self._bias is not None:
            return self(x)
        return self._ops.linear_onto(_plain(x), self._weight, residual)

    def gated(self, x: Rows, tile: int | None) -> Rows:
        if self._bias is None:
            y = self._ops.gated_linear(_plain(x), self._weight)
        else:
            y = self._ops.silu_mul(self(x))
        return y if tile is None else self._ops.quantise_rows(y, tile)


class PackedMatrix:
    """The weight in oneDNN's blocked order, packed once: about twice as fast for few tokens, and
    for many. The plain weight is not kept."""

    tile = None

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Rows) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(
            _plain(x), self._packed, self._bias, "none", [], ""
        )
        return y

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        return out.copy_(self(x))

    def onto(self, residual: Tensor, x: Rows) -> Tensor | None:
        return self(x)

    def gated(self, x: Rows, tile: int | None) -> Rows:
        y = self._ops.silu_mul(self(x))
        return y if tile is None else self._ops.quantise_rows(y, tile)


def make_matrix(ops: Ops, weight: Tensor, bias: Tensor | None = None) -> PlainMatrix | PackedMatrix:
    """The matrix of `weight`, `[N, K]`: packed for float32 on CPUs where torch has oneDNN."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_packing():
        return PackedMatrix(ops, weight, bias)
    return PlainMatrix(ops, weight, bias)


def _plain(x: Rows) -> Tensor:
    assert isinstance(x, Tensor)
    return x


@functools.cache
def _has_packing() -> bool:
    """Whether this torch has oneDNN, and the ops, which are private to it, under these names."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return available and all(hasattr(torch.ops.mkldnn, name) for name in names)
