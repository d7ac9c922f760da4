"""Causal attention of many queries per sequence over the paged cache."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.tiles import (
    converts_fast,
    online_softmax,
    query_type,
    slot_offsets,
    widened,
)

# Queries from which larger tiles pay (docs/decisions/0003-attention-tiles.md).
LONG_PREFILL = 4096


class PrefillTiles(NamedTuple):
    """Rows (queries times heads of a group) and keys of a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _find_sequence(query_start_loc, i_block, num_seqs, BQ: tl.constexpr):
    """The sequence of a block of queries; sequence i starts at block `start // BQ + i`."""
    low = tl.full((), 0, tl.int32)
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(query_start_loc + middle) // BQ + middle
        low, high = (
            tl.where(first_block <= i_block, middle + 1, low),
            tl.where(first_block <= i_block, high, middle),
        )
    return low - 1


@triton.jit
def _attend_tiles(
    b_acc, b_m, b_l, b_q, p_k, p_v, p_table, o_position, first, last, seq_len, scale_log2,
    stride_block, stride_slot,
    D: tl.constexpr, BS: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    WINDOW: tl.constexpr, MASKED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Take the keys `first..last` into the running sums; only MASKED tiles may hold unseen keys."""
    o_d = tl.arange(0, BD)
    for start in range(first, last, BN):
        # [BN]
        o_n = start + tl.arange(0, BN)
        o_kv = slot_offsets(p_table, start, seq_len, stride_block, stride_slot, BS, BN)
        m_n = o_n < seq_len if MASKED else o_n >= 0
        if WINDOW > 0:
            # what all rows have passed may be gone from the cache
            m_n = m_n & (o_n > tl.min(o_position, 0) - WINDOW)
        m_kv = m_n[:, None] & (o_d < D)[None, :]
        # [BN, BD]
        b_k = tl.load(p_k + o_kv[:, None] + o_d[None, :], mask=m_kv, other=0.0)
        # [BM, BN]
        b_s = tl.dot(b_q, tl.trans(widened(b_k, b_q, FAST)), input_precision="ieee")
        if MASKED:
            m_seen = (o_n[None, :] <= o_position[:, None]) & m_n[None, :]
            if WINDOW > 0:
                m_seen = m_seen & (o_n[None, :] > o_position[:, None] - WINDOW)
            b_s = tl.where(m_seen, b_s, float("-inf"))
        b_p, b_factor, b_m, b_l = online_softmax(b_s, b_m, b_l, scale_log2)
        b_v = tl.load(p_v + o_kv[:, None] + o_d[None, :], mask=m_kv, other=0.0)
        # [BM, BD]
        b_acc = b_acc * b_factor[:, None]
        b_acc = tl.dot(b_p.to(b_q.dtype), widened(b_v, b_q, FAST), b_acc, input_precision="ieee")
    return b_acc, b_m, b_l


@triton.jit(
    do_not_specialize=["num_seqs", "stride_table"],
    # rows of a step: where they start must not compile anew
    do_not_specialize_on_alignment=["block_tables", "query_start_loc", "seq_lens"],
)
def _paged_prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    block_tables,
    query_start_loc,
    seq_lens,
    num_seqs,
    scale_log2,
    v_scale,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_block,
    stride_head,
    stride_slot,
    stride_table,
    G: tl.constexpr,
    D: tl.constexpr,
    BS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    WINDOW: tl.constexpr,
    FAST: tl.constexpr,
):
    BQ: tl.constexpr = BM // G
    # the last blocks of a sequence see most keys: they start first
    i_block = tl.num_programs(1) - 1 - tl.program_id(1)
    i_h = tl.program_id(0).to(tl.int64)
    i_s = _find_sequence(query_start_loc, i_block, num_seqs, BQ)
    query_start = tl.load(query_start_loc + i_s)
    query_len = tl.load(query_start_loc + i_s + 1) - query_start
    # queries of this block: first_query .. first_query + BQ
    first_query = (i_block - query_start // BQ - i_s) * BQ
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens + i_s)
    position = seq_len - query_len + first_query

    # row r is query r // G, head r % G of the group: one load of K serves the group
    o_m, o_d = tl.arange(0, BM), tl.arange(0, BD)
    o_query = o_m // G
    m_row = (o_query < BQ) & (first_query + o_query < query_len)
    m_q = m_row[:, None] & (o_d < D)[None, :]
    o_token = (query_start + first_query + o_query).to(tl.int64)
    o_head = i_h * G + o_m % G
    p_q = q + o_token[:, None] * stride_q_token + o_head[:, None] * stride_q_head + o_d[None, :]
    # [BM, BD]
    b_q = query_type(tl.load(p_q, mask=m_q, other=0.0), FAST)

    p_k, p_v = k_cache + i_h * stride_head, v_cache + i_h * stride_head
    p_table = block_tables + i_s.to(tl.int64) * stride_table
    o_position = position + o_query
    last = tl.minimum(position + BQ, seq_len)
    # keys up to the first query's own are seen by all rows, unless a window hides them
    full = 0 if WINDOW > 0 else (position + 1) // BN * BN
    first = tl.maximum(position - WINDOW + 1, 0) // BN * BN if WINDOW > 0 else full
    b_m = tl.full((BM,), float("-inf"), tl.float32)
    b_l = tl.zeros((BM,), tl.float32)
    b_acc = tl.zeros((BM, BD), tl.float32)
    if WINDOW == 0:
        b_acc, b_m, b_l = _attend_tiles(
            b_acc, b_m, b_l, b_q, p_k, p_v, p_table, o_position, 0, full, seq_len, scale_log2,
            stride_block, stride_slot, D, BS, BN, BD, WINDOW, False, FAST,
        )  # fmt: skip
    b_acc, b_m, b_l = _attend_tiles(
        b_acc, b_m, b_l, b_q, p_k, p_v, p_table, o_position, first, last, seq_len, scale_log2,
        stride_block, stride_slot, D, BS, BN, BD, WINDOW, True, FAST,
    )  # fmt: skip
    b_out = b_acc * (v_scale / tl.where(b_l == 0.0, 1.0, b_l))[:, None]
    p_out = out + o_token[:, None] * stride_out_token + o_head[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out, mask=m_q)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    max_query_len: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    *,
    tiles: PrefillTiles | None = None,
) -> Tensor:
    """Causal attention of the last `query_len` tokens of each sequence over its paged KV.

    Arguments as in `reference.paged_prefill_attention`; every last axis contiguous, equal strides
    of the two caches. No value on the device decides the launch, so it may be captured.

    Args:
        tiles: chosen for dtype, head and `max_query_len` if absent; `block_m` at least the group.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    num_seqs = seq_lens.shape[0]
    assert k_cache.stride() == v_cache.stride()
    assert q.stride(2) == k_cache.stride(3) == block_tables.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    block_d = max(triton.next_power_of_2(head_dim), 16)
    tiles = tiles or _choose_tiles(q.dtype, block_d, group, max_query_len or num_tokens)
    block_m, block_n, warps, stages = tiles
    # an upper bound of the blocks: each sequence may leave one block part empty
    grid = (num_kv_heads, num_tokens // (block_m // group) + num_seqs)
    _paged_prefill_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        query_start_loc,
        seq_lens,
        num_seqs,
        scale * k_scale * math.log2(math.e),
        v_scale,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_tables.stride(0),
        G=group,
        D=head_dim,
        BS=block_size,
        BM=block_m,
        BN=block_n,
        BD=block_d,
        WINDOW=sliding_window,
        FAST=converts_fast(q, k_cache),
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _choose_tiles(dtype: torch.dtype, block_d: int, group: int, max_query_len: int) -> PrefillTiles:
    least = max(triton.next_power_of_2(group), 16)
    if dtype == torch.float32:
        block_m, block_n, stages = 32, 32, 1
    elif block_d > 128:
        block_m, block_n, stages = 64, 64, 2
    elif max_query_len >= LONG_PREFILL:
        block_m, block_n, stages = 128, 128, 2
    else:
        block_m, block_n, stages = 64, 64, 3
    # few variants, so that few are compiled while serving
    block_m = least if max_query_len * group <= least else max(block_m, least)
    return PrefillTiles(block_m, block_n, 8 if block_m >= 128 else 4, stages)
