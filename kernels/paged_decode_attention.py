"""Attention of one query per sequence over the paged cache: split over keys, then reduced."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.tiles import online_softmax, slot_offsets

# A split has at least so many keys; and, so that one long sequence among short ones does not
# make them wait, no more than so many where the longest is known.
MIN_SPLIT = 128
MAX_SPLIT = 2048
MAX_SPLITS = 64
# Programs of a multiprocessor that run at one time and hide each other's loads.
PROGRAMS_PER_MULTIPROCESSOR = 4


class DecodeTiles(NamedTuple):
    """How the keys of a split are walked."""

    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _split_bounds(seq_len, splits, MIN: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """The first tile's start, and the length of a split in whole tiles."""
    first = tl.maximum(seq_len - WINDOW, 0) // BN * BN if WINDOW > 0 else 0
    length = tl.cdiv(tl.cdiv(seq_len - first, splits), BN) * BN
    return first, tl.maximum(length, MIN)


@triton.jit(
    do_not_specialize=["splits", "stride_table"],
    # rows of a step: where they start must not compile anew
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _paged_decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial,
    partial_lse,
    block_tables,
    seq_lens,
    splits,
    scale_log2,
    v_scale,
    stride_q_seq,
    stride_q_head,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_h, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_s = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + i_s)
    first, length = _split_bounds(seq_len, splits, MIN, BN, WINDOW)
    first += i_split * length
    last = tl.minimum(first + length, seq_len)
    if SPLIT and first >= last:
        return

    o_g, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    o_head = i_h * G + o_g
    # [BM, BD]
    b_q = tl.load(
        q + i_s * stride_q_seq + o_head[:, None] * stride_q_head + o_d[None, :], mask=m_q, other=0.0
    )
    p_k, p_v = k_cache + i_h * stride_head, v_cache + i_h * stride_head
    p_table = block_tables + i_s * stride_table
    b_m = tl.full((BM,), float("-inf"), tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_acc = tl.zeros((BM, BD), tl.float32)
    for start in range(first, last, BN):
        # [BN]
        o_n = start + tl.arange(0, BN)
        o_kv = slot_offsets(p_table, start, last, stride_block, stride_slot, BS, BN)
        m_n = o_n < last
        if WINDOW > 0:
            m_n = m_n & (o_n >= seq_len - WINDOW)
        m_kv = m_n[:, None] & (o_d < D)[None, :]
        # [BN, BD]
        b_k = tl.load(p_k + o_kv[:, None] + o_d[None, :], mask=m_kv, other=0.0)
        # [BM, BN]
        b_s = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_p, b_factor, b_m, b_l = online_softmax(b_s, b_m, b_l, scale_log2)
        b_v = tl.load(p_v + o_kv[:, None] + o_d[None, :], mask=m_kv, other=0.0)
        b_acc = b_acc * b_factor[:, None]
        b_acc = tl.dot(b_p.to(b_q.dtype), b_v.to(b_q.dtype), b_acc, input_precision="ieee")

    b_sum = tl.where(b_l == 0.0, 1.0, b_l)
    b_acc = b_acc * (v_scale / b_sum)[:, None]
    o_row = i_s * H + o_head
    if SPLIT:
        o_partial = o_row * splits + i_split
        tl.store(partial + o_partial[:, None] * D + o_d[None, :], b_acc, mask=m_q)
        tl.store(partial_lse + o_partial, b_m * scale_log2 + tl.log2(b_sum), mask=o_g < G)
    else:
        tl.store(out + o_row[:, None] * D + o_d[None, :], b_acc, mask=m_q)


@triton.jit(do_not_specialize=["splits"])
def _reduce_kernel(
    out,
    partial,
    partial_lse,
    seq_lens,
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    BD: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN: tl.constexpr,
    MAX: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_row = tl.program_id(0).to(tl.int64)
    seq_len = tl.load(seq_lens + i_row // H)
    first, length = _split_bounds(seq_len, splits, MIN, BN, WINDOW)
    o_split, o_d = tl.arange(0, MAX), tl.arange(0, BD)
    # the other splits wrote nothing
    m_split = (o_split < splits) & (first + o_split * length < seq_len)
    # [MAX]
    b_lse = tl.load(partial_lse + i_row * splits + o_split, mask=m_split, other=float("-inf"))
    b_max = tl.max(b_lse, 0)
    b_w = tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max))
    b_sum = tl.sum(b_w, 0)
    p_partial = partial + (i_row * splits + o_split)[:, None] * D + o_d[None, :]
    # [MAX, BD]
    b_x = tl.load(p_partial, mask=m_split[:, None] & (o_d < D)[None, :], other=0.0)
    b_out = tl.sum(b_x * b_w[:, None], 0) / tl.where(b_sum == 0.0, 1.0, b_sum)
    tl.store(out + i_row * D + o_d, b_out, mask=o_d < D)


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    max_seq_len: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    num_splits: int | None = None,
    min_split: int = MIN_SPLIT,
    tiles: DecodeTiles | None = None,
) -> Tensor:
    """Attention of one query per sequence, at its last position, over its paged KV.

    Arguments as in `reference.paged_decode_attention`; every last axis contiguous, equal strides of
    the two caches. No value on the device decides the launch, so it may be captured.

    Args:
        num_splits: at most `MAX_SPLITS`; if absent, chosen for device, batch and `max_seq_len`.
        min_split: keys under which a sequence is not split further, a multiple of the key tile.
        tiles: chosen for dtype and head if absent.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    assert k_cache.stride() == v_cache.stride()
    assert q.stride(2) == k_cache.stride(3) == block_tables.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_seqs == 0:
        return out
    splits = num_splits or _choose_splits(
        num_seqs * num_kv_heads, sliding_window or max_seq_len, min_split, q.device
    )
    partial, partial_lse = out, out
    if splits > 1:
        shape = (num_seqs, num_heads, splits)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_n, warps, stages = tiles or _choose_tiles(q.dtype, block_d)
    _paged_decode_kernel[(num_kv_heads, splits, num_seqs)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        partial_lse,
        block_tables,
        seq_lens,
        splits,
        scale * k_scale * math.log2(math.e),
        v_scale,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        H=num_heads,
        G=group,
        D=head_dim,
        BS=block_size,
        BM=max(triton.next_power_of_2(group), 16),
        BN=block_n,
        BD=block_d,
        WINDOW=sliding_window,
        MIN=min_split,
        SPLIT=splits > 1,
        num_warps=warps,
        num_stages=stages,
        **early_start(q.device),
    )
    if splits > 1:
        _reduce_kernel[(num_seqs * num_heads,)](
            out,
            partial,
            partial_lse,
            seq_lens,
            splits,
            H=num_heads,
            D=head_dim,
            BD=block_d,
            BN=block_n,
            WINDOW=sliding_window,
            MIN=min_split,
            # few variants, so that few are compiled while serving
            MAX=8 if splits <= 8 else MAX_SPLITS,
            num_warps=4,
            **early_start(q.device),
        )
    return out


def _choose_tiles(dtype: torch.dtype, block_d: int) -> DecodeTiles:
    if dtype == torch.float32:
        return DecodeTiles(32, 4, 2)
    return DecodeTiles(64, 4, 3 if block_d <= 128 else 2)


def _choose_splits(programs: int, max_keys: int, min_split: int, device: torch.device) -> int:
    """Enough splits to fill the device once, and no more than the longest sequence can use.

    Args:
        programs: how many there are without splitting.
        max_keys: of the longest sequence, 0 if unknown.
    """
    splits = PROGRAMS_PER_MULTIPROCESSOR * _num_multiprocessors(device) // programs
    if max_keys:
        splits = max(splits, -(-max_keys // MAX_SPLIT))
        splits = min(splits, -(-max_keys // min_split))
    return max(1, min(splits, MAX_SPLITS))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    """Of the interpreter: a few, so that it splits too."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
