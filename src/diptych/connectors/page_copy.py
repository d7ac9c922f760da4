"""Between the paged KV cache and canonical objects: bytes only, whatever the dtype.

The cache is seen as `[num_blocks, H_kv, L, 2, block_size, D * item_bytes]` of uint8, an object as
`[H_kv, L, 2, tokens, D * item_bytes]`. On a CPU both are numpy arrays: one thread copies, where
torch would start a second pool of threads. On a GPU they are tensors, and copies run on a stream
of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.connectors.pages import TokenRange, block_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Bytes = NDArray[np.uint8] | Tensor


class CacheCopier:
    """Gathers objects from one KV cache and scatters them back."""

    def __init__(self, kv_cache: Tensor) -> None:
        """`kv_cache`: `[num_blocks, H_kv, L, 2, block_size, D]`, contiguous."""
        raw = kv_cache.view(torch.uint8)
        self._on_gpu = raw.device.type == "cuda"
        self._cache: Any = raw if self._on_gpu else raw.numpy()
        self._block_size = int(raw.shape[4])
        self._device = raw.device
        self._stream = _side_stream_of(raw.device) if self._on_gpu else None
        heads, layers, _, _, row = raw.shape[1:]
        self._shape = (int(heads), int(layers), 2, -1, int(row))
        self._host = torch.empty(0, dtype=torch.uint8)
        self.token_bytes = int(heads * layers * 2 * row)

    def mark(self) -> torch.cuda.Event | None:
        """A point in the model's stream that copies can wait for; None on a CPU."""
        return torch.cuda.current_stream(self._device).record_event() if self._on_gpu else None

    def gather(self, block_ids: Sequence[int], tokens: TokenRange) -> Bytes:
        """The object of `tokens`, on the cache's device, ordered in the current stream.

        Args:
            block_ids: the request's blocks from position 0 on.
        """
        shape = (*self._shape[:3], tokens.end - tokens.start, self._shape[4])
        page: Any = (
            torch.empty(shape, dtype=torch.uint8, device=self._device)
            if self._on_gpu
            else np.empty(shape, np.uint8)
        )
        for run in block_runs(tokens, tokens.start, self._block_size):
            page[:, :, :, run.offset : run.offset + run.num_tokens] = self._cache[
                block_ids[run.block_index], :, :, :, run.slot : run.slot + run.num_tokens
            ]
        return page  # type: ignore[no-any-return]

    def host_buffers(self, sizes: Sequence[int]) -> list[NDArray[np.uint8]]:
        """One host buffer per size, until the next call of this or `to_host`; pinned for a GPU."""
        total = sum(sizes)
        if self._host.numel() < total:
            self._host = torch.empty(total, dtype=torch.uint8, pin_memory=self._on_gpu)
        host: NDArray[np.uint8] = self._host.numpy()
        ends = np.cumsum(sizes).tolist()
        return [host[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def to_host(self, pages: Sequence[Bytes], mark: torch.cuda.Event | None) -> list[memoryview]:
        """The bytes of gathered objects, complete on return; as `host_buffers` they end."""
        if not self._on_gpu:
            return [np.asarray(page).reshape(-1).data for page in pages]
        tensors = [page for page in pages if isinstance(page, torch.Tensor)]
        buffers = self.host_buffers([page.numel() for page in tensors])
        with self._side_stream(mark):
            for page, buffer in zip(tensors, buffers, strict=True):
                page.record_stream(torch.cuda.current_stream(self._device))
                torch.from_numpy(buffer).copy_(page.view(-1), non_blocking=True)
        return [buffer.data for buffer in buffers]

    def scatter(
        self,
        data: NDArray[np.uint8],
        object_start: int,
        block_ids: Sequence[int],
        wanted: TokenRange,
        mark: torch.cuda.Event | None,
    ) -> None:
        """Write the tokens `wanted` of an object to their slots; complete on return.

        Args:
            data: `[num_bytes]`, the object from position `object_start` on, in host memory.
            mark: the copy starts no sooner than this point of the model's stream.
        """
        page: Any = data.reshape(self._shape)
        if not self._on_gpu:
            self._write(page, object_start, block_ids, wanted)
            return
        with self._side_stream(mark):
            on_device = torch.from_numpy(page).to(self._device, non_blocking=True)
            self._write(on_device, object_start, block_ids, wanted)

    def _write(
        self, page: Any, object_start: int, block_ids: Sequence[int], wanted: TokenRange
    ) -> None:
        for run in block_runs(wanted, object_start, self._block_size):
            self._cache[
                block_ids[run.block_index], :, :, :, run.slot : run.slot + run.num_tokens
            ] = page[:, :, :, run.offset : run.offset + run.num_tokens]

    @contextmanager
    def _side_stream(self, mark: torch.cuda.Event | None) -> Iterator[None]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield
        self._stream.synchronize()


def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
