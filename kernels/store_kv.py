"""Scatter new keys and values into the paged cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.e4m3 import in_type_of


@triton.jit
def _store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_block,
    stride_head,
    stride_slot,
    k_factor,
    v_factor,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    i_t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + i_t).to(tl.int64)
    if slot >= 0:
        o_h, o_d = tl.arange(0, BH)[:, None].to(tl.int64), tl.arange(0, BD)[None, :]
        mask = (o_h < H) & (o_d < D)
        # [BH, BD]
        b_k = tl.load(k + i_t * stride_k_token + o_h * stride_k_head + o_d, mask=mask)
        b_v = tl.load(v + i_t * stride_v_token + o_h * stride_v_head + o_d, mask=mask)
        o_slot = (slot // BS) * stride_block + (slot % BS) * stride_slot
        o_cache = o_slot + o_h * stride_head + o_d
        tl.store(k_cache + o_cache, in_type_of(k_cache, b_k, k_factor), mask=mask)
        tl.store(v_cache + o_cache, in_type_of(v_cache, b_v, v_factor), mask=mask)


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write token t's key and value at cache slot `slot_mapping[t]`, in place.

    Args:
        k, v: `[T, H_kv, D]`, last axis contiguous.
        k_cache, v_cache: `[num_blocks, H_kv, block_size, D]`, equal strides, last axis contiguous.
        slot_mapping: `[T]` int64, `block * block_size + offset`; -1 skips a padding token.
        k_scale, v_scale: as in `reference.store_kv`.
    """
    num_tokens, num_heads, head_dim = k.shape
    assert k_cache.stride() == v_cache.stride()
    assert k.stride(2) == v.stride(2) == k_cache.stride(3) == 1
    if num_tokens == 0:
        return
    _store_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        1.0 / k_scale,
        1.0 / v_scale,
        H=num_heads,
        D=head_dim,
        BS=k_cache.shape[2],
        BH=triton.next_power_of_2(num_heads),
        BD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
