import filecmp
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from diptych.models.config import ModelConfig
from tests.tiny_models import ARCHITECTURES, make_tiny_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tiny_model_is_the_same_for_the_same_seed(tmp_path: Path, architecture: str) -> None:
    first = make_tiny_model(tmp_path / "a", architecture)
    second = make_tiny_model(tmp_path / "b", architecture)

    names = sorted(path.name for path in first.iterdir())
    match, mismatch, errors = filecmp.cmpfiles(first, second, names, shallow=False)
    assert (sorted(match), mismatch, errors) == (names, [], [])
    assert ModelConfig.from_directory(first).architecture == architecture


def test_the_tiny_tokenizer_covers_the_vocabulary_and_any_text(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    ids = tokenizer.encode("What is the capital of Zürich? 你好 🙂").ids
    assert tokenizer.decode(ids) == "What is the capital of Zürich? 你好 🙂"
    assert tokenizer.get_vocab_size() == ModelConfig.from_directory(directory).vocab_size == 384
