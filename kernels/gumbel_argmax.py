"""Sample by the Gumbel-max trick in one pass over the logits, the noise made where it is used."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


@triton.jit
def _mix64(x):
    """The finaliser of SplitMix64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _mix32(x):
    """The finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, position, o_v):
    """As `noise.gumbel_noise`, bit for bit but for the logarithm."""
    key = _mix64(_mix64(position.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ seed.to(tl.uint64))
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    # [BV]
    b_bits = _mix32(_mix32(o_v.to(tl.uint32) ^ low) + high)
    # 1 - uniform, exact
    b_u = 1.0 - ((b_bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(b_u))


@triton.jit
def _block_kernel(
    logits,
    temperature,
    seeds,
    positions,
    block_max,
    block_token,
    stride_logits,
    stride_temperature,
    stride_seeds,
    V: tl.constexpr,
    BV: tl.constexpr,
):
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_v = i_b * BV + tl.arange(0, BV)
    # [BV]
    b_x = tl.load(logits + i_r * stride_logits + o_v, mask=o_v < V, other=float("-inf"))
    t = tl.load(temperature + i_r * stride_temperature)
    if t > 0.0:
        seed = tl.load(seeds + i_r * stride_seeds)
        b_x = tl.div_rn(b_x, t + tl.zeros((BV,), tl.float32))
        b_x += _noise(seed, tl.load(positions + i_r), o_v)
    best, at = tl.max(b_x, 0, return_indices=True)
    tl.store(block_max + i_r * tl.num_programs(0) + i_b, best)
    tl.store(block_token + i_r * tl.num_programs(0) + i_b, i_b * BV + at)


@triton.jit
def _row_kernel(out, block_max, block_token, N: tl.constexpr, BN: tl.constexpr):
    i_r = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    # [BN]
    b_max = tl.load(block_max + i_r * N + o_n, mask=o_n < N, other=float("-inf"))
    _, at = tl.max(b_max, 0, return_indices=True)
    tl.store(out + i_r, tl.load(block_token + i_r * N + at).to(tl.int64))


def gumbel_argmax(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Sample each row from the softmax of `logits / temperature`, greedily at temperature 0.

    Args:
        logits: `[R, V]` float32, last axis contiguous.
        temperature: `[R]` float32.
        seeds, positions: `[R]` int64, what the noise is keyed by; positions contiguous.

    Returns:
        `[R]` int64; of equal maxima the first.
    """
    rows, vocab = logits.shape
    assert logits.stride(1) == positions.stride(0) == 1
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return out
    blocks = triton.cdiv(vocab, BLOCK)
    block_max = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    block_token = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
    _block_kernel[(blocks, rows)](
        logits,
        temperature,
        seeds,
        positions,
        block_max,
        block_token,
        logits.stride(0),
        temperature.stride(0),
        seeds.stride(0),
        V=vocab,
        BV=BLOCK,
        num_warps=8,
    )
    _row_kernel[(rows,)](
        out, block_max, block_token, N=blocks, BN=triton.next_power_of_2(blocks), num_warps=1
    )
    return out
