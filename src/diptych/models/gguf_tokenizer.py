"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from diptych.errors import DiptychError, ModelLoadError

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_CONTROL, _USER_DEFINED = 3, 4


class Metadata(Protocol):
    """What this file needs of a GGUF file."""

    source: Path

    def get(self, key: str, default: Any = None) -> Any: ...
    def special_ids(self) -> dict[str, int]: ...


def write_tokenizer(metadata: Metadata, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `target`.

    Raises:
        ModelLoadError: the kind of tokenizer is not supported (named), or its parts do not fit.
    """
    kind = metadata.get("tokenizer.ggml.model")
    makers = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if kind not in makers:
        raise ModelLoadError(f"{metadata.source}: tokenizer {kind!r} is not supported")
    try:
        tokenizer = makers[kind](metadata)
    except DiptychError:
        raise
    except Exception as error:  # the class that `tokenizers` raises
        raise ModelLoadError(f"{metadata.source}: damaged tokenizer: {error}") from error
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    ids = metadata.special_ids()
    if metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(metadata)) and "bos_token_id" in ids:
        bos = tokens[ids["bos_token_id"]]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"],
            pair=[bos, "$A", bos, "$B"],
            special_tokens=[(bos, ids["bos_token_id"])],
        )
    tokenizer.save(str(target / "tokenizer.json"))
    _write_config(metadata, tokens, ids, target)


def _write_config(metadata: Metadata, tokens: list[str], ids: dict[str, int], target: Path) -> None:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, token_id in ids.items():
        config[name.removesuffix("_id")] = tokens[token_id]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _byte_level_bpe(metadata: Metadata) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges")]
    vocabulary = {t: i for i, t in enumerate(metadata.get("tokenizer.ggml.tokens"))}
    pre = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe")
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(metadata: Metadata, pre: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if pre in ("default", "gpt-2"):
        return byte_level
    splits = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if pre not in splits:
        raise ModelLoadError(f"{metadata.source}: pre-tokenizer {pre!r} is not supported")
    split = pre_tokenizers.Split(Regex(splits[pre]), behavior="isolated", invert=False)
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, plain])


def _sentencepiece_bpe(metadata: Metadata) -> Tokenizer:
    """Llama 2's form: scores give the merges, unknown text falls back to bytes."""
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens")
    scores: list[float] = metadata.get("tokenizer.ggml.scores")
    vocabulary = {t: i for i, t in enumerate(tokens)}
    merges = []
    for token, token_id in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    merges.sort()
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    trim: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        space.insert(0, normalizers.Prepend("▁"))
        trim.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(space)
    tokenizer.decoder = decoders.Sequence(trim)
    return tokenizer


def _adds_bos(metadata: Metadata) -> bool:
    """What readers of GGUF assume where the file does not say."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    return metadata.get("tokenizer.ggml.model") == "llama" or pre in ("llama-bpe", "llama3")
