"""Prefill attention for Hopper GPUs: the launcher of `hopper_prefill_kernel`."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diptych.kernels.attention_spec import AttentionSpec, UnfitBackendError
from diptych.kernels.hopper_prefill_kernel import hopper_prefill_kernel
from diptych.kernels.paged_prefill_attention import paged_prefill_attention
from diptych.kernels.unpack_pages import unpack_pages

# Queries of an attending group (what one matrix instruction takes); a program has two groups.
GROUP_QUERIES = 64
BLOCK_KEYS = 128
# Tiles of keys, and of values, that are loaded or being read at one time.
STAGES = 2
GROUP_REGISTERS, LOADER_REGISTERS = 240, 24
HEAD_DIMS = (64, 128)
BLOCK_SIZES = (16, 32, 64, 128)
# Fewer queries leave most of a program's rows empty, where heads of a group share them instead.
MIN_QUERIES = 64
# Keys and values that may be unpacked for one step: 256 MiB.
MAX_UNPACKED = 1 << 27

_ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class HopperPrefill:
    """`reference.paged_prefill_attention` for one specification.

    Raises:
        UnfitBackendError: the device or the specification rules it out.
    """

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
            raise UnfitBackendError("it needs a Hopper GPU (compute capability 9.0)")
        if spec.dtype not in _ELEMENTS:
            raise UnfitBackendError(f"it computes in {list(_ELEMENTS)}, not {spec.dtype}")
        if spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
            raise UnfitBackendError(f"it reads no cache of {spec.kv_dtype} for {spec.dtype}")
        if spec.head_dim not in HEAD_DIMS:
            raise UnfitBackendError(f"its heads are of {HEAD_DIMS}, not {spec.head_dim}")
        if spec.block_size not in BLOCK_SIZES:
            raise UnfitBackendError(f"its blocks are of {BLOCK_SIZES}, not {spec.block_size}")
        if spec.sliding_window:
            raise UnfitBackendError("it knows no sliding window")

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
        """As the reference. Pages of e4m3 are unpacked first: they are read once for each block of
        queries."""
        assert sliding_window == 0
        longest, same_type = max_query_len or q.shape[0], k_cache.dtype == q.dtype
        elements = block_tables.numel() * k_cache[0].numel() * 2
        if longest < MIN_QUERIES or (not same_type and elements > MAX_UNPACKED):
            args = (q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, scale)
            # of tiles for few queries only, so that no others are compiled while serving
            return paged_prefill_attention(*args, 0, min(longest, MIN_QUERIES), k_scale, v_scale)
        if not same_type:
            k_cache, v_cache, block_tables = unpack_pages(
                k_cache, v_cache, block_tables, seq_lens, 1.0, v_scale, q.dtype
            )
        args = (q, k_cache, v_cache, block_tables, query_start_loc, seq_lens, scale * k_scale)
        return hopper_prefill_attention(*args)


def hopper_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    stages: int = STAGES,
    turns: bool = True,
) -> Tensor:
    """`paged_prefill_attention` without a window, for what `HopperPrefill` takes.

    Slots of a page are contiguous. No value on the device decides the launch.

    Args:
        stages: of the rings of tiles.
        turns: whether the groups start their matrix products in turn.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    num_seqs = seq_lens.shape[0]
    assert k_cache.stride() == v_cache.stride()
    assert q.stride()[1:] == k_cache.stride()[2:] == (head_dim, 1)
    assert block_tables.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens == 0 or num_seqs == 0:
        return out
    grid = (num_heads, num_tokens // (2 * GROUP_QUERIES) + num_seqs)
    hopper_prefill_kernel[grid](
        _rows(q, GROUP_QUERIES, num_tokens, num_heads * head_dim, q.stride(0)),
        _cache_rows(k_cache),
        _cache_rows(v_cache),
        out,
        block_tables,
        query_start_loc,
        seq_lens,
        num_seqs,
        scale * math.log2(math.e),
        out.stride(0),
        block_tables.stride(0),
        k_cache.stride(0) // head_dim,
        k_cache.stride(1) // head_dim,
        G=num_heads // num_kv_heads,
        D=head_dim,
        BS=block_size,
        BN=BLOCK_KEYS,
        GQ=GROUP_QUERIES,
        STAGES=stages,
        TURNS=turns,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
    )
    return out


def _cache_rows(cache: Tensor) -> TensorDescriptor:
    """One layer of a cache as rows `[page, head, slot]` of D, some of which are other layers'."""
    num_blocks, num_heads, block_size, head_dim = cache.shape
    last = (num_blocks - 1) * cache.stride(0) + (num_heads - 1) * cache.stride(1)
    return _rows(cache, block_size, last // head_dim + block_size, head_dim, head_dim)


def _rows(x: Tensor, box: int, num_rows: int, width: int, stride: int) -> TensorDescriptor:
    """A matrix over the memory of `x`, of which boxes of `[box, D]` are loaded."""
    dim = x.shape[-1]
    layout = _box_layout(box, dim, x.dtype)
    return TensorDescriptor(x, [num_rows, width], [stride, 1], [box, dim], layout)


@functools.cache
def _box_layout(box: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """Kept, for working it out takes as long as a launch."""
    return gl.NVMMASharedLayout.get_default_for([box, dim], _ELEMENTS[dtype])
