import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from diptych.errors import InvalidRequestError, ModelLoadError
from diptych.text.tokenizer import Tokenizer
from tests.text.vocabularies import END, byte_level, sentence_piece
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize(
    "text", ["the capital", "héllo 👩\u200d🔬", "  two  spaces\n", "<|im_start|>user"]
)
def test_text_survives_the_round_trip(directory: Path, text: str) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens_of_the_directory_are_known(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer.token_text(tokenizer.eos_token_id) == "<|im_end|>"
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.vocab_size == json.loads((directory / "config.json").read_text())["vocab_size"]


def test_bos_is_added_as_the_config_says(directory: Path, tmp_path: Path) -> None:
    plain = Tokenizer.from_directory(directory)
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    config = {"bos_token": {"content": "<|im_start|>"}, "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with_bos = Tokenizer.from_directory(tmp_path)
    ids = plain.encode("the")
    assert with_bos.encode("the") == [with_bos.bos_token_id, *ids]
    assert with_bos.encode("the", add_special_tokens=False) == ids


def test_bytes_of_single_tokens() -> None:
    tokenizer = sentence_piece()
    by_text = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    assert {b" ", b"a", b"\xff", b"\n", END.encode()} <= by_text.keys()
    assert tokenizer.token_text(by_text[b"\xff"]) == "\ufffd"


@pytest.mark.parametrize("token_id", [100_000, -1, 2**40])
def test_an_id_without_a_token_has_no_bytes(token_id: int) -> None:
    assert byte_level().token_bytes(token_id) == b""


def test_text_that_is_not_unicode_is_the_callers_mistake() -> None:
    with pytest.raises(InvalidRequestError, match="UTF-8"):
        byte_level().encode("a\ud800b")


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[1]")],
)
def test_broken_files_are_named(directory: Path, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((directory / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_directory(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)


def test_many_threads_get_the_same_ids(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    texts = [f"the capital number {i} 🔬" for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == [tokenizer.encode(t) for t in texts]


def test_a_long_prompt_lets_other_threads_run(directory: Path) -> None:
    tokenizer = Tokenizer.from_directory(directory)
    text = "the capital of France is Paris, " * 40_000
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, text)
        beats = 0
        while not encoding.done():
            time.sleep(0.001)
            beats += 1
        assert len(encoding.result()) > 100_000
    assert beats > 20
