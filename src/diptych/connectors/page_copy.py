"""Between the paged KV cache and canonical objects: bytes only, whatever the dtype.

The cache is seen as `[num_blocks, H_kv, L, 2, block_size, D * item_bytes]` of uint8, an object as
`[H_kv, L, 2, tokens, D * item_bytes]`. On a CPU both are numpy arrays: one thread copies, where
torch would start a second pool of threads. On a GPU they are tensors, and copies run on streams of
their own, one a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diptych.connectors.pages import TokenRange, block_runs
from diptych.connectors.pinned_pool import PinnedPools

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
        self._local = threading.local()
        self._pools = PinnedPools(raw.device) if self._on_gpu else None
        heads, layers, _, _, row = raw.shape[1:]
        self._shape = (int(heads), int(layers), 2, -1, int(row))
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

    def reach(self, pools: Sequence[memoryview]) -> None:
        """These whole pools are mapped here now, and no copy of another is under way: a GPU is to
        copy to and from them directly."""
        if self._pools is not None:
            self._pools.keep_only(pools)

    def fetch(self, page: Bytes, mark: torch.cuda.Event | None, view: memoryview) -> None:
        """Write a gathered object's bytes into `view`; complete on return. Any thread may call."""
        target = np.frombuffer(view, np.uint8)
        if not isinstance(page, torch.Tensor):
            np.copyto(target, page.reshape(-1))
            return
        direct = self._pools.tensor(view) if self._pools is not None else None
        host = direct if direct is not None else self._staging(view.nbytes)
        with self._side_stream(mark) as stream:
            page.record_stream(stream)
            host.copy_(page.view(-1), non_blocking=True)
        if direct is None:
            np.copyto(target, host.numpy())

    def scatter(
        self,
        view: memoryview,
        object_start: int,
        block_ids: Sequence[int],
        wanted: TokenRange,
        mark: torch.cuda.Event | None,
    ) -> None:
        """Write the tokens `wanted` of an object to their slots; complete on return. Any thread.

        Args:
            view: `[num_bytes]`, the object from position `object_start` on, in host memory.
            mark: the copy starts no sooner than this point of the model's stream.
        """
        source = np.frombuffer(view, np.uint8)
        if not self._on_gpu:
            self._write(source.reshape(self._shape), object_start, block_ids, wanted)
            return
        host = self._pools.tensor(view) if self._pools is not None else None
        if host is None:
            host = self._staging(view.nbytes)
            np.copyto(host.numpy(), source)
        with self._side_stream(mark):
            on_device = host.to(self._device, non_blocking=True).view(self._shape)
            self._write(on_device, object_start, block_ids, wanted)

    def _write(
        self, page: Any, object_start: int, block_ids: Sequence[int], wanted: TokenRange
    ) -> None:
        for run in block_runs(wanted, object_start, self._block_size):
            self._cache[
                block_ids[run.block_index], :, :, :, run.slot : run.slot + run.num_tokens
            ] = page[:, :, :, run.offset : run.offset + run.num_tokens]

    @contextmanager
    def _side_stream(self, mark: torch.cuda.Event | None) -> Iterator[torch.cuda.Stream]:
        """This thread's own stream, behind `mark`; its work is complete after the block."""
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = _side_stream_of(self._device)
        with torch.cuda.stream(stream):
            if mark is not None:
                stream.wait_event(mark)
            yield stream
        stream.synchronize()

    def _staging(self, num_bytes: int) -> Tensor:
        """Pinned bytes of this thread's own, until its next call."""
        buffer = getattr(self._local, "staging", None)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._local.staging = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=True
            )
        return buffer[:num_bytes]


def _side_stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
