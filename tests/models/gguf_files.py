"""Writes a tiny Hugging Face directory as a GGUF file, the way llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    model: Path, path: Path, *, architecture: str | None = None, quantise: bool = False
) -> Path:
    config = json.loads((model / "config.json").read_text())
    architecture = architecture or {"mistral": "llama"}.get(
        config["model_type"], config["model_type"]
    )
    writer = GGUFWriter(str(path), architecture)
    _write_metadata(writer, config)
    _write_tokenizer(writer, model, config)
    for name, array in load_file(model / "model.safetensors").items():
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            array = _interleave(array, config[heads])
        stem, _, kind = name.rpartition(".")
        ours = _NAMES.get(stem) or "blk.{}.{}".format(*_layer_name(stem))
        if quantise and array.ndim == 2:
            packed = quantize(array, GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{ours}.{kind}", packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{ours}.{kind}", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer_name(stem: str) -> tuple[str, str]:
    _, _, number, part = stem.split(".", 3)
    return number, _NAMES[part]


def _interleave(array: np.ndarray, heads: int) -> np.ndarray:
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


def _write_metadata(writer: GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])


def _write_tokenizer(writer: GGUFWriter, model: Path, config: dict) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = {t["content"] for t in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    settings = json.loads((model / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
