"""The memories that transports read from and into."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diptych.connectors.sealed_memory import SIZE_SEALS

if TYPE_CHECKING:
    from torch import Tensor

STAGING_BYTES = 4 << 20


class HostMemory:
    """Bytes of this process: an array, or a memfd that other processes of the host can map."""

    device = "cpu"

    def __init__(self, array: NDArray[np.uint8], fd: int | None = None) -> None:
        """`array` is `[num_bytes]`, contiguous and writable; it is kept alive."""
        if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
            raise ValueError("host memory is a contiguous uint8 array of one axis")
        self.array = array
        self.fd = fd
        self.num_bytes = array.nbytes
        self.address = int(array.ctypes.data)
        self.view = array.data
        self._close_fd: weakref.finalize[..., mmap.mmap] | None = None

    @classmethod
    def shared(cls, num_bytes: int, name: str = "diptych-kv") -> HostMemory:
        """Fresh zero pages of a memfd: taken when first written, nothing in /dev/shm, gone with
        the last process that maps them.

        Raises:
            OSError: there is not that much address space.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
            mapped = mmap.mmap(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        memory = cls(np.frombuffer(mapped, np.uint8), fd)
        # the descriptor goes with the last view of the pages, a tensor's included
        memory._close_fd = weakref.finalize(mapped, os.close, fd)
        return memory

    @classmethod
    def of_tensor(cls, tensor: Tensor, fd: int | None = None) -> HostMemory:
        """A contiguous CPU tensor's bytes."""
        import torch

        return cls(tensor.detach().view(torch.uint8).reshape(-1).numpy(), fd)

    def load(self, offset: int, target: memoryview) -> None:
        target[:] = self.view[offset : offset + len(target)]

    def store(self, offset: int, source: memoryview) -> None:
        self.view[offset : offset + len(source)] = source

    def close(self) -> None:
        """Give the descriptor back now; the pages live as long as somebody maps them."""
        if self._close_fd is not None:
            self._close_fd()
        self.fd = None


class DeviceMemory:
    """A GPU tensor's bytes, reached from the host through one pinned staging buffer.

    NIXL reads it where it lies; the other transports stage it, on a stream of their own, so that
    neither waits for the model's kernels.
    """

    fd = None
    view = None

    def __init__(self, tensor: Tensor) -> None:
        """`tensor` is contiguous and on a CUDA device."""
        import torch

        self._torch = torch
        self._bytes = tensor.detach().view(torch.uint8).reshape(-1)
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        self._host: memoryview = self._staging.numpy().data
        self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        self.device = f"cuda:{tensor.device.index}"
        self.num_bytes = self._bytes.numel()
        self.address = int(tensor.data_ptr())

    def load(self, offset: int, target: memoryview) -> None:
        for at, size in _pieces(len(target)):
            start = offset + at
            self._copy(self._staging[:size], self._bytes[start : start + size])
            target[at : at + size] = self._host[:size]

    def store(self, offset: int, source: memoryview) -> None:
        for at, size in _pieces(len(source)):
            self._host[:size] = source[at : at + size]
            start = offset + at
            self._copy(self._bytes[start : start + size], self._staging[:size])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        with self._torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def memory_of(tensor: Tensor, fd: int | None = None) -> HostMemory | DeviceMemory:
    """The memory of a contiguous tensor; `fd` is the memfd that a CPU tensor lies in, if one."""
    if tensor.device.type == "cuda":
        return DeviceMemory(tensor)
    return HostMemory.of_tensor(tensor, fd)


def fresh_memory(device: str, num_bytes: int) -> HostMemory | DeviceMemory:
    """New memory: a memfd on the host, a tensor on a GPU."""
    if device == "cpu":
        return HostMemory.shared(num_bytes)
    import torch

    return DeviceMemory(torch.empty(num_bytes, dtype=torch.uint8, device=device))


def _pieces(num_bytes: int) -> Iterator[tuple[int, int]]:
    for at in range(0, num_bytes, STAGING_BYTES):
        yield at, min(STAGING_BYTES, num_bytes - at)
