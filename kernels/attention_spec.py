"""What a prefill backend is asked for, and the form in which it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is the same for all attention calls of one model.

    Attributes:
        dtype: of queries and outputs; kv_dtype: of the cache.
        sliding_window: 0 for none.
    """

    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int = 0


class PrefillAttention(Protocol):
    """`reference.paged_prefill_attention`."""

    def __call__(
        self,
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
    ) -> Tensor: ...


class UnfitBackendError(Exception):
    """A backend cannot serve a specification here; the message says why."""


class WrongBackendError(UnfitBackendError):
    """A backend that should fit failed its check."""
