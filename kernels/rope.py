"""Rotary position embedding of queries and keys in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x,
    out,
    stride_head,
    b_cos,
    b_sin,
    H: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    o_h, o_d = tl.arange(0, BH)[:, None], tl.arange(0, BD)[None, :]
    mask = (o_h < H) & (o_d < D // 2)
    # [BH, BD]
    b_x1 = tl.load(x + o_h * stride_head + o_d, mask=mask, other=0.0).to(tl.float32)
    b_x2 = tl.load(x + o_h * stride_head + o_d + D // 2, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + o_h * D + o_d, b_x1 * b_cos - b_x2 * b_sin, mask=mask)
    tl.store(out + o_h * D + o_d + D // 2, b_x2 * b_cos + b_x1 * b_sin, mask=mask)


@triton.jit
def _rope_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_table,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    BHQ: tl.constexpr,
    BHK: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    o_d = tl.arange(0, BD)[None, :]
    p_table = cos_sin + tl.load(positions + i_t).to(tl.int64) * stride_table
    # [1, BD]
    b_cos = tl.load(p_table + o_d, mask=o_d < D // 2, other=0.0).to(tl.float32)
    b_sin = tl.load(p_table + o_d + D // 2, mask=o_d < D // 2, other=0.0).to(tl.float32)
    p_q, p_k = q + i_t * stride_q_token, k + i_t * stride_k_token
    _rotate(p_q, q_out + i_t * HQ * D, stride_q_head, b_cos, b_sin, HQ, D, BHQ, BD)
    _rotate(p_k, k_out + i_t * HK * D, stride_k_head, b_cos, b_sin, HK, D, BHK, BD)


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys (the half-split, NeoX form).

    Args:
        q, k: `[T, H, D]` and `[T, H_kv, D]`, last axis contiguous.
        positions: `[T]` int64.
        cos_sin: `[max_position, D]` float32: D/2 cosines, then D/2 sines.

    Returns:
        The rotated pair, contiguous, in the inputs' dtypes.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    assert q.stride(2) == k.stride(2) == cos_sin.stride(1) == 1
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if num_tokens == 0:
        return q_out, k_out
    _rope_kernel[(num_tokens,)](
        q,
        k,
        q_out,
        k_out,
        positions,
        cos_sin,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin.stride(0),
        HQ=num_heads,
        HK=num_kv_heads,
        D=head_dim,
        BHQ=triton.next_power_of_2(num_heads),
        BHK=triton.next_power_of_2(num_kv_heads),
        BD=triton.next_power_of_2(head_dim // 2),
        num_warps=4,
    )
    return q_out, k_out
