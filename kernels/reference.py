"""The plain-torch meaning of every kernel: same names, same signatures.

On a CPU these run; on a GPU they are what the Triton kernels are compared with. A KV cache is seen
as two strided views `[num_blocks, num_kv_heads, block_size, head_dim]`, last axis contiguous.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.kernels import torch_sampling
from diptych.kernels.checksum_keys import position_keys, word_keys
from diptych.kernels.row_inputs import RowInputs


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
        k_cache, v_cache: `[num_blocks, H_kv, block_size, D]`, any strides, last axis contiguous.
        slot_mapping: `[T]` int64, `block * block_size + offset`; -1 skips a padding token.
        k_scale, v_scale: of a cache of e4m3, which holds key / k_scale and value / v_scale,
            saturated; 1 for other caches.
    """
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = k_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    k_cache[blocks, :, offsets] = to_cache(k[kept], k_cache.dtype, k_scale)
    v_cache[blocks, :, offsets] = to_cache(v[kept], v_cache.dtype, v_scale)


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
) -> Tensor:
    """Causal attention of the last `query_len` tokens of each sequence over its paged KV.

    Args:
        q: `[T, H, D]`, the queries of all sequences, one after another.
        k_cache, v_cache: `[num_blocks, H_kv, block_size, D]`; H is a multiple of H_kv.
        block_tables: `[S, max_blocks]` int32; entries past a sequence's blocks are never read.
        query_start_loc: `[S + 1]` int32, where each sequence's queries start in `q`.
        seq_lens: `[S]` int32, tokens of each sequence, its queries included; query i of n stands at
            position `seq_len - n + i`.
        scale: multiplies the scores.
        sliding_window: a query sees only the last `sliding_window` positions, its own included;
            0 for all.
        max_query_len: an upper bound of query lengths, 0 if unknown (a launch hint).
        k_scale, v_scale: what the cache's keys and values are to be multiplied by, as in
            `store_kv`. The maths is that of q's type, to which e4m3 converts exactly.

    Returns:
        `[T, H, D]` in q's dtype. Softmax and sums in float32. Rows of `q` past the last sequence
        (padding) come back undefined.
    """
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        # [ctx, H_kv, D]
        k = _read_kv(k_cache, block_tables[i], seq_len)
        v = _read_kv(v_cache, block_tables[i], seq_len)
        # [n, 1], [ctx]
        position = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]
        key_position = torch.arange(seq_len, device=q.device)
        visible = key_position <= position
        if sliding_window:
            visible &= key_position > position - sliding_window
        out[start:end] = _attend(q[start:end], k, v, visible, scale * k_scale) * v_scale
    return out


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
) -> Tensor:
    """Attention of one query per sequence, at its last position, over its paged KV.

    Args:
        q: `[S, H, D]`.
        k_cache, v_cache, block_tables, seq_lens, scale, sliding_window: as in
            `paged_prefill_attention`. A sequence of length 0 gives zeros.
        max_seq_len: an upper bound of sequence lengths, 0 if unknown (a launch hint).
        k_scale, v_scale: as in `paged_prefill_attention`.

    Returns:
        `[S, H, D]` in q's dtype.
    """
    out = torch.zeros_like(q)
    for i, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        # [ctx, H_kv, D]
        k = _read_kv(k_cache, block_tables[i], seq_len)
        v = _read_kv(v_cache, block_tables[i], seq_len)
        visible = torch.ones(1, seq_len, dtype=torch.bool, device=q.device)
        if sliding_window:
            visible[:, : max(seq_len - sliding_window, 0)] = False
        out[i : i + 1] = _attend(q[i : i + 1], k, v, visible, scale * k_scale) * v_scale
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis; x `[..., N]`, computed in float32."""
    xf = x.float()
    xf = xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)
    return weight * xf.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`; both `[T, N]`, x also `[S, T, N]`, in parts."""
    total = joined(x, residual.dtype) + residual
    return rms_norm(total, weight, eps), total


def joined(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The `[T, N]` in `dtype` that `linear_parts` gave, maybe in parts."""
    return x.sum(0).to(dtype) if x.dim() == 3 else x


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """`x @ weight.T + bias`.

    Args:
        x: `[T, K]`, last axis contiguous; weight: `[N, K]`; bias: `[N]`.
        out: `[T, N]`, contiguous, where to write; its dtype may be another.

    Returns:
        `[T, N]`.
    """
    product = torch.nn.functional.linear(x, weight, bias)
    return product if out is None else out.copy_(product)


def linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` without a bias, or float32 parts of it, `[S, T, N]`, for `add_rms_norm` to sum."""
    return linear(x, weight)


def linear_onto(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor | None:
    """`linear_parts`, or None where it has been added to `residual`, `[T, N]`, in place."""
    return linear_parts(x, weight)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`silu_mul(linear(x, weight))`, for weight = `[2N, K]` = (gate, up); returns `[T, N]`."""
    return silu_mul(linear(x, weight))


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys (the half-split, NeoX form).

    Args:
        q, k: `[T, H, D]` and `[T, H_kv, D]`.
        positions: `[T]` int64.
        cos_sin: `[max_position, D]` float32: D/2 cosines, then D/2 sines.

    Returns:
        The rotated pair, in the inputs' dtypes.
    """
    cos, sin = cos_sin[positions].chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.float().chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)

    return rotate(q), rotate(k)


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

    Args:
        q, k, v: `[T, H, D]`, `[T, H_kv, D]` twice.
        positions, cos_sin: as in `rope`.
        k_cache, v_cache, slot_mapping, k_scale, v_scale: as in `store_kv`.
        q_weight, k_weight: `[D]`, of the norms; None for no norm.
        eps: of the norms.

    Returns:
        The queries, `[T, H, D]`.
    """
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rope(q, k, positions, cos_sin)
    store_kv(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    return q


def silu_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` for x = `[T, 2N]` = (gate, up); returns `[T, N]`, computed in float32."""
    gate, up = x.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(x.dtype)


def read_rows(
    order: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    prompt_lens: Tensor,
    block_tables: Tensor,
    block_size: int,
    width: int,
) -> RowInputs:
    """The inputs of a decode step of some rows.

    Args:
        order: `[S]` int64, the rows; -1 for padding.
        last_tokens, positions, prompt_lens: `[N]` int64, of each row: its last token, where that
            stands, and tokens of its prompt.
        block_tables: `[N, max_blocks]` int32.
        width: entries of a table that the longest sequence uses at most.
    """
    live, row = order >= 0, order.clamp(min=0)
    at = positions[row]
    blocks = block_tables[row, at // block_size].long()
    return RowInputs(
        torch.where(live, last_tokens[row], 0),
        torch.where(live, at, 0),
        torch.where(live, blocks * block_size + at % block_size, -1),
        torch.where(live, at + 1 - prompt_lens[row], 0),
        torch.where(live, at + 1, 0).int(),
        block_tables[row, :width],
    )


def advance_rows(
    order: Tensor, sampled: Tensor, last_tokens: Tensor, positions: Tensor, tokens: Tensor
) -> None:
    """A token has been sampled for each row: it is the row's last one now, one position on.

    Args:
        order, last_tokens, positions: as in `read_rows`; the last two are written, padding aside.
        sampled: `[S]` int64.
        tokens: `[S]` int64, where `sampled` is copied.
    """
    tokens.copy_(sampled)
    live = order >= 0
    row = order[live]
    last_tokens[row] = sampled[live]
    positions[row] += 1


def write_rows(
    rows: Tensor,
    new_tokens: Tensor,
    new_positions: Tensor,
    new_prompt_lens: Tensor,
    last_tokens: Tensor,
    positions: Tensor,
    prompt_lens: Tensor,
) -> None:
    """Write R rows.

    Args:
        rows: `[R]` int64.
        new_tokens, new_positions, new_prompt_lens: `[R]` int64; a token of -1 keeps the row's.
        last_tokens, positions, prompt_lens: as in `read_rows`; written.
    """
    known = new_tokens >= 0
    last_tokens[rows[known]] = new_tokens[known]
    positions[rows] = new_positions
    prompt_lens[rows] = new_prompt_lens


def to_cache(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """Keys or values as a cache of `dtype` holds them."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    most = torch.finfo(dtype).max
    return (x.float() * (1.0 / scale)).clamp(-most, most).to(dtype)


# its rows need their tables
sample_rows = torch_sampling.sample_rows


def _read_kv(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first `seq_len` tokens of one sequence: `[seq_len, H_kv, D]`."""
    num_blocks = -(-seq_len // cache.shape[2])
    return cache[block_table[:num_blocks].long()].transpose(1, 2).flatten(0, 1)[:seq_len]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of q `[n, H, D]` over k, v `[ctx, H_kv, D]` where `visible` `[n, ctx]`."""
    group = q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,chd->hnc", q.float(), k) * scale
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hnc,chd->nhd", weights, v).to(q.dtype)


def kv_checksums(
    kv_cache: Tensor, block_ids: Tensor, first_token: int, end_token: int, first_layer: int = 0
) -> Tensor:
    """A 64-bit checksum of each token and head: sum of word x key(layer, part, word), times
    key(position), modulo 2^64, all keys odd, words of 32 bits.

    A word that differs always shows. Equal KV has equal sums wherever it lies, and the sums of
    ranges of layers add up to those of all layers.

    Args:
        kv_cache: `[num_blocks, H_kv, L, 2, block_size, D]`, a block contiguous; D x itemsize is a
            multiple of 4.
        block_ids: `[n]` int64; block i holds tokens from `first_token + i * block_size` on.
        end_token: tokens from here on are not counted; it lies in the last block.
        first_layer: the cache's first layer among the model's.

    Returns:
        `[end_token - first_token, H_kv]` int64.
    """
    words = kv_cache.view(torch.int32)
    _, num_heads, num_layers, parts, block_size, num_words = words.shape
    keys = word_keys(first_layer, num_layers * parts, num_words, words.device)
    keys = keys.view(num_layers, parts, 1, num_words)
    tokens = position_keys(first_token, end_token, words.device)
    sums = torch.empty(len(tokens), num_heads, dtype=torch.int64, device=words.device)
    for index, block in enumerate(block_ids.tolist()):
        own = slice(index * block_size, (index + 1) * block_size)
        # [H, L, 2, counted slots, W], as unsigned
        counted = words[block, :, :, :, : len(tokens[own])].long() & 0xFFFFFFFF
        sums[own] = ((counted * keys).sum((1, 2, 4)) * tokens[own]).T
    return sums


def copy_runs(
    source: Tensor,
    target: Tensor,
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    length: NDArray[np.int64],
) -> None:
    """Copy `length[i]` bytes at `src[i]` to `dst[i]`; both are uint8 `[num_bytes]`."""
    for start, end, size in zip(src.tolist(), dst.tolist(), length.tolist(), strict=True):
        target[end : end + size] = source[start : start + size]
