"""Memory of other processes' GPUs, mapped here by CUDA IPC, and copies out of it."""

from __future__ import annotations

import ctypes
from typing import Protocol

import torch

from diptych.connectors.transports.base import Runs
from diptych.connectors.transports.orders import Mark
from diptych.errors import TransferError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory(Protocol):
    """What `CudaIpcTransport` needs of a GPU. One thread's."""

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds `address`, and how far inside it that lies.

        Raises:
            TransferError: it cannot be shared.
        """
        ...

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map another process's allocation; its address here and its bytes. Each handle once at a
        time.

        Raises:
            TransferError: this GPU does not reach it.
        """
        ...

    def close(self, address: int) -> None:
        """Unmap what `open` mapped; nothing may still read it."""
        ...

    def copy(self, source: int, target: int, runs: Runs) -> Mark:
        """Begin to copy; the event is over when all bytes are there."""
        ...


class CudaPeerMemory:
    """Of one GPU, in whose context the thread must be that calls."""

    def __init__(self, device: str) -> None:
        """
        Raises:
            TransferError: there is no CUDA driver, or no kernel to copy with.
        """
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            from diptych.kernels.copy_runs import copy_runs
        except (OSError, ImportError) as error:
            raise TransferError(f"CUDA IPC does not work here: {error}") from error
        self._device = torch.device(device)
        self._copy_runs = copy_runs
        # ahead of the model's kernels: a read is short, and somebody's second token waits for it
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def export(self, address: int) -> tuple[bytes, int]:
        base, _ = self._range(address)
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle), address - base

    def open(self, handle: bytes) -> tuple[int, int]:
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
        )
        return address.value, self._range(address.value)[1]

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, source: int, target: int, runs: Runs) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._copy_runs(source, target, runs.src, runs.dst, runs.length, self._device)
            event.record()
        return event

    def _range(self, address: int) -> tuple[int, int]:
        """The start and the bytes of the allocation that holds an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(size),
            ctypes.c_uint64(address),
        )
        return base.value, size.value

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")
