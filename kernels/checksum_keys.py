"""The odd 64-bit factors of KV checksums: functions of what a word is, not of where it lies."""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_TOKENS = 0x632BE59BD9B4E019
_HEADS = 0x2545F4914F6CDD1D


def word_keys(
    first_layer: int, num_rows: int, num_words: int, device: torch.device | None = None
) -> Tensor:
    """`[num_rows, num_words]` int64, for rows (layer, key or value) from `first_layer` on."""
    rows = torch.arange(num_rows, device=device) + 2 * first_layer
    words = torch.arange(num_words, device=device)
    return _odd((rows[:, None] << 32) + words)


def position_keys(first_token: int, end_token: int, device: torch.device | None = None) -> Tensor:
    """`[end_token - first_token]` int64."""
    return _odd(torch.arange(first_token, end_token, device=device) ^ _TOKENS)


def head_keys(first_head: int, num_heads: int, device: torch.device | None = None) -> Tensor:
    """`[num_heads]` int64, for heads from `first_head` on."""
    return _odd(torch.arange(first_head, first_head + num_heads, device=device) ^ _HEADS)


def _odd(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64, made odd: a factor that no word but 0 survives as 0."""
    x = (x + 1) * _GOLDEN
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return (x ^ _shift(x, 31)) | 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
