"""Copies between the host and a GPU through pinned memory that stays, none of them waited for.

On a CPU nothing is copied: a tensor is the array's own memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# what a step uploads, but for long block tables and penalties' tokens
_UPLOAD_BYTES = 1 << 20
_ALIGNMENT = 16


class PinnedRing:
    """Host memory in parts that are used in turns, each again once its copies are done."""

    def __init__(self, num_bytes: int, device: torch.device, parts: int = 2) -> None:
        self._on_gpu = device.type == "cuda"
        self._parts = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(parts)
        ]
        self._events = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(parts if self._on_gpu else 0)
        ]
        self._at = 0

    @property
    def part(self) -> Tensor:
        """The part in use, uint8."""
        return self._parts[self._at]

    def turn(self) -> Tensor:
        """Go on to the next part; copies from the last one are on the current stream by now."""
        if self._on_gpu:
            self._events[self._at].record()
        self._at = (self._at + 1) % len(self._parts)
        if self._on_gpu:
            self._events[self._at].synchronize()
        return self.part


class Uploads:
    """From the host's arrays to tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = PinnedRing(_UPLOAD_BYTES if device.type == "cuda" else 0, device)
        self._used = 0

    def begin_step(self) -> None:
        """Take the other part of the pinned memory."""
        self._ring.turn()
        self._used = 0

    def put(self, array: NDArray[Any]) -> Tensor:
        """A tensor of `array`."""
        return self.put_all(array)[0]

    def put_all(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """A tensor of each, by one copy."""
        if self._device.type == "cpu":
            return [torch.from_numpy(array) for array in arrays]
        offsets, total = _offsets(arrays)
        staged = self._stage(total)
        host = staged.numpy()
        for array, offset in zip(arrays, offsets, strict=True):
            part = host[offset : offset + array.nbytes].view(array.dtype)
            part.reshape(array.shape)[...] = array
        packed = staged.to(self._device, non_blocking=True)
        return [
            packed[offset : offset + array.nbytes].view(_torch_dtype(array.dtype)).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _stage(self, num_bytes: int) -> Tensor:
        if self._used + num_bytes > self._ring.part.numel():
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        staged = self._ring.part[self._used : self._used + num_bytes]
        self._used += _aligned(num_bytes)
        return staged


class TokenReader:
    """Brings sampled tokens to the host: the one wait of a step. Two reads may be under way."""

    def __init__(self, max_tokens: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._parts: list[tuple[Tensor, torch.cuda.Event]] = []
        self._at = 0
        if self._on_gpu:
            self._parts = [
                (
                    torch.empty(max_tokens, dtype=torch.int64, pin_memory=True),
                    torch.cuda.Event(),  # type: ignore[no-untyped-call]
                )
                for _ in range(2)
            ]

    def begin(self, tokens: Tensor) -> TokenRead:
        """Start to read `tokens`, `[R]` int64, behind what has been enqueued."""
        if not self._on_gpu:
            return TokenRead(tokens.clone(), None)
        self._at = 1 - self._at
        host, event = self._parts[self._at]
        host = host[: len(tokens)]
        host.copy_(tokens, non_blocking=True)
        event.record()
        return TokenRead(host, event)


@dataclass(frozen=True, slots=True)
class TokenRead:
    """Tokens on their way to the host."""

    _host: Tensor
    _event: torch.cuda.Event | None

    @property
    def is_over(self) -> bool:
        """Whether `wait` would not wait."""
        if self._event is None:
            return True
        over: bool = self._event.query()  # type: ignore[no-untyped-call]
        return over

    def wait(self) -> NDArray[np.int64]:
        """The tokens, `[R]`; what was enqueued before them is done as well."""
        if self._event is not None:
            self._event.synchronize()
        copy: NDArray[np.int64] = self._host.numpy().copy()
        return copy


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT


def _offsets(arrays: tuple[NDArray[Any], ...]) -> tuple[list[int], int]:
    """Where each array starts in one buffer, and the size of the buffer."""
    offsets, at = [], 0
    for array in arrays:
        offsets.append(at)
        at += _aligned(array.nbytes)
    return offsets, at


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.name)
    return found
