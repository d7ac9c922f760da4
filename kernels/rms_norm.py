"""RMSNorm, alone and with the residual addition before it; in the input's type or in e4m3."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.e4m3 import store_row
from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.fp8_tensor import Fp8Tensor
from diptych.kernels.quantise_rows import empty_rows


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    scale,
    total,
    eps,
    rows_inner,
    stride_x_outer,
    stride_x_inner,
    stride_residual,
    stride_part,
    N: tl.constexpr,
    BN: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    FP8: tl.constexpr = scale is not None
    KIND: tl.constexpr = weight.dtype.element_ty if FP8 else out.dtype.element_ty
    if EARLY:
        let_next_kernel_start()
    i_row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    mask = o_n < N
    p_x = x + (i_row // rows_inner) * stride_x_outer + (i_row % rows_inner) * stride_x_inner
    b_w = tl.load(weight + o_n, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        wait_for_earlier_kernels()
    # [BN]
    b_x = tl.load(p_x + o_n, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        b_x += tl.load(p_x + part * stride_part + o_n, mask=mask, other=0.0)
    if ADD:
        # parts are rounded together, as if stored and read again
        b_x = b_x.to(total.dtype.element_ty).to(tl.float32)
        b_residual = tl.load(residual + i_row * stride_residual + o_n, mask=mask, other=0.0)
        # rounded before it is squared, as if stored and read again
        b_total = (b_x + b_residual.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + i_row * N + o_n, b_total, mask=mask)
        b_x = b_total.to(tl.float32)
    b_norm = (b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / N + eps)).to(KIND)
    b_y = (b_norm.to(tl.float32) * b_w).to(KIND)
    if FP8:
        store_row(b_y.to(tl.float32), i_row, out, scale, N, BN, TILE)
    else:
        tl.store(out + i_row * N + o_n, b_y, mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis, computed in float32.

    Args:
        x: `[T, N]` or `[T, H, N]`, last axis contiguous.
        weight: `[N]`.
    """
    assert x.dim() in (2, 3)
    assert x.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows_inner = x.shape[1] if x.dim() == 3 else 1
    stride_inner = x.stride(1) if x.dim() == 3 else 0
    _launch(x, None, weight, out, None, eps, rows_inner, stride_inner)
    return out


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, tile: int = 0) -> Fp8Tensor:
    """`quantise_rows(rms_norm(x, weight, eps), tile)` for x = `[T, N]`, last axis contiguous."""
    assert x.dim() == 2
    assert x.stride(1) == 1
    out = empty_rows(x.shape[0], x.shape[1], tile, x.device)
    _launch(x, None, weight, out, None, eps, 1, 0, tile=tile)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`; both `[T, N]`, last axis contiguous.

    `x` may also be `[S, T, N]` float32, in parts to be summed.
    """
    out = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    return out, _launch_add(x, residual, weight, out, eps)


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, tile: int = 0
) -> tuple[Fp8Tensor, Tensor]:
    """`add_rms_norm`, the first of the pair as `quantise_rows` gives it."""
    out = empty_rows(residual.shape[0], residual.shape[1], tile, x.device)
    return out, _launch_add(x, residual, weight, out, eps, tile)


def _launch_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    out: Tensor | Fp8Tensor,
    eps: float,
    tile: int = 0,
) -> Tensor:
    """Fill `out`; the sum."""
    assert x.dim() in (2, 3)
    assert x.stride(-1) == residual.stride(1) == 1
    total = torch.empty(residual.shape, dtype=residual.dtype, device=x.device)
    parts = x[None] if x.dim() == 2 else x
    _launch(parts[0], residual, weight, out, total, eps, 1, 0, len(parts), parts.stride(0), tile)
    return total


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    out: Tensor | Fp8Tensor,
    total: Tensor | None,
    eps: float,
    rows_inner: int,
    stride_inner: int,
    num_parts: int = 1,
    stride_part: int = 0,
    tile: int = 0,
) -> None:
    size = x.shape[-1]
    rows = x.shape[0] * rows_inner
    if rows == 0:
        return
    block = max(triton.next_power_of_2(size), tile)
    values, scale = out if isinstance(out, Fp8Tensor) else (out, None)
    _rms_norm_kernel[(rows,)](
        x,
        residual,
        weight,
        values,
        scale,
        total,
        eps,
        rows_inner,
        x.stride(0),
        stride_inner,
        0 if residual is None else residual.stride(0),
        stride_part,
        N=size,
        BN=block,
        ADD=residual is not None,
        PARTS=num_parts,
        TILE=tile,
        num_warps=min(max(block // 512, 1), 16),
        **early_start(x.device),
    )
