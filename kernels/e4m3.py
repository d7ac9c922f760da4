"""What kernels share about eight-bit floats: to a cache, and a row with its scales."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_type_of(pointer, b_x, factor):
    """`b_x` as what `pointer` points at; times `factor`, saturated, if that is e4m3."""
    if pointer.dtype.element_ty == tl.float8e4nv:
        b_x = tl.clamp(b_x.to(tl.float32) * factor, -448.0, 448.0, tl.PropagateNan.ALL)
    return b_x.to(pointer.dtype.element_ty)


@triton.jit
def scaled(b_x, b_most):
    """`b_x` divided by its scale, and the scale, for `b_most` its greatest absolute number.

    The division is exact, so that the numbers are those of `fp8_tensor.quantise_rows`.
    """
    b_scale = tl.maximum(b_most * (1.0 / 448.0), 1e-12)
    return tl.math.div_rn(b_x, tl.broadcast_to(b_scale, b_x.shape)), b_scale


@triton.jit
def store_row(b_x, i_t, values, scale, K: tl.constexpr, BK: tl.constexpr, TILE: tl.constexpr):
    """Row `i_t`, float32 `[BK]`, zero from K on: as e4m3 into `values` `[T, K]`, and its scales,
    one or one for each TILE columns, into `scale`."""
    o_k = tl.arange(0, BK)
    if TILE == 0:
        b_x, b_scale = scaled(b_x, tl.max(tl.abs(b_x), 0))
        tl.store(scale + i_t, b_scale)
    else:
        COUNT: tl.constexpr = (K + TILE - 1) // TILE
        PARTS: tl.constexpr = BK // TILE
        b_x = tl.reshape(b_x, (PARTS, TILE))
        b_x, b_scale = scaled(b_x, tl.max(tl.abs(b_x), 1, keep_dims=True))
        o_part = tl.arange(0, PARTS)
        b_scale = tl.reshape(b_scale, (PARTS,))
        tl.store(scale + i_t * COUNT + o_part, b_scale, mask=o_part < COUNT)
        b_x = tl.reshape(b_x, (BK,))
    tl.store(values + i_t * K + o_k, b_x.to(values.dtype.element_ty), mask=o_k < K)
