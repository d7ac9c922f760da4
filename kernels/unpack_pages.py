"""Copy the pages of some sequences from an e4m3 cache to one of 16 bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=["width", "stride_table"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _unpack_kernel(
    k_cache,
    v_cache,
    pages,
    block_tables,
    seq_lens,
    width,
    k_scale,
    v_scale,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    H: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    i_page, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i_s, i_block = i_page // width, i_page % width
    left = tl.load(seq_lens + i_s) - i_block * BS
    if left <= 0:
        return
    block = tl.load(block_tables + i_s * stride_table + i_block).to(tl.int64)
    p_from = block * stride_block + i_h * stride_head
    p_to = pages + (i_page * H + i_h) * 2 * BS * D
    o_d = tl.arange(0, BD)[None, :]
    for start in tl.static_range(0, BS, BR):
        o_slot = start + tl.arange(0, BR)[:, None]
        mask = (o_slot < BS) & (o_slot < left) & (o_d < D)
        o_from, o_to = o_slot * stride_slot + o_d, o_slot * D + o_d
        # [BR, BD]
        b_k = tl.load(k_cache + p_from + o_from, mask=mask).to(tl.float32) * k_scale
        b_v = tl.load(v_cache + p_from + o_from, mask=mask).to(tl.float32) * v_scale
        tl.store(p_to + o_to, b_k, mask=mask)
        tl.store(p_to + BS * D + o_to, b_v, mask=mask)


def unpack_pages(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    k_scale: float,
    v_scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """A cache that holds these sequences alone, in another type, and their block tables in it.

    Args:
        k_cache, v_cache: `[num_blocks, H_kv, block_size, D]`, equal strides, last axis contiguous.
        block_tables: `[S, max_blocks]` int32; seq_lens: `[S]` int32.
        k_scale, v_scale: what keys and values are multiplied by.

    Returns:
        Keys and values `[S * max_blocks, H_kv, block_size, D]`; `[S, max_blocks]` int32. Slots past
        a sequence's end are undefined.
    """
    _, num_heads, block_size, head_dim = k_cache.shape
    assert k_cache.stride() == v_cache.stride()
    assert k_cache.stride(3) == block_tables.stride(1) == 1
    num_seqs, width = block_tables.shape
    shape = (num_seqs * width, num_heads, 2, block_size, head_dim)
    pages = torch.empty(shape, dtype=dtype, device=k_cache.device)
    tables = torch.arange(num_seqs * width, dtype=torch.int32, device=k_cache.device)
    _unpack_kernel[(num_seqs * width, num_heads)](
        k_cache,
        v_cache,
        pages,
        block_tables,
        seq_lens,
        width,
        k_scale,
        v_scale,
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        H=num_heads,
        D=head_dim,
        BS=block_size,
        BR=min(triton.next_power_of_2(block_size), 32),
        BD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return pages[:, :, 0], pages[:, :, 1], tables.view(num_seqs, width)
