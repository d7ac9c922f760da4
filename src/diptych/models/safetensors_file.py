"""One safetensors file: where each tensor lies, and its bytes.

The format: 8 bytes with the length of a header, the header in JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diptych.errors import ModelLoadError

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
_MAX_HEADER_BYTES = 100_000_000
# one call of the system reads no more than 2 GiB
_MOST_AT_ONCE = 1 << 30


class TensorPlace(NamedTuple):
    """A tensor of a file: its type as the format names it, its shape, its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """An open file. Reading from several threads at once is fine.

    Raises:
        ModelLoadError: it is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelLoadError(f"{path} is missing, truncated or damaged: {error}") from error
        try:
            self.places = self._read_header()
        except (
            OSError,
            ArithmeticError,
            AttributeError,
            KeyError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            self.close()
            raise ModelLoadError(f"{path} is missing, truncated or damaged: {error}") from error

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer of bytes with those of the file from `start` on.

        Raises:
            ModelLoadError: the file ends before, or cannot be read.
        """
        done = 0
        while done < len(buffer):
            part = buffer[done : done + _MOST_AT_ONCE]
            try:
                count = os.preadv(self._fd, [part], start + done)
            except OSError as error:
                raise ModelLoadError(f"{self.path} cannot be read: {error}") from error
            if not count:
                raise ModelLoadError(f"{self.path} is truncated or damaged: it ended while read")
            done += count

    def _read_header(self) -> dict[str, TensorPlace]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError("the header does not fit the file")
        header = json.loads(os.pread(self._fd, length, 8))
        header.pop("__metadata__", None)
        first = 8 + length
        return {name: _place(name, entry, first, size) for name, entry in header.items()}


def _place(name: str, entry: dict[str, Any], first: int, size: int) -> TensorPlace:
    begin, end = map(index, entry["data_offsets"])
    shape = tuple(map(index, entry["shape"]))
    place = TensorPlace(str(entry["dtype"]), shape, first + begin, end - begin)
    if min(shape, default=0) < 0:
        raise ValueError(f"tensor {name} has the shape {shape}")
    if not 0 <= begin <= end <= size - first:
        raise ValueError(f"tensor {name} lies beyond the end")
    dtype = DTYPES.get(place.dtype)
    if dtype is not None and math.prod(shape) * dtype.itemsize != place.num_bytes:
        raise ValueError(f"tensor {name} has {place.num_bytes} bytes, which its shape contradicts")
    return place
