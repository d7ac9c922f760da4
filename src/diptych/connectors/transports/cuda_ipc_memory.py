"""Memory of other processes' GPUs, mapped here by CUDA IPC, and copies out of it.

Runs of half a MiB and more go to the copy engines, all in one call, on streams in turn so that one
engine starts while another ends; shorter ones to a kernel, which has many in flight at once
(docs/decisions/0019 has what each measured).
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from diptych.connectors.transports.base import Runs
from diptych.connectors.transports.orders import Mark
from diptych.errors import TransferError

_log = logging.getLogger(__name__)

HANDLE_BYTES = 64
ENGINE_RUN_BYTES = 512 << 10
_NUM_STREAMS = 4
_LAZY_PEER_ACCESS = 1
_IN_STREAM_ORDER = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: in what order sources are read; where both sides lie, 0 for unsaid."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


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
            # its calls are short: to let the interpreter go and wait for it costs more than they do
            self._cuda = ctypes.PyDLL("libcuda.so.1")
            from diptych.kernels.copy_runs import PIECE_BYTES, copy_runs
        except (OSError, ImportError) as error:
            raise TransferError(f"CUDA IPC does not work here: {error}") from error
        self._device = torch.device(device)
        self._copy_runs, self._piece_bytes = copy_runs, PIECE_BYTES
        # ahead of the model's kernels: a read is short, and somebody's second token waits for it
        self._streams = [
            torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
            for _ in range(_NUM_STREAMS)
        ]
        self._copy_batch = _CopyBatch.of(self._cuda)

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
        if self._copy_batch is not None and runs.num_bytes >= len(runs) * ENGINE_RUN_BYTES:
            streams = self._streams[: len(runs)]
            if self._by_engines(self._copy_batch, source, target, runs, streams):
                return _AllOver([stream.record_event() for stream in streams])
        pieces = runs.split(self._piece_bytes)
        with torch.cuda.stream(self._streams[0]):
            self._copy_runs(source, target, pieces.src, pieces.dst, pieces.length, self._device)
        return _AllOver([self._streams[0].record_event()])

    def _by_engines(
        self,
        copy_batch: _CopyBatch,
        source: int,
        target: int,
        runs: Runs,
        streams: Sequence[torch.cuda.Stream],
    ) -> bool:
        """Whether the driver took them; after a refusal the kernel copies for good. What it had
        taken before is copied twice, on streams that the kernel's does not wait for: the same
        bytes."""
        count = len(streams)
        for i, stream in enumerate(streams):
            part = Runs(
                runs.src[i::count] + source, runs.dst[i::count] + target, runs.length[i::count]
            )
            code = copy_batch(part, stream.cuda_stream)
            if code:
                _log.warning("copy engines take no batches (%s): a kernel copies", self._name(code))
                self._copy_batch = None
                for taken in streams:
                    taken.synchronize()
                return False
        return True

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
            raise TransferError(f"{name}: {self._name(code)}")

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorName(code, ctypes.byref(text))
        return (text.value or b"").decode() or f"error {code}"


class _AllOver:
    """The end of copies on several streams."""

    def __init__(self, events: Sequence[Mark]) -> None:
        self._events = events

    def query(self) -> bool:
        return all(event.query() for event in self._events)


class _CopyBatch:
    """`cuMemcpyBatchAsync`, of CUDA 13 or 12.8: one call for copies that may run in any order."""

    def __init__(self, call: Any, says_which_failed: bool) -> None:
        self._call = call
        self._says_which_failed = says_which_failed

    @classmethod
    def of(cls, cuda: ctypes.CDLL) -> _CopyBatch | None:
        """None where the driver is older."""
        for name, says_which_failed in (
            ("cuMemcpyBatchAsync_v2", False),
            ("cuMemcpyBatchAsync", True),
        ):
            if hasattr(cuda, name):
                return cls(getattr(cuda, name), says_which_failed)
        return None

    def __call__(self, runs: Runs, stream: int) -> int:
        """Begin to copy runs between addresses; 0 or the driver's error."""
        columns = [
            np.ascontiguousarray(c.astype(np.uint64)) for c in (runs.dst, runs.src, runs.length)
        ]
        attributes, first = _CopyAttributes(order=_IN_STREAM_ORDER), ctypes.c_size_t(0)
        arguments: list[Any] = [ctypes.c_void_p(column.ctypes.data) for column in columns]
        arguments += [
            ctypes.c_size_t(len(runs)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._says_which_failed:
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        return int(self._call(*arguments, ctypes.c_void_p(stream)))
