"""The digest of what makes KV of two engines compatible; no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from diptych.errors import ModelLoadError
from diptych.hashing import namespace_digest
from diptych.models.config import ModelConfig

_MAX_HEADER_BYTES = 100_000_000
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def kv_namespace(
    config: ModelConfig,
    files: list[Path],
    *,
    dtype: str,
    kv_dtype: str,
    weights: str,
    seed: str | None,
) -> bytes:
    """Namespace of the KV of a model.

    Equal for equal weights on any machine, whatever the block size, device or layout. Headers do
    not tell fine-tunes of one base apart, so bytes sampled over the whole file count too.

    Args:
        files: the weight files; none for random weights.
        dtype, kv_dtype: what the engine computes in, and keeps.
        weights: how they are rounded when loaded.
        seed: of random weights, and what drew them.
    """
    shape = {
        name: getattr(config, name)
        for name in (
            "architecture",
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "rms_norm_eps",
            "rope_theta",
            "rope_scaling",
            "attention_bias",
            "qk_norm",
            "sliding_window",
        )
    }
    fields = [("model", json.dumps(shape, sort_keys=True)), ("dtype", dtype)]
    fields += [("kv_dtype", kv_dtype), ("weights", weights), ("seed", str(seed))]
    fields += [("file", f"{file.name}:{_file_digest(file)}") for file in files]
    return namespace_digest(fields)


def _file_digest(path: Path) -> str:
    """Over the size, the header and bytes sampled at even distances."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(size, _MAX_HEADER_BYTES):
                raise ModelLoadError(f"{path} is truncated or no safetensors file")
            state = hashlib.sha256(f"{size}:".encode() + file.read(length))
            for sample in range(_SAMPLES):
                file.seek(8 + length + (size - 8 - length) * sample // _SAMPLES)
                state.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return state.hexdigest()
