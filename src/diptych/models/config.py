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

# a few times what the largest open models have: a typo is named before it takes all memory
_MOST_PARAMETERS = 10**13
_MOST_LAYERS = 4096


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

    @property
    def num_parameters(self) -> int:
        """Of the matrices, by arithmetic; biases and norms are not in it."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return self.num_layers * layer + embeddings

    def _check(self) -> None:
        """Raise ValueError for sizes that no model has."""
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_dim", "max_position"):
            if not 0 < getattr(self, name) < 1 << 31:
                raise ValueError(f"{name} is {getattr(self, name)}")
        for name, least in (("rms_norm_eps", 0.0), ("rope_theta", 1e-9), ("sliding_window", 0.0)):
            if not least <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if self.num_parameters > _MOST_PARAMETERS or self.num_layers > _MOST_LAYERS:
            raise ValueError(
                f"{self.num_layers} layers of {self.hidden_size} make {self.num_parameters:.1e} "
                "parameters, which no model has"
            )
        _check_rope(self.rope_scaling or {})
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
        heads = _whole(raw, "num_attention_heads")
        return cls(
            path=path,
            architecture=architecture,
            vocab_size=_whole(raw, "vocab_size"),
            hidden_size=_whole(raw, "hidden_size"),
            intermediate_size=_whole(raw, "intermediate_size"),
            num_layers=_whole(raw, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_whole(raw, "num_key_value_heads", heads),
            head_dim=_whole(raw, "head_dim", _whole(raw, "hidden_size") // heads),
            max_position=_whole(raw, "max_position_embeddings", 2048),
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
    found = _token_ids(raw.get("eos_token_id"))
    generation = path / "generation_config.json"
    if generation.exists():
        found = _token_ids(_read_json(generation).get("eos_token_id", list(found)))
    return found


def _token_ids(eos: Any) -> tuple[int, ...]:
    """One id, several or none.

    Raises:
        ValueError: it is something else.
    """
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise ValueError(f"eos_token_id is {eos!r}")
    return tuple(ids)


def _whole(raw: dict[str, Any], name: str, default: int | None = None) -> int:
    """A whole number, also one that is written as 4096.0; the default where it is absent or 0.

    Raises:
        KeyError: it is absent, and there is no default.
        ValueError: it is something else.
    """
    value = raw[name] if default is None else raw.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(f"{name} is {value!r}")
    return int(value)


def _check_rope(rope: dict[str, Any]) -> None:
    """Raise ValueError for numbers of a scaling that are none, or not above 0."""
    for name, value in rope.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if not 0 < value < math.inf:
            raise ValueError(f"rope_scaling.{name} is {value!r}")
    factor = rope.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise ValueError(f"rope_scaling.factor is {factor!r}")
    if "low_freq_factor" in rope and rope["low_freq_factor"] == rope.get("high_freq_factor"):
        raise ValueError("rope_scaling has equal low_freq_factor and high_freq_factor")


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
