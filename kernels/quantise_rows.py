"""Rows to eight-bit floats with scales; alone, and for the gated activation of the MLP."""

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
from diptych.kernels.fp8_tensor import E4M3, Fp8Tensor


@triton.jit
def _quantise_rows_kernel(
    x,
    values,
    scale,
    stride_x,
    K: tl.constexpr,
    BK: tl.constexpr,
    TILE: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_t = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, BK)
    mask = o_k < K
    # [BK]
    b_x = tl.load(x + i_t * stride_x + o_k, mask=mask, other=0.0).to(tl.float32)
    if GATED:
        b_up = tl.load(x + i_t * stride_x + K + o_k, mask=mask, other=0.0).to(tl.float32)
        b_x = b_x / (1.0 + tl.exp(-b_x)) * b_up
        # rounded to the input's type first, as if stored and read again
        b_x = b_x.to(x.dtype.element_ty).to(tl.float32)
    store_row(b_x, i_t, values, scale, K, BK, TILE)


def quantise_rows(x: Tensor, tile: int = 0) -> Fp8Tensor:
    """`x`, `[T, K]`, last axis contiguous, in e4m3; as `fp8_tensor.quantise_rows`."""
    return _launch(x, x.shape[1], tile, gated=False)


def silu_mul_fp8(x: Tensor, tile: int = 0) -> Fp8Tensor:
    """`quantise_rows(silu_mul(x), tile)` for x = `[T, 2K]` = (gate, up), last axis contiguous."""
    return _launch(x, x.shape[1] // 2, tile, gated=True)


def empty_rows(rows: int, columns: int, tile: int, device: torch.device) -> Fp8Tensor:
    """Room for `[rows, columns]`."""
    count = triton.cdiv(columns, tile) if tile else 1
    return Fp8Tensor(
        torch.empty(rows, columns, dtype=E4M3, device=device),
        torch.empty(rows, count, dtype=torch.float32, device=device),
    )


def _launch(x: Tensor, columns: int, tile: int, *, gated: bool) -> Fp8Tensor:
    assert x.stride(1) == 1
    out = empty_rows(x.shape[0], columns, tile, x.device)
    if x.shape[0] == 0:
        return out
    block = max(triton.next_power_of_2(columns), tile)
    _quantise_rows_kernel[(x.shape[0],)](
        x,
        out.values,
        out.scale,
        x.stride(0),
        K=columns,
        BK=block,
        TILE=tile,
        GATED=gated,
        num_warps=min(max(block // 512, 1), 16),
        **early_start(x.device),
    )
    return out
