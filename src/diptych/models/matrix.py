"""A model's matrices, each in the form that is fastest for its device and type."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor

from diptych.kernels.dispatch import Ops

# the order made for this many rows serves 1 and hundreds as well; the one made for 1 row is up to
# half as fast for 2 to 16
_ROWS_HINT = 16


class Matrix(Protocol):
    """One weight matrix, ready to be applied."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, K]` to `[T, N]`: `x @ weight.T + bias`."""
        ...

    def in_parts(self, x: Tensor) -> Tensor:
        """The same, or float32 parts of it, `[S, T, N]`, for `Ops.add_rms_norm` to sum."""
        ...

    def gated(self, x: Tensor) -> Tensor:
        """`[T, K]` to `[T, N / 2]`: silu of the first half, times the second."""
        ...


class PlainMatrix:
    """The weight as it lies, `[N, K]`."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias)

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        """Write to `out`, `[T, N]`, contiguous, which may be of another dtype; return it."""
        return self._ops.linear(x, self._weight, self._bias, out)

    def in_parts(self, x: Tensor) -> Tensor:
        return self._ops.linear_parts(x, self._weight) if self._bias is None else self(x)

    def gated(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return self._ops.gated_linear(x, self._weight)
        return self._ops.silu_mul(self(x))


class PackedMatrix:
    """The weight in oneDNN's blocked order, packed once: about twice as fast for few tokens, and
    for many. The plain weight is not kept."""

    def __init__(self, ops: Ops, weight: Tensor, bias: Tensor | None = None) -> None:
        self._ops = ops
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y

    def into(self, out: Tensor, x: Tensor) -> Tensor:
        return out.copy_(self(x))

    def in_parts(self, x: Tensor) -> Tensor:
        return self(x)

    def gated(self, x: Tensor) -> Tensor:
        return self._ops.silu_mul(self(x))


def make_matrix(ops: Ops, weight: Tensor, bias: Tensor | None = None) -> PlainMatrix | PackedMatrix:
    """The matrix of `weight`, `[N, K]`: packed for float32 on CPUs where torch has oneDNN."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_packing():
        return PackedMatrix(ops, weight, bias)
    return PlainMatrix(ops, weight, bias)


@functools.cache
def _has_packing() -> bool:
    """Whether this torch has oneDNN, and the ops, which are private to it, under these names."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return available and all(hasattr(torch.ops.mkldnn, name) for name in names)
