"""What is wrong with a model, a key file or a setting is named when a router or engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diptych.config import EngineConfig, KVStoreConfig, RedisConfig, RouterConfig
from diptych.engine.core import make_engine_core
from diptych.errors import DiptychError
from diptych.services.router.main import serve
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bad-start") / "model")


async def router_error(model: Path, **settings: Any) -> str:
    """The message with which a router does not start."""
    config = RouterConfig(port=0, workers=["127.0.0.1:1"], **settings)
    engine = EngineConfig(model=str(model))
    with pytest.raises(DiptychError) as caught:
        async with serve(config, RedisConfig(), engine):
            pass
    return caught.value.message


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        (b"", "must hold one or two ticket keys, not 0"),
        (b"secret\n", "line 1 is not key_id:secret"),
        (b"k1:abcd\n", "line 1 is not key_id:secret"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"k1:" + b"a" * 64 + b"\nk1:" + b"b" * 64, "line 2 repeats the key id k1"),
    ],
    ids=["missing", "empty", "words", "short", "binary", "repeated"],
)
async def test_a_bad_file_of_ticket_keys_is_named(
    tmp_path: Path, model: Path, content: bytes | None, text: str
) -> None:
    keys = tmp_path / "ticket-keys"
    if content is not None:
        keys.write_bytes(content)

    message = await router_error(model, ticket_keys=str(keys))

    assert str(keys) in message
    assert text in message
    assert "aaaa" not in message, "keys are never shown"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read"),
        (b"justakey\n", "line 1 is not name:key"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"me:a\nme:b\n", "line 2 repeats the name me"),
    ],
    ids=["missing", "words", "binary", "repeated"],
)
async def test_a_bad_file_of_api_keys_is_named(
    tmp_path: Path, model: Path, content: bytes | None, text: str
) -> None:
    keys = tmp_path / "api-keys"
    if content is not None:
        keys.write_bytes(content)

    message = await router_error(model, api_keys=str(keys))

    assert str(keys) in message
    assert text in message
    assert "justakey" not in message, "keys are never shown"


Damage = Callable[[Path], object]


def write(name: str, content: bytes) -> Damage:
    return lambda model: (model / name).write_bytes(content)


def cut(name: str, size: int) -> Damage:
    return lambda model: (model / name).write_bytes((model / name).read_bytes()[:size])


def remove(name: str) -> Damage:
    return lambda model: (model / name).unlink()


def change(**keys: Any) -> Damage:
    def apply(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | keys))

    return apply


ROUTER_READS: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.json"), "has no config.json"),
    "config cut": (cut("config.json", 100), "config.json cannot be read"),
    "config binary": (write("config.json", b"\xff\xfe\x00"), "config.json cannot be read"),
    "config a list": (write("config.json", b"[1]"), "config.json is not a JSON object"),
    "architecture": (change(architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel"),
    "no architecture": (change(architectures=None), "architecture none"),
    "architecture a number": (change(architectures=5), "architecture 5"),
    "activation": (change(hidden_act="gelu"), "activation gelu"),
    "hidden size of words": (change(hidden_size="big"), "config.json is not valid"),
    "hidden size 0": (change(hidden_size=0), "config.json is not valid"),
    "hidden size beyond all": (change(hidden_size=1 << 70), "config.json is not valid"),
    "heads 0": (change(num_attention_heads=0), "config.json is not valid"),
    "heads that share no KV heads": (change(num_key_value_heads=3), "config.json is not valid"),
    "more layers than memory": (change(num_hidden_layers=10**7), "10000000 layers of"),
    "more parameters than any": (
        change(num_hidden_layers=4000, intermediate_size=1 << 30),
        "parameters, which no model",
    ),
    "a fractional vocabulary": (change(vocab_size=384.5), "vocab_size is 384.5"),
    "layers of yes": (change(num_hidden_layers=True), "num_hidden_layers is True"),
    "an end of words": (change(eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "an end below 0": (change(eos_token_id=[2, -1]), "eos_token_id is [2, -1]"),
    "an end of fractions": (change(eos_token_id=2.5), "eos_token_id is 2.5"),
    "RoPE divided by 0": (
        change(rope_scaling={"rope_type": "linear", "factor": 0}),
        "rope_scaling.factor is 0",
    ),
    "RoPE divided by no number": (
        change(rope_scaling={"rope_type": "linear", "factor": float("nan")}),
        "rope_scaling.factor is nan",
    ),
    "RoPE divided by words": (
        change(rope_scaling={"rope_type": "linear", "factor": "two"}),
        "rope_scaling.factor is 'two'",
    ),
    "no norm": (change(rms_norm_eps=-1), "rms_norm_eps is -1"),
    "no RoPE": (change(rope_theta=-5), "rope_theta is -5"),
    "a RoPE of no number": (change(rope_theta=float("nan")), "rope_theta is nan"),
    "no tokenizer": (remove("tokenizer.json"), "tokenizer.json does not exist"),
    "tokenizer cut": (cut("tokenizer.json", 1000), "tokenizer.json cannot be read"),
    "tokenizer of nothing": (write("tokenizer.json", b'{"a": 1}'), "tokenizer.json cannot be read"),
    "tokenizer config": (write("tokenizer_config.json", b"{no"), "tokenizer_config.json cannot be"),
    "chat template": (
        write("tokenizer_config.json", b'{"chat_template": "{% for x in %}"}'),
        "the chat template does not parse",
    ),
    "generation config": (write("generation_config.json", b"{no"), "generation_config.json cannot"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("case", ROUTER_READS)
async def test_a_damaged_file_that_the_router_reads_is_named(
    tmp_path: Path, model: Path, case: str
) -> None:
    damage, text = ROUTER_READS[case]
    copy = shutil.copytree(model, tmp_path / "model")
    damage(copy)

    assert text in await router_error(copy)


ENGINE_READS: dict[str, tuple[Damage, dict[str, Any], str]] = {
    "weights cut": (cut("model.safetensors", 50_000), {}, "model.safetensors is missing, trunc"),
    "header cut": (cut("model.safetensors", 500), {}, "model.safetensors is truncated"),
    "weights empty": (cut("model.safetensors", 0), {}, "model.safetensors is missing, trunc"),
    "an index of numbers": (
        write("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        {},
        "5 is missing",
    ),
    "an index of lists": (
        write("model.safetensors.index.json", b'{"weight_map": [1]}'),
        {},
        "index.json cannot be read",
    ),
    "a header without end": (
        write("model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000),
        {},
        "is missing, truncated or damaged",
    ),
    "a module's name of numbers": (
        change(quantization_config={"quant_method": "fp8", "ignored_layers": [5]}),
        {},
        "5 is no name of a module",
    ),
    "a module's name of no expression": (
        change(quantization_config={"quant_method": "fp8", "ignored_layers": ["re:("]}),
        {},
        "is no expression",
    ),
    "no weights": (remove("model.safetensors"), {}, "has no .safetensors file"),
    "a tensor missing": (change(num_hidden_layers=5), {}, "has no tensor model.layers.3"),
    "a tensor of another shape": (change(hidden_size=128), {}, "(384, 64), not (384, 128)"),
    "dtype of the model": (change(dtype="float8_e4m3"), {}, "dtype float8_e4m3"),
    "rope": (change(rope_scaling={"rope_type": "odd", "factor": 2}), {}, "RoPE scaling 'odd'"),
    "too few blocks": (lambda _: None, {"num_kv_blocks": 1}, "does not fit max_model_len"),
    "too many blocks": (
        lambda _: None,
        {"num_kv_blocks": 99_999_999_999},
        "a KV cache of 99999999999 blocks",
    ),
    "context too long": (lambda _: None, {"max_model_len": 9999}, "max_model_len 9999 is more"),
    "no such device": (lambda _: None, {"device": "cuda:99"}, "device cuda:99"),
}


@pytest.mark.parametrize("case", ENGINE_READS)
def test_what_an_engine_cannot_load_is_named(tmp_path: Path, model: Path, case: str) -> None:
    damage, settings, text = ENGINE_READS[case]
    copy = shutil.copytree(model, tmp_path / "model")
    damage(copy)
    config = EngineConfig(**{"model": str(copy), "device": "cpu", **settings})

    with pytest.raises(DiptychError) as caught:
        make_engine_core(config)

    assert text in caught.value.message


def test_a_disk_tier_of_no_name_does_not_fill_the_working_directory() -> None:
    with pytest.raises(DiptychError, match="ssd_path must not be empty"):
        KVStoreConfig(ssd_path="")
