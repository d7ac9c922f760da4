"""Checksums of KV blocks, computed where the cache lies."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.kernels.checksum_keys import position_keys, word_keys


# one variant for any number of tokens: none is compiled while requests run
@triton.jit(do_not_specialize=["num_tokens"])
def _kv_checksums_kernel(
    words,
    block_ids,
    keys,
    token_keys,
    sums,
    num_tokens,
    stride_block,
    stride_head,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BS: tl.constexpr,
    W: tl.constexpr,
    BW: tl.constexpr,
):
    i_b, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o_s, o_w = tl.arange(0, BS), tl.arange(0, BW)
    inside = (o_w < W)[None, :]
    base = words + tl.load(block_ids + i_b).to(tl.int64) * stride_block + i_h * stride_head
    # one row is a layer's keys or values: [BS, W]
    o_row = o_s[:, None] * W + o_w[None, :]
    acc = tl.zeros([BS, BW], tl.uint64)
    for row in range(ROWS):
        b_words = tl.load(base + row * BS * W + o_row, mask=inside, other=0)
        b_keys = tl.load(keys + row * W + o_w, mask=o_w < W, other=0)
        acc += b_words.to(tl.uint32, bitcast=True).to(tl.uint64) * b_keys.to(tl.uint64)[None, :]
    # [BS]
    tokens = i_b * BS + o_s
    counted = tokens < num_tokens
    b_token_keys = tl.load(token_keys + tokens, mask=counted, other=0)
    b_sums = tl.sum(acc, axis=1) * b_token_keys.to(tl.uint64)
    tl.store(sums + tokens * H + i_h, b_sums.to(tl.int64, bitcast=True), mask=counted)


# they are those of a pool, and making them takes longer than to launch what uses them
_word_keys = functools.lru_cache(maxsize=8)(word_keys)


def kv_checksums(
    kv_cache: Tensor, block_ids: Tensor, first_token: int, end_token: int, first_layer: int = 0
) -> Tensor:
    """Arguments and result as in `reference.kv_checksums`; on the cache's device, no wait."""
    words = kv_cache.view(torch.int32)
    _, num_heads, num_layers, parts, block_size, num_words = words.shape
    assert words[0].is_contiguous()
    num_tokens = end_token - first_token
    sums = torch.empty(num_tokens, num_heads, dtype=torch.int64, device=words.device)
    if not sums.numel():
        return sums
    keys = _word_keys(first_layer, num_layers * parts, num_words, words.device)
    _kv_checksums_kernel[(len(block_ids), num_heads)](
        words,
        block_ids,
        keys,
        position_keys(first_token, end_token, words.device),
        sums,
        num_tokens,
        words.stride(0),
        words.stride(1),
        H=num_heads,
        ROWS=num_layers * parts,
        BS=block_size,
        W=num_words,
        BW=triton.next_power_of_2(num_words),
        num_warps=8,
    )
    return sums
