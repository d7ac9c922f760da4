"""File to GPU at the rate of the link: several threads fill pinned buffers, copies run behind."""

from __future__ import annotations

import os
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

# one copies about 2 GB/s out of the page cache; the link takes 55
_MOST_THREADS = 16
_BUFFER_BYTES = 4 << 20


class ByteSource(Protocol):
    """Where bytes come from."""

    def read_into(self, buffer: memoryview, start: int) -> None: ...


class _Buffer:
    """Pinned memory, and the end of the last copy out of it."""

    def __init__(self, num_bytes: int) -> None:
        self.pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.host = self.pinned.numpy().data
        self.left = torch.cuda.Event()  # type: ignore[no-untyped-call]


class StagedCopy:
    """Reads ranges of files into tensors on one GPU; a context manager that holds the threads."""

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffer_bytes = buffer_bytes
        self._buffers: queue.Queue[_Buffer] = queue.Queue()
        num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        # one is filled while the other is copied
        for _ in range(2 * num_threads):
            self._buffers.put(_Buffer(buffer_bytes))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="weights")

    def close(self) -> None:
        """Wait for the copies; the buffers may go."""
        self._threads.shutdown()
        self._stream.synchronize()

    def read(self, source: ByteSource, start: int, target: Tensor) -> None:
        """Fill `target`, bytes `[N]` on the GPU, with those of `source` from `start` on.

        Later work of the current stream finds them there.
        """
        current = torch.cuda.current_stream(target.device)
        self._stream.wait_stream(current)  # whoever had this memory before is done with it
        pieces = [
            self._threads.submit(
                self._copy, source, start + at, target[at : at + self._buffer_bytes]
            )
            for at in range(0, len(target), self._buffer_bytes)
        ]
        for piece in pieces:
            piece.result()
        current.wait_stream(self._stream)

    def _copy(self, source: ByteSource, start: int, target: Tensor) -> None:
        buffer = self._buffers.get()
        try:
            buffer.left.synchronize()
            count = len(target)
            source.read_into(buffer.host[:count], start)
            with torch.cuda.stream(self._stream):
                target.copy_(buffer.pinned[:count], non_blocking=True)
                buffer.left.record(self._stream)
        finally:
            self._buffers.put(buffer)
