from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from diptych.errors import ModelLoadError
from diptych.models.gguf_tokenizer import write_tokenizer


class Metadata:
    source = Path("m.gguf")

    def __init__(self, **values: Any) -> None:
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key.rpartition(".")[2], default)

    def special_ids(self) -> dict[str, int]:
        return {"bos_token_id": 1, "eos_token_id": 2}


def sentencepiece() -> Metadata:
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ello", "▁hello"]
    special = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = special + raw + words
    return Metadata(
        model="llama",
        tokens=tokens,
        scores=[0.0] * 259 + [-float(i) for i in range(len(words))],
        token_type=[2, 3, 3] + [6] * 256 + [1] * len(words),
    )


def byte_level(pre: str) -> Metadata:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|end|>", "<|bos|>", "<|eos|>", "[user]", *alphabet, "12", "123", "Ġ1"]
    return Metadata(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_type=[3, 3, 3, 4] + [1] * (len(tokens) - 4),
        merges=["1 2", "12 3", "Ġ 1"],
    )


def write(metadata: Metadata, target: Path) -> Tokenizer:
    write_tokenizer(metadata, target)
    return Tokenizer.from_file(str(target / "tokenizer.json"))


def test_a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(
    tmp_path: Path,
) -> None:
    tokenizer = write(sentencepiece(), tmp_path)
    assert tokenizer.encode("hello").tokens == ["<s>", "▁hello"]
    # "lo" scores better than "ello"; what merges first leaves "l" alone
    assert tokenizer.encode("helllo").tokens == ["<s>", "▁h", "el", "l", "lo"]
    assert tokenizer.encode("w é").tokens == ["<s>", "▁", "<0x77>", "▁", "<0xC3>", "<0xA9>"]
    for text in ("hello hello", "é 你好\n", " w"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4"]),
        ("default", ["Ġ", "123", "4"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", ["<|bos|>", "Ġ", "123", "4"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_its_own_way(
    tmp_path: Path, pre: str, tokens: list[str]
) -> None:
    tokenizer = write(byte_level(pre), tmp_path)
    assert tokenizer.encode(" 1234").tokens == tokens
    assert tokenizer.decode(tokenizer.encode("é 12\n\n x").ids) == "é 12\n\n x"


def test_control_tokens_are_special_and_user_tokens_are_not(tmp_path: Path) -> None:
    tokenizer = write(byte_level("smollm"), tmp_path)
    ids = tokenizer.encode("[user]<|end|>").ids
    assert ids == [3, 0]
    assert tokenizer.decode(ids) == "[user]"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (Metadata(model="bert", tokens=[]), "tokenizer 'bert' is not supported"),
        (byte_level("deepseek-v3"), "pre-tokenizer 'deepseek-v3' is not supported"),
    ],
)
def test_other_tokenizers_are_named(tmp_path: Path, metadata: Metadata, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        write_tokenizer(metadata, tmp_path)
