"""Checksums of KV blocks on whatever device the cache lies."""

from __future__ import annotations

from torch import Tensor


def kv_checksums(
    kv_cache: Tensor, block_ids: Tensor, first_token: int, end_token: int, first_layer: int = 0
) -> Tensor:
    """`[n, H_kv]` int64; `kernels.reference.kv_checksums` says what they mean.

    On a GPU the result is ready with the current stream, nothing waits here. A sender takes them
    after the last write of the blocks, a receiver after the read has ended, and both compare: head
    by head, and where blocks are unlike, sums of sums.
    """
    if kv_cache.is_cuda:
        from diptych.kernels.kv_checksums import kv_checksums as on_gpu

        return on_gpu(kv_cache, block_ids, first_token, end_token, first_layer)
    from diptych.kernels import reference

    return reference.kv_checksums(kv_cache, block_ids, first_token, end_token, first_layer)
