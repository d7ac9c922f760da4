"""From projected queries, keys and values to rotated queries and a written cache, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.e4m3 import in_type_of
from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)

_MANY_TOKENS = 256


@triton.jit
def _normed(b_x1, b_x2, weight, o_d, m_d, eps, D: tl.constexpr):
    """RMSNorm of each row, given as two halves; rounded where a stored result would be."""
    dtype = b_x1.dtype
    b_x1, b_x2 = b_x1.to(tl.float32), b_x2.to(tl.float32)
    # [BH, 1]
    b_r = tl.rsqrt((tl.sum(b_x1 * b_x1, 1) + tl.sum(b_x2 * b_x2, 1)) / D + eps)[:, None]
    b_w1 = tl.load(weight + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_w2 = tl.load(weight + o_d + D // 2, mask=m_d, other=0.0).to(tl.float32)
    b_x1 = (b_x1 * b_r).to(dtype).to(tl.float32) * b_w1
    b_x2 = (b_x2 * b_r).to(dtype).to(tl.float32) * b_w2
    return b_x1.to(dtype), b_x2.to(dtype)


@triton.jit
def _rotated(
    x, weight, eps, b_cos, b_sin, o_x, mask, o_d, m_d, D: tl.constexpr, NORM: tl.constexpr
):
    """Both halves of the heads at `x + o_x`, float32."""
    # [BH, BD]
    b_x1 = tl.load(x + o_x, mask=mask, other=0.0)
    b_x2 = tl.load(x + o_x + D // 2, mask=mask, other=0.0)
    if NORM:
        b_x1, b_x2 = _normed(b_x1, b_x2, weight, o_d, m_d, eps, D)
    b_x1, b_x2 = b_x1.to(tl.float32), b_x2.to(tl.float32)
    return b_x1 * b_cos - b_x2 * b_sin, b_x2 * b_cos + b_x1 * b_sin


@triton.jit
def _rope_store_kv_kernel(
    q,
    k,
    v,
    q_out,
    k_cache,
    v_cache,
    q_weight,
    k_weight,
    positions,
    cos_sin,
    slot_mapping,
    eps,
    k_factor,
    v_factor,
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_table,
    stride_block,
    stride_head,
    stride_slot,
    H: tl.constexpr,
    G: tl.constexpr,
    KH: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BG: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_t, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    # KH key heads are a program's, and KH * G query heads
    o_g, o_h = tl.arange(0, BG)[:, None], tl.arange(0, BH)[:, None]
    o_d = tl.arange(0, BD)[None, :]
    m_d = o_d < D // 2
    p_table = cos_sin + tl.load(positions + i_t).to(tl.int64) * stride_table
    # [1, BD]
    b_cos = tl.load(p_table + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_sin = tl.load(p_table + o_d + D // 2, mask=m_d, other=0.0).to(tl.float32)

    # [BG, BD]
    mask = (o_g < KH * G) & m_d
    o_head = i_h * KH * G + o_g
    o_q = i_t * stride_q_token + o_head * stride_q_head + o_d
    b_q1, b_q2 = _rotated(q, q_weight, eps, b_cos, b_sin, o_q, mask, o_d, m_d, D, NORM)
    o_out = (i_t * H + o_head) * D + o_d
    tl.store(q_out + o_out, b_q1, mask=mask)
    tl.store(q_out + o_out + D // 2, b_q2, mask=mask)

    slot = tl.load(slot_mapping + i_t).to(tl.int64)
    if slot >= 0:
        # [BH, BD]
        m_h = (o_h < KH) & m_d
        o_kv = i_h * KH + o_h
        o_k = i_t * stride_k_token + o_kv * stride_k_head + o_d
        b_k1, b_k2 = _rotated(k, k_weight, eps, b_cos, b_sin, o_k, m_h, o_d, m_d, D, NORM)
        p_v = v + i_t * stride_v_token + o_kv * stride_v_head + o_d
        b_v1 = tl.load(p_v, mask=m_h)
        b_v2 = tl.load(p_v + D // 2, mask=m_h)
        o_slot = (slot // BS) * stride_block + (slot % BS) * stride_slot
        o_slot += o_kv * stride_head + o_d
        # rounded to the key's type first, as if stored and read again
        b_k1, b_k2 = b_k1.to(k.dtype.element_ty), b_k2.to(k.dtype.element_ty)
        tl.store(k_cache + o_slot, in_type_of(k_cache, b_k1, k_factor), mask=m_h)
        tl.store(k_cache + o_slot + D // 2, in_type_of(k_cache, b_k2, k_factor), mask=m_h)
        tl.store(v_cache + o_slot, in_type_of(v_cache, b_v1, v_factor), mask=m_h)
        tl.store(v_cache + o_slot + D // 2, in_type_of(v_cache, b_v2, v_factor), mask=m_h)


def rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Norm each head's query and key, rotate them, write key and value to the cache.

    Arguments as in `reference.rope_store_kv`; every last axis contiguous, equal strides of the two
    caches.

    Returns:
        The queries, contiguous.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    assert k_cache.stride() == v_cache.stride()
    assert q.stride(2) == k.stride(2) == v.stride(2) == k_cache.stride(3) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    # few tokens are spread over programs, of many each is one program's
    heads = 1 if num_tokens < _MANY_TOKENS else num_kv_heads
    _rope_store_kv_kernel[(num_tokens, num_kv_heads // heads)](
        q,
        k,
        v,
        out,
        k_cache,
        v_cache,
        q_weight,
        k_weight,
        positions,
        cos_sin,
        slot_mapping,
        eps,
        1.0 / k_scale,
        1.0 / v_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        H=num_heads,
        G=group,
        KH=heads,
        D=head_dim,
        BS=k_cache.shape[2],
        BG=triton.next_power_of_2(group * heads),
        BH=triton.next_power_of_2(heads),
        BD=triton.next_power_of_2(head_dim // 2),
        NORM=q_weight is not None,
        num_warps=2 if heads == 1 else 4,
        **early_start(q.device),
    )
    return out
