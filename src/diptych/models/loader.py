"""Where a model's weights come from: safetensors files, or a seed.

A model asks for each tensor by name and shape; tensors that are used together are asked for
together and stream straight to their rows of one fused tensor, on its device and in its type.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from diptych.errors import ModelLoadError
from diptych.kernels.fp8_tensor import E4M3
from diptych.models.fp8_scheme import Fp8Scheme
from diptych.models.safetensors_file import DTYPES, SafetensorsFile
from diptych.models.staged_copy import StagedCopy

_log = logging.getLogger(__name__)

# of checkpoints of fp8: fixed scales of activations, which are rounded as they come
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq", ".input_scale", ".output_scale")


class Weights(Protocol):
    """What a model needs to be built.

    Attributes:
        dtype: to compute in.
        fp8: which matrices are to be e4m3; None for none.
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def fp8(self) -> Fp8Scheme | None: ...

    def __contains__(self, name: str) -> bool: ...

    def load(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *columns: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """`[sum(rows), *columns]`: tensor `names[i]` of `rows[i]` rows, one below the other.

        Args:
            dtype: of the result; the type to compute in if absent. Nothing is converted to or from
                e4m3, which means nothing without its scale.

        Raises:
            ModelLoadError: a tensor is missing, truncated, or of another shape or dtype.
        """
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of tensor `name`.

        Raises:
            ModelLoadError: the tensor is missing.
        """
        ...

    def number(self, name: str) -> float:
        """The one number of tensor `name`.

        Raises:
            ModelLoadError: the tensor is missing or holds something else.
        """
        ...


class SafetensorsWeights:
    """The tensors of a model directory; a context manager that holds its files open."""

    def __init__(
        self,
        directory: Path,
        dtype: torch.dtype,
        device: torch.device,
        fp8: Fp8Scheme | None = None,
    ) -> None:
        self._directory = directory
        self.dtype = dtype
        self.fp8 = fp8
        self._device = device
        self._stack = ExitStack()
        self._files: dict[str, SafetensorsFile] = {}
        self._unread: set[str] = set()
        self._staged: StagedCopy | None = None

    def __enter__(self) -> SafetensorsWeights:
        with ExitStack() as stack:
            for path in weight_files(self._directory):
                file = stack.enter_context(closing(SafetensorsFile(path)))
                self._files.update(dict.fromkeys(file.places, file))
            if self._device.type == "cuda":
                self._staged = stack.enter_context(closing(StagedCopy(self._device)))
            self._stack = stack.pop_all()
        self._unread = {n for n in self._files if not n.endswith(_UNUSED_SUFFIXES)}
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        if self._unread and exc[0] is None:
            names = ", ".join(sorted(self._unread)[:5])
            _log.warning("%d tensors of the model are not used: %s", len(self._unread), names)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def load(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *columns: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        dtype = dtype or self.dtype
        fused = torch.empty((sum(rows), *columns), dtype=dtype, device=self._device)
        for name, part, count in zip(names, torch.split(fused, list(rows)), rows, strict=True):
            self._read(name, (count, *columns), part)
        return fused

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file_of(name).places[name].shape

    def number(self, name: str) -> float:
        shape = self.shape(name)
        value = torch.empty(1, dtype=torch.float32, device=self._device)
        self._read(name, shape if shape in ((), (1,)) else (1,), value)
        return float(value)

    def _file_of(self, name: str) -> SafetensorsFile:
        if name not in self._files:
            raise ModelLoadError(f"{self._directory} has no tensor {name}")
        return self._files[name]

    def _read(self, name: str, shape: tuple[int, ...], part: Tensor) -> None:
        """Fill `part` with the tensor: from the file straight to its place where types agree."""
        file = self._file_of(name)
        self._unread.discard(name)
        place = file.places[name]
        dtype = DTYPES.get(place.dtype)
        if dtype is None or (dtype == E4M3) != (part.dtype == E4M3):
            names = ("F8_E4M3",) if part.dtype == E4M3 else DTYPES.keys() - {"F8_E4M3"}
            raise ModelLoadError(
                f"tensor {name} of {self._directory} has dtype {place.dtype}; "
                f"supported are {', '.join(n for n in DTYPES if n in names)}"
            )
        if place.shape != shape:
            raise ModelLoadError(
                f"tensor {name} of {self._directory} has shape {place.shape}, not {shape}"
            )
        target = part if part.dtype == dtype else torch.empty_like(part, dtype=dtype)
        as_bytes = target.view(-1).view(torch.uint8)
        if self._staged is not None:
            self._staged.read(file, place.start, as_bytes)
        else:
            file.read_into(as_bytes.numpy().data, place.start)
        if target is not part:
            part.copy_(target)


class DummyWeights:
    """Random weights of the right shapes, equal for equal seeds on one kind of device."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        biases: bool,
        fp8: Fp8Scheme | None = None,
    ) -> None:
        self.dtype = dtype
        self.fp8 = fp8
        self._device = device
        self._biases = biases
        self._generator = torch.Generator(device).manual_seed(seed)

    def __contains__(self, name: str) -> bool:
        if name.endswith("_scale"):
            return False
        qkv = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
        return self._biases and name.endswith(qkv) if name.endswith(".bias") else True

    def load(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *columns: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        shape, dtype = (sum(rows), *columns), dtype or self.dtype
        if not columns:
            return torch.ones(shape, dtype=dtype, device=self._device)
        weights = torch.empty(shape, dtype=dtype, device=self._device)
        return weights.normal_(0.0, 1.0 / math.sqrt(columns[-1]), generator=self._generator)

    def shape(self, name: str) -> tuple[int, ...]:
        raise ModelLoadError(f"random weights do not know the shape of {name}")

    def number(self, name: str) -> float:
        raise ModelLoadError(f"random weights have no tensor {name}")


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, in order of name.

    Raises:
        ModelLoadError: there is none, or one that the index names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted({str(n) for n in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{index} cannot be read: {error!r}") from error
    elif (directory / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelLoadError(f"{directory} has no .safetensors file")
    files = [directory / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing")
    return files
