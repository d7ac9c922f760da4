"""Prefill attention by FlashAttention-3, where its package is installed (`diptych[fa3]`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from diptych.kernels.attention_spec import AttentionSpec, UnfitBackendError

MODULE = "flash_attn_interface"
HEAD_DIMS = (64, 128, 192, 256)


class Fa3Prefill:
    """`reference.paged_prefill_attention` for one specification.

    Raises:
        UnfitBackendError: the package, the device or the specification rules it out.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            raise UnfitBackendError("it needs a Hopper GPU (compute capability 9.0)")
        if spec.dtype not in (torch.bfloat16, torch.float16):
            raise UnfitBackendError(f"it computes in bfloat16 or float16, not {spec.dtype}")
        if spec.kv_dtype != spec.dtype:
            raise UnfitBackendError(f"it reads no cache of {spec.kv_dtype} for {spec.dtype}")
        if spec.head_dim not in HEAD_DIMS:
            raise UnfitBackendError(f"its heads are of {HEAD_DIMS}, not {spec.head_dim}")
        self._attend = _load()

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
    ) -> Tensor:
        """As the reference; of a cache in its own type only, so the scales are 1."""
        assert k_scale == v_scale == 1.0
        return self._attend(
            q,
            # the slot before the head; strides are free
            k_cache.transpose(1, 2),
            v_cache.transpose(1, 2),
            cache_seqlens=seq_lens,
            page_table=block_tables,
            cu_seqlens_q=query_start_loc,
            max_seqlen_q=max_query_len or q.shape[0],
            softmax_scale=scale,
            causal=True,
            # keys before and after a query that it sees, its own not counted
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
        )


def _load() -> Callable[..., Tensor]:
    try:
        attend: Callable[..., Tensor] = importlib.import_module(MODULE).flash_attn_with_kvcache
    except ModuleNotFoundError as error:
        raise UnfitBackendError(
            f"the package {error.name} is not installed: pip install 'diptych[fa3]'"
        ) from error
    # a library of another CUDA or torch ends in any of these
    except (ImportError, OSError, AttributeError, RuntimeError) as error:
        raise UnfitBackendError(f"{MODULE} does not load: {error}") from error
    return attend
