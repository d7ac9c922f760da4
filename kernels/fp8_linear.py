"""Rows times a weight, both of eight-bit floats with scales.

Scales by row: few rows go to the streamed kernel on Hopper, many to the library that torch has. A
plain Triton kernel takes the rest: scales of tiles, other GPUs, other types of the result. It takes
the weight as the tall operand of the matrix units, so that 64 of its rows by any number of tokens
are one instruction, and splits long rows over programs where whole ones are too few for the GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.fp8_tensor import TILE as TILE_COLUMNS
from diptych.kernels.fp8_tensor import Fp8Tensor, Rows
from diptych.kernels.quantise_rows import quantise_rows, silu_mul_fp8
from diptych.kernels.silu_mul import silu_mul
from diptych.kernels.stream_check import can_stream
from diptych.kernels.stream_tiles import stream_tiles

# more rows than this take other tiles, or go to the library
_FEW_ROWS = 64


class _Tiles(NamedTuple):
    """Rows of x, rows of the weight and columns of a program, its warps and stages."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["M"])
def _fp8_linear_kernel(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    STAGES: tl.constexpr,
):
    i_n, i_m, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_m, o_n = i_m * BM + tl.arange(0, BM), i_n * BN + tl.arange(0, BN)
    o_k = i_s * SPAN + tl.arange(0, BK)
    m_m, m_n = o_m < M, o_n < N
    COUNT: tl.constexpr = (K + BK - 1) // BK
    p_x = x + o_m[None, :].to(tl.int64) * K + o_k[:, None]
    p_w = weight + o_n[:, None].to(tl.int64) * K + o_k[None, :]
    # [BN, BM]
    b_acc = tl.zeros([BN, BM], tl.float32)
    for k in tl.range(0, SPAN, BK, num_stages=STAGES):
        m_k = o_k + k < K
        b_x = tl.load(p_x + k, mask=m_m[None, :] & m_k[:, None], other=0.0)
        b_w = tl.load(p_w + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        if TILE:
            i_k = i_s * (SPAN // BK) + k // BK
            b_ws = tl.load(weight_scale + (o_n // TILE) * COUNT + i_k, mask=m_n, other=0.0)
            b_xs = tl.load(x_scale + o_m * COUNT + i_k, mask=m_m, other=0.0)
            b_acc += tl.dot(b_w, b_x) * (b_ws[:, None] * b_xs[None, :])
        else:
            # the matrix units sum eight-bit products to 14 bits: their sums are taken over often
            b_acc = tl.dot(b_w, b_x, b_acc, max_num_imprecise_acc=BK)
    if not TILE:
        b_ws = tl.load(weight_scale + o_n, mask=m_n, other=0.0)
        b_xs = tl.load(x_scale + o_m, mask=m_m, other=0.0)
        b_acc = b_acc * (b_ws[:, None] * b_xs[None, :])
    if BIAS:
        b_acc += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
    p_out = out + (i_s * M + o_m[None, :]).to(tl.int64) * N + o_n[:, None]
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_m[None, :] & m_n[:, None])


def fp8_linear(
    x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`; arguments as in `fp8_tensor.fp8_linear`, all contiguous."""
    if _streams(x, weight):
        return _stream(x, weight, dtype, bias)
    if _is_for_torch(x, weight, dtype):
        y: Tensor = torch._scaled_mm(
            x.values,
            weight.values.t(),
            scale_a=x.scale,
            scale_b=weight.scale.t(),
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=True,
        )
        return y
    return _launch(x, weight, bias, dtype, 1)[0]


def fp8_linear_parts(x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """`fp8_linear` without a bias, or float32 parts of it, `[S, T, N]`."""
    if _streams(x, weight):
        return _stream(x, weight, dtype, parts=True)
    if _is_for_torch(x, weight, dtype):
        return fp8_linear(x, weight, dtype)
    splits = _num_splits(x.values.shape[0], *weight.values.shape)
    if splits == 1:
        return fp8_linear(x, weight, dtype)
    return _launch(x, weight, None, torch.float32, splits)


def fp8_gated_linear(
    x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype, tile: int | None = None
) -> Rows:
    """`silu_mul(fp8_linear(x, weight, dtype))`, rounded by `tile` if given."""
    if _streams(x, weight):
        y = _stream(x, weight, dtype, gated=True)
        return y if tile is None else quantise_rows(y, tile)
    y = fp8_linear(x, weight, dtype)
    return silu_mul(y) if tile is None else silu_mul_fp8(y, tile)


def _streams(x: Fp8Tensor, weight: Fp8Tensor) -> bool:
    return not weight.is_tiled and can_stream(x.values, weight.values)


def _stream(
    x: Fp8Tensor,
    weight: Fp8Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    parts: bool = False,
    gated: bool = False,
) -> Tensor:
    # only here: another Triton may lack what it is written in
    from diptych.kernels.streamed_linear import streamed_linear

    rows, (outputs, columns) = x.values.shape[0], weight.values.shape
    tiles = stream_tiles(rows, outputs, columns, parts, gated, fp8=True)
    out = None
    if tiles.splits == 1:
        width = outputs // 2 if gated else outputs
        out = torch.empty(rows, width, dtype=dtype, device=x.values.device)
    return streamed_linear(
        x.values,
        weight.values,
        tiles,
        bias=bias,
        w_scale=weight.scale,
        x_scale=x.scale,
        gated=gated,
        out=out,
    )


def _is_for_torch(x: Fp8Tensor, weight: Fp8Tensor, dtype: torch.dtype) -> bool:
    rows, (outputs, columns) = x.values.shape[0], weight.values.shape
    whole = outputs % 16 == 0 and columns % 16 == 0
    return rows > _FEW_ROWS and not weight.is_tiled and dtype == torch.bfloat16 and whole


def _num_splits(rows: int, outputs: int, columns: int) -> int:
    """Programs that share a row of the weight."""
    if rows > _FEW_ROWS or outputs >= 8192:
        return 1
    return 4 if columns >= 8192 else 2


def _tiles(rows: int, tiled: bool) -> _Tiles:
    if rows > _FEW_ROWS:
        return _Tiles(64, 128, 128, 8, 4)
    bm = max(16, triton.next_power_of_2(rows))
    return _Tiles(bm, 64, 128 if tiled else 256, 4, 4 if bm < 64 else 3)


def _launch(
    x: Fp8Tensor, weight: Fp8Tensor, bias: Tensor | None, dtype: torch.dtype, splits: int
) -> Tensor:
    """`[splits, T, N]`."""
    rows, columns = x.values.shape
    outputs = weight.values.shape[0]
    out = torch.empty(splits, rows, outputs, dtype=dtype, device=x.values.device)
    if rows == 0:
        return out
    tiles = _tiles(rows, weight.is_tiled)
    span = triton.cdiv(triton.cdiv(columns, splits), tiles.bk) * tiles.bk
    _fp8_linear_kernel[(triton.cdiv(outputs, tiles.bn), triton.cdiv(rows, tiles.bm), splits)](
        x.values,
        x.scale,
        weight.values,
        weight.scale,
        bias,
        out,
        rows,
        N=outputs,
        K=columns,
        SPAN=span,
        BM=tiles.bm,
        BN=tiles.bn,
        BK=tiles.bk,
        TILE=TILE_COLUMNS if weight.is_tiled else 0,
        BIAS=bias is not None,
        STAGES=tiles.stages,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
