"""What a model directory says about itself; no torch here.

Reads `config.json` (and `generation_config.json`) of a Hugging Face directory into one value.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.errors import ModelLoadError

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one model.

    Raises:
        ModelLoadError: (from `from_directory`) the directory or its config.json is missing, broken,
            or names an architecture that is not supported.
    """

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    sliding_window: int
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    quantization: dict[str, Any] | None = None

    @classmethod
    def from_directory(cls, path: Path) -> ModelConfig:
        raw = _read_json(path / "config.json")
        named = raw.get("architectures")
        architecture = named[0] if isinstance(named, list) and named else named or "none"
        if architecture not in ARCHITECTURES:
            raise ModelLoadError(
                f"architecture {architecture} of {path} is not supported; "
                f"supported are {', '.join(ARCHITECTURES)}"
            )
        activation = raw.get("hidden_act") or "silu"
        if activation not in ("silu", "swish"):
            raise ModelLoadError(f"activation {activation} of {path} is not supported, only silu")
        try:
            config = cls._from_raw(path, architecture, raw)
            config._check()
            return config
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{path / 'config.json'} is not valid: {error!r}") from error

    def _check(self) -> None:
        """Raise ValueError for sizes that no model has."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position"):
            if not 0 < getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} is {getattr(self, name)}")
        for name, least in (("rms_norm_eps", 0.0), ("rope_theta", 1e-9), ("sliding_window", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"{self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} KV heads"
            )

    @classmethod
    def _from_raw(cls, path: Path, architecture: str, raw: dict[str, Any]) -> ModelConfig:
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
        if rope.get("rope_type", rope.get("type", "default")) == "default":
            rope = {}
        heads = int(raw["num_attention_heads"])
        return cls(
            path=path,
            architecture=architecture,
            vocab_size=int(raw["vocab_size"]),
            hidden_size=int(raw["hidden_size"]),
            intermediate_size=int(raw["intermediate_size"]),
            num_layers=int(raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
            max_position=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(theta),
            rope_scaling=rope or None,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            attention_bias=bool(raw.get("attention_bias", architecture == "Qwen2ForCausalLM")),
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_sliding_window(architecture, raw),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_eos_token_ids(path, raw),
            quantization=dict(raw.get("quantization_config") or {}) or None,
        )


def _sliding_window(architecture: str, raw: dict[str, Any]) -> int:
    """Positions a query sees; 0 for all. Qwen's field counts only where `use_sliding_window`."""
    window = raw.get("sliding_window") or 0
    if architecture.startswith("Qwen"):
        return int(window) if raw.get("use_sliding_window") else 0
    return int(window) if architecture == "MistralForCausalLM" else 0


def _eos_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json."""
    eos = raw.get("eos_token_id")
    generation = path / "generation_config.json"
    if generation.exists():
        eos = _read_json(generation).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist") from None
    except (OSError, RecursionError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return value
