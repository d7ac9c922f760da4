"""A model directory with random weights, so that loading can be measured as it will be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from diptych.errors import ConfigError
from diptych.kernels.dispatch import select_ops
from diptych.models.config import ModelConfig
from diptych.models.llama import Decoder
from diptych.models.loader import DummyWeights

_SHARD_BYTES = 4 << 30


class _SavedWeights:
    """`loader.Weights` that writes down every tensor it gives out, in shards."""

    def __init__(self, weights: DummyWeights, target: Path) -> None:
        self._weights = weights
        self.dtype, self.fp8 = weights.dtype, None
        self._target = target
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = self._num_shards = 0
        self._places: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def load(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        *columns: int,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        fused = self._weights.load(names, rows, *columns, dtype=dtype)
        for name, part in zip(names, torch.split(fused, list(rows)), strict=True):
            self._shard[name] = part.to("cpu", copy=True)
            self._shard_bytes += part.nbytes
        if self._shard_bytes >= _SHARD_BYTES:
            self._write_shard()
        return fused

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def number(self, name: str) -> float:
        return self._weights.number(name)

    def finish(self) -> None:
        """Write what is left, and the index."""
        if self._shard:
            self._write_shard()
        index = {"metadata": {}, "weight_map": self._places}
        path = self._target / "model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write_shard(self) -> None:
        self._num_shards += 1
        name = f"model-{self._num_shards:05}.safetensors"
        save_file(self._shard, self._target / name, metadata={"format": "pt"})
        self._places.update(dict.fromkeys(self._shard, name))
        self._shard = {}
        self._shard_bytes = 0


def write_random_model(
    source: Path, target: Path, *, device: torch.device, dtype: torch.dtype, seed: int
) -> None:
    """Write the JSON files of `source` and random safetensors of its shape into `target`.

    Args:
        device: where the numbers are drawn; it must hold all weights.

    Raises:
        ConfigError: `target` holds something already.
    """
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    config = ModelConfig.from_directory(target)
    dummy = DummyWeights(dtype, device, seed, config.attention_bias)
    weights = _SavedWeights(dummy, target)
    Decoder(config, weights, select_ops(device), 1, device)
    weights.finish()
