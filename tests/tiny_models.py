"""Tiny random models in the Hugging Face form, equal for equal arguments.

Real files, no network: config.json, generation_config.json, model.safetensors, tokenizer.json (a
byte-level BPE) and tokenizer_config.json (a chat template). Built in a fraction of a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = (
    "the capital of France is Paris, and the capital of Italy is Rome.",
    "What is the weather in the mountains? It is raining there, they said.",
    "a request enters the queue, waits for a block, and leaves with its tokens.",
    "one, two, three, four, five: the numbers that we count on our hands.",
    "Explain how the heart of the machine turns the wheels of the train.",
    "user system assistant Hello, how are you today? I am fine, thank you.",
)
_EXTRAS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"model_type": "llama", "rope_theta": 10000.0},
    "MistralForCausalLM": {"model_type": "mistral", "sliding_window": 24, "rope_theta": 10000.0},
    "Qwen2ForCausalLM": {"model_type": "qwen2", "rope_theta": 10000.0},
    "Qwen3ForCausalLM": {
        "model_type": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_theta": 1000000.0,
    },
}


def make_tiny_model(
    directory: Path, architecture: str = "LlamaForCausalLM", *, seed: int = 0, **overrides: Any
) -> Path:
    """Write a model of `architecture` into `directory` (made if absent) and return it.

    `overrides` replace keys of config.json; the weights follow the shapes that it then names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = _make_config(architecture, tokenizer) | overrides
    _write_json(directory / "config.json", config)
    eos = config["eos_token_id"]
    _write_json(directory / "generation_config.json", {"bos_token_id": eos, "eos_token_id": eos})
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": TURN_START,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    weights = _make_weights(config, np.random.default_rng(seed))
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def _make_tokenizer() -> Tokenizer:
    """256 bytes, three special tokens and merges up to 384 entries; no token is prepended."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=[AddedToken(t, special=True) for t in (END_OF_TEXT, TURN_START, TURN_END)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 3, trainer)
    return tokenizer


def _make_config(architecture: str, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": tokenizer.token_to_id(TURN_START),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
    } | _EXTRAS[architecture]


def _make_weights(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights that spread the logits, so that greedy choices are not ties."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    weights: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        value = rng.standard_normal((rows, columns), dtype=np.float32)
        weights[name] = value * np.float32(gain / np.sqrt(columns))

    def vector(name: str, size: int, centre: float) -> None:
        value = rng.standard_normal(size, dtype=np.float32)
        weights[name] = np.float32(centre) + np.float32(0.2) * value

    matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=3.0)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        vector(at + "input_layernorm.weight", hidden, 1.0)
        for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            matrix(at + f"self_attn.{name}_proj.weight", size, hidden, gain=1.5)
            if config["architectures"] == ["Qwen2ForCausalLM"] or config.get("attention_bias"):
                vector(at + f"self_attn.{name}_proj.bias", size, 0.0)
        if config["architectures"] == ["Qwen3ForCausalLM"]:
            vector(at + "self_attn.q_norm.weight", dim, 1.0)
            vector(at + "self_attn.k_norm.weight", dim, 1.0)
        matrix(at + "self_attn.o_proj.weight", hidden, q_size)
        if config.get("attention_bias"):
            vector(at + "self_attn.o_proj.bias", hidden, 0.0)
        vector(at + "post_attention_layernorm.weight", hidden, 1.0)
        matrix(at + "mlp.gate_proj.weight", inner, hidden)
        matrix(at + "mlp.up_proj.weight", inner, hidden)
        matrix(at + "mlp.down_proj.weight", hidden, inner)
    vector("model.norm.weight", hidden, 1.0)
    if not config["tie_word_embeddings"]:
        matrix("lm_head.weight", config["vocab_size"], hidden, gain=3.0)
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
