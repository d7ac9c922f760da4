"""Checksums of KV by blocks of tokens: one function, wherever the pool lies and however it is cut.

A block's checksum is the sum over its tokens and heads of `kernels.reference.kv_checksums`, each
head times its key. Pools in host memory are summed here and now, those on a GPU where they lie, on
a stream of their own that gets in between the model's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.connectors.plan_geometry import HEAD_OUTERMOST, PoolGeometry
from diptych.kernels import reference
from diptych.kernels.checksum_keys import head_keys, position_keys, word_keys

# as unsigned 64-bit numbers; a call waits until they are there
PendingChecksums = Callable[[], list[int]]
_WORD_BYTES = 4
_WARM_UP_BLOCKS = 16


class Checksums(Protocol):
    """Of one side's pool. For one thread."""

    def begin(self, block_ids: Sequence[int], start: int, end: int, size: int) -> PendingChecksums:
        """Of tokens [start, end), which lie in `block_ids` from position 0 on: one for each `size`
        of them, a multiple of which `start` is; the last may be of fewer. What the blocks hold now
        is counted: it must be there, and stay until the result is."""
        ...


class HostChecksums:
    """Of a pool in host memory."""

    def __init__(self, pool: NDArray[np.uint8], geometry: PoolGeometry) -> None:
        """`pool` is `[num_bytes]`, of our own layout."""
        assert geometry.axes == HEAD_OUTERMOST
        assert not geometry.atom_bytes % _WORD_BYTES
        heads, layers = geometry.heads, geometry.layers
        num_words = geometry.atom_bytes // _WORD_BYTES
        num_rows = len(layers) * geometry.parts
        start = geometry.offset_bytes
        words = pool[start : start + geometry.num_bytes].view(np.uint32)
        self._size = geometry.block_size
        # [block, head, layer and part, slot, word]
        self._blocks = words.reshape(
            geometry.num_blocks, len(heads), num_rows, self._size, num_words
        )
        self._word_keys = _unsigned(word_keys(layers.start, num_rows, num_words))
        self._head_keys = _unsigned(head_keys(heads.start, len(heads)))

    def begin(self, block_ids: Sequence[int], start: int, end: int, size: int) -> PendingChecksums:
        sums = np.zeros(-(-(end - start) // size) * size, np.uint64)
        at = start
        while at < end:
            slot = at % self._size
            count = min(end - at, self._size - slot)
            block = self._blocks[block_ids[at // self._size], :, :, slot : slot + count]
            # [head, slot]
            by_head = np.einsum("hrsw,rw->hs", block.astype(np.uint64), self._word_keys)
            sums[at - start : at - start + count] = self._head_keys @ by_head
            at += count
        sums[: end - start] *= _unsigned(position_keys(start, end))
        result: list[int] = sums.reshape(-1, size).sum(1).tolist()
        return lambda: result


class TorchChecksums:
    """Of a cache tensor: on a GPU by the kernel, elsewhere by its twin."""

    def __init__(self, kv_cache: Tensor, geometry: PoolGeometry) -> None:
        """`kv_cache` is `[num_blocks, H_kv, L, 2, block_size, D]`. The kernel is compiled now."""
        assert geometry.axes == HEAD_OUTERMOST
        self._cache = kv_cache.detach()
        self._size = geometry.block_size
        self._first_layer = geometry.layers.start
        self._head_keys = head_keys(geometry.heads.start, len(geometry.heads), kv_cache.device)
        self._stream: torch.cuda.Stream | None = None
        self._of = reference.kv_checksums
        if kv_cache.is_cuda:
            from diptych.kernels.kv_checksums import kv_checksums

            self._of = kv_checksums
            # the model's kernels fill the device: those of a higher priority get in between
            self._stream = torch.cuda.Stream(kv_cache.device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(kv_cache.device))
            # all forms of its kernels and torch's are loaded now, which takes milliseconds each
            blocks = list(range(min(geometry.num_blocks, _WARM_UP_BLOCKS)))
            for end in (1, self._size, len(blocks) * self._size - 1, len(blocks) * self._size):
                for size in {self._size, 2 * self._size}:
                    self.begin(blocks, 0, end, size)()

    @torch.inference_mode()
    def begin(self, block_ids: Sequence[int], start: int, end: int, size: int) -> PendingChecksums:
        first = start // self._size
        with torch.cuda.stream(self._stream):
            ids = torch.tensor(block_ids[first : -(-end // self._size)], device=self._cache.device)
            begin = first * self._size
            # [tokens, H]
            sums = self._of(self._cache, ids, begin, end, self._first_layer)[start - begin :]
            by_token = (sums * self._head_keys).sum(1)
            padded = torch.nn.functional.pad(by_token, (0, -len(by_token) % size))
            by_block = padded.view(-1, size).sum(1)

        def result() -> list[int]:
            with torch.cuda.stream(self._stream):
                on_host = by_block.cpu()
            numbers: list[int] = _unsigned(on_host).tolist()
            return numbers

        return result


def checksums_of(kv_cache: Tensor, geometry: PoolGeometry) -> Checksums:
    """Those that are fastest where the cache lies."""
    if kv_cache.is_cuda:
        return TorchChecksums(kv_cache, geometry)
    return HostChecksums(kv_cache.detach().view(torch.uint8).reshape(-1).numpy(), geometry)


def _unsigned(x: Tensor) -> NDArray[np.uint64]:
    return x.numpy().view(np.uint64)
