"""The noise of `noise.py`, made where it is used."""

from __future__ import annotations

import triton
import triton.language as tl


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
def gumbel_noise(seed, position, o_v):
    """As `noise.gumbel_noise`, bit for bit but for the logarithm; o_v are the tokens."""
    key = _mix64(_mix64(position.to(tl.uint64) + 0x9E3779B97F4A7C15) ^ seed.to(tl.uint64))
    low, high = (key & 0xFFFFFFFF).to(tl.uint32), (key >> 32).to(tl.uint32)
    # [BV]
    b_bits = _mix32(_mix32(o_v.to(tl.uint32) ^ low) + high)
    # 1 - uniform, exact
    b_u = 1.0 - ((b_bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
    return -tl.log(-tl.log(b_u))
