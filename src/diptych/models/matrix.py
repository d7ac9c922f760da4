"""`x @ weight.T + bias` in the form that is fastest on the weight's device."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

# the order made for this many rows serves 1 and hundreds as well; the one made for 1 row is up to
# half as fast for 2 to 16
_ROWS_HINT = 16


class Matrix(Protocol):
    """One weight matrix, ready to be applied."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, K]` to `[T, N]`."""
        ...


class PlainMatrix:
    """The weight as it lies, `[N, K]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedMatrix:
    """The weight in oneDNN's blocked order, packed once: about twice as fast for few tokens, and
    for many. The plain weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return y


def make_matrix(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """The matrix of `weight`, `[N, K]`: packed for float32 on CPUs where torch has oneDNN."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _has_packing():
        return PackedMatrix(weight, bias)
    return PlainMatrix(weight, bias)


@functools.cache
def _has_packing() -> bool:
    """Whether this torch has oneDNN, and the ops, which are private to it, under these names."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return available and all(hasattr(torch.ops.mkldnn, name) for name in names)
