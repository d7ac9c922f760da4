"""Attention of one query per sequence over the paged cache.

The keys of a sequence are split over programs; the one that ends last, or a second kernel, joins
their parts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.device_facts import num_multiprocessors
from diptych.kernels.early_start import (
    early_start,
    let_next_kernel_start,
    wait_for_earlier_kernels,
)
from diptych.kernels.tiles import (
    converts_fast,
    online_softmax,
    query_type,
    slot_offsets,
    widened,
)

# A split has at least so many keys; and, so that one long sequence among short ones does not
# make them wait, no more than so many where the longest is known.
MIN_SPLIT = 128
MAX_SPLIT = 2048
MAX_SPLITS = 64
# Programs of a multiprocessor that run at one time and hide each other's loads.
PROGRAMS_PER_MULTIPROCESSOR = 4
# So many parts are joined by the program that ends last. One program would read more too slowly:
# they get a launch of their own (docs/decisions/0003-attention-tiles.md).
MAX_JOINED = 4
# So many at once that they do for almost any batch.
MIN_TICKETS = 1 << 14


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


@triton.jit
def _join_splits(
    out, partial, partial_lse, o_head, count, splits,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, MAX: tl.constexpr,
):  # fmt: skip
    """Join the first `count` of at most MAX parts of G rows of `out`, from row `o_head` on."""
    o_split, o_g, o_d = tl.arange(0, MAX), tl.arange(0, GP), tl.arange(0, BD)
    # [MAX, GP]
    o_part = (o_head + o_g[None, :]) * splits + o_split[:, None]
    m_part = (o_split < count)[:, None] & (o_g < G)[None, :]
    # other multiprocessors wrote them: not from this one's own cache
    b_lse = tl.load(partial_lse + o_part, mask=m_part, other=float("-inf"), cache_modifier=".cg")
    b_max = tl.max(b_lse, 0)
    b_w = tl.exp2(b_lse - tl.where(b_max == float("-inf"), 0.0, b_max)[None, :])
    b_sum = tl.sum(b_w, 0)
    # [MAX, GP, BD]
    b_x = tl.load(
        partial + o_part[:, :, None] * D + o_d[None, None, :],
        mask=m_part[:, :, None] & (o_d < D)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    b_out = tl.sum(b_x * b_w[:, :, None], 0) / tl.where(b_sum == 0.0, 1.0, b_sum)[:, None]
    m_out = (o_g < G)[:, None] & (o_d < D)[None, :]
    tl.store(out + (o_head + o_g)[:, None] * D + o_d[None, :], b_out, mask=m_out)


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
    tickets,
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
    GP: tl.constexpr,
    MAX: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        let_next_kernel_start()
        wait_for_earlier_kernels()
    i_h, i_split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_s = tl.program_id(2).to(tl.int64)
    seq_len = tl.load(seq_lens + i_s)
    first, length = _split_bounds(seq_len, splits, MIN, BN, WINDOW)
    # the splits that have keys; an empty sequence has one that has none
    count = tl.maximum(tl.cdiv(seq_len - first, length), 1)
    if i_split >= count:
        return
    first += i_split * length
    last = tl.minimum(first + length, seq_len)

    o_g, o_d = tl.arange(0, BM), tl.arange(0, BD)
    m_q = (o_g < G)[:, None] & (o_d < D)[None, :]
    o_head = i_h * G + o_g
    # [BM, BD]
    b_q = tl.load(
        q + i_s * stride_q_seq + o_head[:, None] * stride_q_head + o_d[None, :], mask=m_q, other=0.0
    )
    b_q = query_type(b_q, FAST)
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
        b_s = tl.dot(b_q, tl.trans(widened(b_k, b_q, FAST)), input_precision="ieee")
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_p, b_factor, b_m, b_l = online_softmax(b_s, b_m, b_l, scale_log2)
        b_v = tl.load(p_v + o_kv[:, None] + o_d[None, :], mask=m_kv, other=0.0)
        b_acc = b_acc * b_factor[:, None]
        b_acc = tl.dot(b_p.to(b_q.dtype), widened(b_v, b_q, FAST), b_acc, input_precision="ieee")

    b_sum = tl.where(b_l == 0.0, 1.0, b_l)
    b_acc = b_acc * (v_scale / b_sum)[:, None]
    o_row = i_s * H + o_head
    p_out = out + o_row[:, None] * D + o_d[None, :]
    if not SPLIT or (MAX > 0 and count == 1):
        tl.store(p_out, b_acc, mask=m_q)
    else:
        o_part = o_row * splits + i_split
        tl.store(partial + o_part[:, None] * D + o_d[None, :], b_acc, mask=m_q)
        tl.store(partial_lse + o_part, b_m * scale_log2 + tl.log2(b_sum), mask=o_g < G)
        if MAX > 0:
            # all threads have stored before one draws; who draws last finds all parts
            tl.debug_barrier()
            p_ticket = tickets + i_s * (H // G) + i_h
            if tl.atomic_add(p_ticket, 1, sem="acq_rel") == count - 1:
                _join_splits(
                    out, partial, partial_lse, i_s * H + i_h * G, count, splits, G, GP, D, BD, MAX
                )
                # for the next launch
                tl.store(p_ticket, 0)


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
    tickets: Tensor | None = None,
    num_splits: int | None = None,
    min_split: int = MIN_SPLIT,
    tiles: DecodeTiles | None = None,
) -> Tensor:
    """Attention of one query per sequence, at its last position, over its paged KV.

    Arguments as in `reference.paged_decode_attention`; every last axis contiguous, equal strides of
    the two caches. No value on the device decides the launch, so it may be captured.

    Args:
        tickets: int32 zeros, of which a pair of sequence and KV head uses one, left as zeros; at
            least as many as there are such pairs. Calls that may run at one time need their own.
            Made for this call if absent.
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
    partial = partial_lse = out
    if splits > 1:
        shape = (num_seqs, num_heads, splits)
        partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=q.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    joins = 1 < splits <= MAX_JOINED
    if joins:
        if tickets is None:
            tickets = torch.zeros(num_seqs * num_kv_heads, dtype=torch.int32, device=q.device)
        assert tickets.numel() >= num_seqs * num_kv_heads
    block_d = max(triton.next_power_of_2(head_dim), 16)
    block_n, warps, stages = tiles or _choose_tiles(q.dtype, block_d)
    _paged_decode_kernel[(num_kv_heads, splits, num_seqs)](
        q,
        k_cache,
        v_cache,
        out,
        partial,
        partial_lse,
        out if tickets is None else tickets,
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
        GP=triton.next_power_of_2(group),
        MAX=MAX_JOINED if joins else 0,
        FAST=converts_fast(q, k_cache),
        num_warps=warps,
        num_stages=stages,
        **early_start(q.device),
    )
    if splits > MAX_JOINED:
        sizes = {"BD": block_d, "BN": block_n, "WINDOW": sliding_window, "MIN": min_split}
        _reduce(out, partial, partial_lse, seq_lens, sizes)
    return out


def _reduce(
    out: Tensor, partial: Tensor, partial_lse: Tensor, seq_lens: Tensor, sizes: dict[str, int]
) -> None:
    """Join the parts, `[S, H, splits, D]`, by a launch of their own."""
    num_seqs, num_heads, splits, head_dim = partial.shape
    _reduce_kernel[(num_seqs * num_heads,)](
        out,
        partial,
        partial_lse,
        seq_lens,
        splits,
        **sizes,
        H=num_heads,
        D=head_dim,
        # few variants, so that few are compiled while serving
        MAX=8 if splits <= 8 else MAX_SPLITS,
        num_warps=4,
        **early_start(out.device),
    )


class PagedDecode:
    """`paged_decode_attention` with tickets of its own, for calls one after another."""

    def __init__(self) -> None:
        # also those that were too few: a captured graph may hold them
        self._tickets: list[Tensor] = []

    def __call__(
        self,
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
    ) -> Tensor:
        pairs = q.shape[0] * k_cache.shape[1]
        if not self._tickets or self._tickets[-1].numel() < pairs:
            size = max(triton.next_power_of_2(pairs), MIN_TICKETS)
            self._tickets.append(torch.zeros(size, dtype=torch.int32, device=q.device))
        return paged_decode_attention(
            q,
            k_cache,
            v_cache,
            block_tables,
            seq_lens,
            scale,
            sliding_window,
            max_seq_len,
            k_scale,
            v_scale,
            tickets=self._tickets[-1],
        )


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
    splits = PROGRAMS_PER_MULTIPROCESSOR * num_multiprocessors(device) // programs
    if max_keys:
        splits = max(splits, -(-max_keys // MAX_SPLIT))
        splits = min(splits, -(-max_keys // min_split))
    return max(1, min(splits, MAX_SPLITS))
