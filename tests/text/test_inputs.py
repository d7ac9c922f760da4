from typing import Any

import pytest

import diptych
from diptych.config import KVTransferConfig
from diptych.engine.arguments import engine_config
from diptych.errors import ConfigError, InvalidRequestError, UnsupportedFeatureError
from diptych.inputs import parse_prompts


@pytest.mark.parametrize(
    ("prompts", "parsed"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ({"prompt": "a"}, ["a"]),
        ([{"prompt_token_ids": [1]}, "a"], [[1], "a"]),
        ([], []),
    ],
)
def test_all_forms_of_prompts_are_taken(prompts: Any, parsed: list[Any]) -> None:
    assert [p["prompt"] for p in parse_prompts(prompts)] == parsed


@pytest.mark.parametrize("prompts", [3, None, {}, {"prompt": 3}, [None], [{"prompt_embeds": []}]])
def test_other_forms_are_refused(prompts: Any) -> None:
    with pytest.raises(InvalidRequestError):
        parse_prompts(prompts)


def test_arguments_of_the_field_become_a_config() -> None:
    config = engine_config(
        "m",
        {
            "enforce_eager": True,
            "tensor_parallel_size": 1,
            "trust_remote_code": False,
            "tokenizer": "m",
            "dtype": "half",
            "seed": None,
            "max_model_len": 64,
            "kv_transfer_config": {"kv_connector": "SharedStorageConnector"},
        },
    )
    assert (config.model, config.dtype, config.seed, config.max_model_len) == (
        "m",
        "float16",
        0,
        64,
    )
    assert config.kv_transfer_config == KVTransferConfig(kv_connector="SharedStorageConnector")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tensor_parallel_size": 2}, UnsupportedFeatureError, "tensor_parallel_size=2"),
        ({"enable_lora": True}, UnsupportedFeatureError, "enable_lora=True"),
        ({"speculative_config": {}}, UnsupportedFeatureError, "speculative_config"),
        ({"max_modle_len": 10}, ConfigError, "unknown argument 'max_modle_len'"),
        ({"dtype": "int3"}, ConfigError, "dtype must be one of"),
        ({"kv_transfer_config": {"kv_connectr": "x"}}, ConfigError, "kv_connectr"),
        ({"kv_transfer_config": 3}, ConfigError, "must be a KVTransferConfig"),
    ],
)
def test_arguments_that_cannot_be_met_are_named(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine_config("m", arguments)


@pytest.mark.parametrize("name", diptych.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(diptych, name).__name__ == name


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_size", "x"), ("num_kv_blocks", True), ("max_model_len", 7.5), ("enforce_eager", 1)],
)
def test_an_argument_of_an_odd_type_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        engine_config("tiny", {name: value})
