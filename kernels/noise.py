"""Counter-based noise: a function of (seed, position, token id) and of nothing else.

Integer arithmetic that wraps, so that every device and every batch gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def gumbel_noise(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """Independent draws of the standard Gumbel distribution.

    Args:
        seeds, positions: `[R]` int64.
        num_tokens: draws per row.

    Returns:
        `[R, num_tokens]` float32.
    """
    bits = random_bits(seeds, positions, num_tokens)
    # 23 bits and a half fill (0, 1) without its ends; so do they from 1 downwards, each exact in
    # float32: small draws, which decide, keep their resolution
    uniform = (bits >> 9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(-(2.0**-23)).add_(1.0)
    return uniform.log_().neg_().log_().neg_()


def random_bits(seeds: Tensor, positions: Tensor, num_tokens: int) -> Tensor:
    """`[R, num_tokens]` int32, all 32 bits random."""
    key = _mix64(_mix64(positions + _GOLDEN) ^ seeds)
    low = key.to(torch.int32)[:, None]
    high = (key >> 32).to(torch.int32)[:, None]
    counter = torch.arange(num_tokens, dtype=torch.int32, device=seeds.device)
    return _mix32(_mix32(counter ^ low).add_(high))


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix32(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3, in place."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x85EBCA6B - (1 << 32))
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(0xC2B2AE35 - (1 << 32))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
