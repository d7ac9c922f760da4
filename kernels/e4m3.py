"""Eight-bit floats, e4m3: 4 bits of exponent, 3 of mantissa, no infinity, at most 448."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_type_of(pointer, b_x, factor):
    """`b_x` as what `pointer` points at; times `factor`, saturated, if that is e4m3."""
    if pointer.dtype.element_ty == tl.float8e4nv:
        b_x = tl.clamp(b_x.to(tl.float32) * factor, -448.0, 448.0, tl.PropagateNan.ALL)
    return b_x.to(pointer.dtype.element_ty)
