"""Products of few rows with a large weight, at the speed at which the weight can be read.

The weight streams through shared memory by TMA, tens of KB ahead of its use, and its rows are the
rows of the matrix unit's tile (few rows of `x` would leave most of that empty). A kernel may start
before the one before it has ended, and then fills its buffers with weights while it waits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.stream_tiles import StreamTiles


@gluon.jit
def _load_weight(w, s_w, s_u, full, slot, row, k, N, pred, GATED: gl.constexpr):
    tma.async_copy_global_to_shared(w, [row, k], full.index(slot), s_w.index(slot), pred=pred)
    if GATED:
        tma.async_copy_global_to_shared(
            w, [N + row, k], full.index(slot), s_u.index(slot), pred=pred
        )


@gluon.jit
def _scaled(b_y, x_scale, w_scale, o_m, o_n, M, N):
    b_x_scale = gl.load(x_scale + o_m, mask=o_m < M, other=0.0)
    b_w_scale = gl.load(w_scale + o_n, mask=o_n < N, other=0.0)
    return b_y * b_x_scale[None, :] * b_w_scale[:, None]


@gluon.jit
def _stored(out, b_y, bias, row, i_s, M, N, BM: gl.constexpr, BN: gl.constexpr):
    """`b_y`, `[BN, BM]`, transposed to part `i_s` of `out`."""
    # neighbours in a row of out are neighbours in a warp
    wide: gl.constexpr = gl.BlockedLayout(
        [2 if BN < 128 else 4, 1], [32, 1], [1, gl.num_warps()], [0, 1]
    )
    b_y = gl.convert_layout(b_y, wide)
    o_n = row + gl.arange(0, BN, gl.SliceLayout(1, wide))
    o_m = gl.arange(0, BM, gl.SliceLayout(0, wide))
    if bias is not None:
        b_y += gl.load(bias + o_n, mask=o_n < N, other=0.0).to(gl.float32)[:, None]
    mask = (o_n < N)[:, None] & (o_m < M)[None, :]
    p_out = out + i_s * M * N + o_m[None, :] * N + o_n[:, None]
    gl.store(p_out, b_y.to(out.dtype.element_ty), mask=mask)


@gluon.jit(do_not_specialize=["M", "blocks_per_split"])
def _streamed_linear_kernel(
    w,
    x,
    w_scale,
    x_scale,
    bias,
    out,
    M,
    N,
    K,
    blocks_per_split,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
    LAG: gl.constexpr,
    EARLY: gl.constexpr,
):
    i_n, i_s = gl.program_id(0), gl.program_id(1)
    row = i_n * BN
    first = i_s * blocks_per_split
    count = gl.minimum(blocks_per_split, (K + BK - 1) // BK - first)
    halves: gl.constexpr = 2 if GATED else 1
    stage_bytes: gl.constexpr = (halves * BN + BM) * BK * w.dtype.primitive_bitwidth // 8
    s_x = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    s_w = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout)
    s_u = gl.allocate_shared_memory(w.dtype, [STAGES, BN, BK], w.layout) if GATED else s_w
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    if EARLY:
        let_next_kernel_start()
    for s in gl.static_range(STAGES):
        mbarrier.expect(full.index(s), stage_bytes, pred=s < count)
        _load_weight(w, s_w, s_u, full, s, row, (first + s) * BK, N, s < count, GATED)
    if EARLY:
        wait_for_earlier_kernels()
    for s in gl.static_range(STAGES):
        k = (first + s) * BK
        tma.async_copy_global_to_shared(x, [0, k], full.index(s), s_x.index(s), pred=s < count)

    depth: gl.constexpr = 256 // w.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BM, depth])
    # [BN, BM]
    b_y = gl.zeros([BN, BM], gl.float32, layout)
    b_u = gl.zeros([BN, BM], gl.float32, layout)
    for i in range(count):
        slot = i % STAGES
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        s_xt = s_x.index(slot).permute((1, 0))
        b_y = warpgroup_mma(s_w.index(slot), s_xt, b_y, is_async=True)
        if GATED:
            b_u = warpgroup_mma(s_u.index(slot), s_xt, b_u, is_async=True)
        b_y, b_u = warpgroup_mma_wait(halves * LAG, deps=[b_y, b_u])
        # the product LAG turns ago is done by now in every warp: its slot is free
        gl.thread_barrier()
        done = i - LAG
        more = (done >= 0) & (done + STAGES < count)
        free = (done + STAGES) % STAGES
        k = (first + done + STAGES) * BK
        mbarrier.expect(full.index(free), stage_bytes, pred=more)
        _load_weight(w, s_w, s_u, full, free, row, k, N, more, GATED)
        tma.async_copy_global_to_shared(x, [0, k], full.index(free), s_x.index(free), pred=more)
    b_y, b_u = warpgroup_mma_wait(0, deps=[b_y, b_u])
    for s in gl.static_range(STAGES):
        mbarrier.invalidate(full.index(s))

    if w_scale is not None:
        o_m = gl.arange(0, BM, gl.SliceLayout(0, layout))
        o_n = row + gl.arange(0, BN, gl.SliceLayout(1, layout))
        b_y = _scaled(b_y, x_scale, w_scale, o_m, o_n, M, N)
        if GATED:
            b_u = _scaled(b_u, x_scale, w_scale + N, o_m, o_n, M, N)
    if GATED:
        b_y = b_y / (1.0 + gl.exp(-b_y)) * b_u
    _stored(out, b_y, bias, row, i_s, M, N, BM, BN)


def streamed_linear(
    x: Tensor,
    weight: Tensor,
    tiles: StreamTiles,
    *,
    bias: Tensor | None = None,
    w_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`, its halves combined as `silu(first) * second` where `gated`.

    Args:
        x: `[M, K]`, M at most `tiles.rows`; weight: `[N, K]`; contiguous, both bfloat16 or both
            e4m3.
        tiles: how it is cut.
        bias: `[N]`; not with parts.
        w_scale, x_scale: `[N]` and `[M]` float32, what the products are multiplied by.
        gated: N is twice the result's.
        out: where to write, contiguous, of any dtype.

    Returns:
        `[M, N]`, or of `tiles.splits` > 1 the float32 parts whose sum that is, `[splits, M, N]`.
    """
    num_rows, size = x.shape
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    splits = tiles.splits
    shape = (num_rows, width) if splits == 1 else (splits, num_rows, width)
    if out is None:
        dtype = torch.float32 if splits > 1 else x.dtype
        out = torch.empty(shape, dtype=dtype, device=x.device)
    # plain arithmetic: a step has many launches
    blocks = -(-size // tiles.columns)
    grid = (-(-width // tiles.weight_rows), splits)
    _streamed_linear_kernel[grid](
        _described(weight, tiles.weight_rows, tiles.columns),
        _described(x, tiles.rows, tiles.columns),
        w_scale,
        x_scale,
        bias,
        out,
        num_rows,
        width,
        size,
        -(-blocks // splits),
        BM=tiles.rows,
        BN=tiles.weight_rows,
        BK=tiles.columns,
        STAGES=tiles.stages,
        GATED=gated,
        LAG=tiles.lag,
        num_warps=tiles.warps,
        **early_start(x.device),
    )
    return out


def _described(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = _layout(rows, columns, tensor.dtype)
    return TensorDescriptor(tensor, tensor.shape, tensor.stride(), [rows, columns], layout)


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    element = gl.bfloat16 if dtype == torch.bfloat16 else gl.float8e4nv
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
