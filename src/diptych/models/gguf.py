"""GGUF to a Hugging Face directory, once, at fetch: no torch, one tensor in memory at a time.

Weights become float32 in `model.safetensors`; `config.json` keeps the type that suits the source.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from numpy.typing import NDArray
from tqdm import tqdm

from diptych.errors import ModelLoadError
from diptych.models.gguf_tokenizer import write_tokenizer

Array = NDArray[np.float32]

_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3_FACTORS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def convert_gguf(source: Path, target: Path, *, progress: bool = False) -> None:
    """Write config, weights and tokenizer of `source` into the existing directory `target`.

    Raises:
        ModelLoadError: the file is no GGUF, is truncated, or holds an architecture, tensor or
            tokenizer that is not supported (named in the message).
    """
    try:
        reader = GGUFReader(source)
        metadata = GGUFMetadata(source, reader)
        config = metadata.config(_source_dtype(reader), {t.name for t in reader.tensors})
        if "rope_freqs.weight" in (names := {t.name: t for t in reader.tensors}):
            factors = np.asarray(names["rope_freqs.weight"].data, dtype=np.float32)
            config["rope_scaling"] = _llama3_scaling(source, config, factors)
        _write_json(target / "config.json", config)
        _write_json(target / "generation_config.json", metadata.generation_config())
        write_tokenizer(metadata, target)
        _write_weights(reader, config, target / "model.safetensors", progress=progress)
    except (ValueError, KeyError, IndexError, OSError, OverflowError) as error:
        if isinstance(error, ModelLoadError):
            raise
        raise ModelLoadError(f"{source} is truncated or not a GGUF file: {error!r}") from error


class GGUFMetadata:
    """Typed access to the key-value part of a GGUF file."""

    def __init__(self, source: Path, reader: GGUFReader) -> None:
        self.source = source
        self._fields = reader.fields
        self.architecture = str(self.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelLoadError(
                f"{source}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported are {', '.join(_ARCHITECTURES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def config(self, dtype: str, tensors: set[str]) -> dict[str, Any]:
        """The config.json that transformers would have for this model."""
        if self._model("expert_count", 0):
            raise ModelLoadError(f"{self.source}: mixture of experts is not supported")
        name, model_type = _ARCHITECTURES[self.architecture]
        heads = int(self._model("attention.head_count"))
        hidden = int(self._model("embedding_length"))
        window = int(self._model("attention.sliding_window", 0))
        if window and self.architecture == "llama":
            name, model_type = "MistralForCausalLM", "mistral"
        config: dict[str, Any] = {
            "architectures": [name],
            "model_type": model_type,
            "vocab_size": len(self.get("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": int(self._model("feed_forward_length")),
            "num_hidden_layers": int(self._model("block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self._model("attention.head_count_kv", heads)),
            "head_dim": int(self._model("attention.key_length", hidden // heads)),
            "max_position_embeddings": int(self._model("context_length")),
            "rms_norm_eps": float(self._model("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self._model("rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in tensors,
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "dtype": dtype,
        }
        if window:
            config["sliding_window"] = window
            config["use_sliding_window"] = True
        if scaling := self._rope_scaling():
            config["rope_scaling"] = scaling
        return config | self.special_ids()

    def special_ids(self) -> dict[str, int]:
        """Ids of the special tokens that the file names, under Hugging Face's keys."""
        names = {"bos": "bos", "eos": "eos", "pad": "padding"}
        ids = {k: self.get(f"tokenizer.ggml.{v}_token_id") for k, v in names.items()}
        return {f"{k}_token_id": int(v) for k, v in ids.items() if v is not None}

    def generation_config(self) -> dict[str, Any]:
        config: dict[str, Any] = dict(self.special_ids())
        turn_end = self.get("tokenizer.ggml.eot_token_id")
        if turn_end is not None and turn_end != config.get("eos_token_id"):
            config["eos_token_id"] = [config["eos_token_id"], int(turn_end)]
        return config

    def _model(self, key: str, default: Any = None) -> Any:
        value = self.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelLoadError(f"{self.source} has no {self.architecture}.{key}")
        if isinstance(value, list):
            raise ModelLoadError(f"{self.source}: {key} per layer is not supported")
        return value

    def _rope_scaling(self) -> dict[str, Any] | None:
        kind = str(self._model("rope.scaling.type", "none"))
        if kind == "none":
            return None
        if kind != "linear":
            raise ModelLoadError(f"{self.source}: RoPE scaling {kind!r} is not supported")
        return {"rope_type": "linear", "factor": float(self._model("rope.scaling.factor"))}


def _llama3_scaling(source: Path, config: dict[str, Any], factors: Array) -> dict[str, Any]:
    """The scaling whose frequency divisors are `factors`: GGUF keeps the result, not the rule."""
    dim, theta = config["head_dim"], config["rope_theta"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, dim, 2) / dim)
    low, high = _LLAMA3_FACTORS["low_freq_factor"], _LLAMA3_FACTORS["high_freq_factor"]
    factor = float(factors.max())
    for original in (8192, 4096, 2048, config["max_position_embeddings"]):
        smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
        if np.allclose(1.0 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "original_max_position_embeddings": original,
                **_LLAMA3_FACTORS,
            }
    raise ModelLoadError(f"{source}: the RoPE factors in rope_freqs.weight follow no known rule")


def _source_dtype(reader: GGUFReader) -> str:
    """float32 or float16 where all matrices are that, else bfloat16 (quantised)."""
    kinds = {t.tensor_type for t in reader.tensors if len(t.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds <= {GGMLQuantizationType.F16} else "bfloat16"


def _write_weights(
    reader: GGUFReader, config: dict[str, Any], path: Path, *, progress: bool
) -> None:
    """Stream the tensors into a safetensors file: the header first, then one tensor at a time."""
    tensors = [t for t in reader.tensors if t.name != "rope_freqs.weight"]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        end = offset + 4 * int(np.prod(shape))
        header[_hf_name(tensor.name)] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [offset, end],
        }
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    bar = tqdm(tensors, desc="converting weights", unit="tensor", disable=not progress)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for array in _float32(bar, config):
            file.write(array.tobytes())


def _float32(tensors: Iterator[Any], config: dict[str, Any]) -> Iterator[Array]:
    """Dequantised tensors in Hugging Face's order of rows."""
    for tensor in tensors:
        try:
            array = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelLoadError(f"GGUF type {kind} of {tensor.name} is not supported") from error
        array = array.reshape([int(n) for n in reversed(tensor.shape)])
        if config["architectures"][0] in ("LlamaForCausalLM", "MistralForCausalLM"):
            if ".attn_q." in tensor.name:
                array = _half_split(array, config["num_attention_heads"])
            elif ".attn_k." in tensor.name:
                array = _half_split(array, config["num_key_value_heads"])
        yield np.ascontiguousarray(array, dtype="<f4")


def _half_split(array: Array, heads: int) -> Array:
    """Rows of each head from GGUF's interleaved RoPE pairs to Hugging Face's two halves."""
    pairs = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _hf_name(name: str) -> str:
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        number, part, kind = layer.groups()
        if part in _PER_LAYER:
            return f"model.layers.{number}.{_PER_LAYER[part]}.{kind}"
    part, _, kind = name.partition(".")
    if part in _TOP and kind in ("weight", "bias"):
        return f"{_TOP[part]}.{kind}"
    raise ModelLoadError(f"GGUF tensor {name} is not supported")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
