"""Flags beat the environment, which beats the file, which beats the defaults."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from diptych.config_sources import SECTIONS, add_flags, load
from diptych.errors import ConfigError


def parse(*argv: str, sections: tuple[str, ...] = ("engine", "router")) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_flags(parser, *sections)
    return vars(parser.parse_args(argv))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_each_source_beats_the_one_below(tmp_path: Path) -> None:
    file = write(tmp_path / "a.yaml", "router: {port: 1, grpc_port: 2, admin_port: 3}\n")
    environment = {"DIPTYCH_ROUTER_PORT": "10", "DIPTYCH_ROUTER_GRPC_PORT": "20"}

    router = load(("router",), {"router.port": "100"}, environment, file)["router"]

    assert (router.port, router.grpc_port, router.admin_port) == (100, 20, 3)
    assert router.host == "127.0.0.1"


def test_flags_carry_every_kind_of_value() -> None:
    flags = parse(
        "--no-enable-prefix-caching",
        "--cpu-kv-cache-bytes=64MiB",
        "--max-model-len=128",
        "--workers",
        "a:1",
        "b:2",
        "--kv-transfer-config",
        '{"kv_connector": "StoreConnector", "kv_connector_extra_config": {"x": 1}}',
    )

    settings = load(("engine", "router"), flags, {})

    assert settings["engine"].enable_prefix_caching is False
    assert settings["engine"].cpu_kv_cache_bytes == 64 << 20
    assert settings["engine"].max_model_len == 128
    assert settings["router"].workers == ["a:1", "b:2"]
    assert settings["engine"].kv_transfer_config.kv_connector_extra_config == {"x": 1}


def test_what_show_prints_loads_again(tmp_path: Path) -> None:
    import yaml

    flags = {"engine.kv_transfer_config": '{"kv_connector": "StoreConnector"}'}
    first = load(tuple(SECTIONS), flags, {})
    file = write(tmp_path / "a.yaml", yaml.safe_dump(first.as_dict()))

    assert load(tuple(SECTIONS), {}, {}, file).as_dict() == first.as_dict()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {prot: 1}", "unknown key prot"),
        ("ruoter: {port: 1}", "unknown section ruoter"),
        ("kvstore: {pool: 1}", "unknown key pool"),
        ("router: {port: many}", "router.port must be a whole number"),
        ("engine: {dtype: float8}", "dtype must be one of"),
        ("engine: {block_size: 24}", "multiple of 16"),
        ("engine: {enable_prefix_caching: maybe}", "must be true or false"),
        ("engine: {kv_transfer_config: {kv_roll: x}}", "unknown key kv_roll"),
        ("- a list", "one mapping per section"),
        ("router: [1]", "must be a mapping"),
        ("router: {port: 1", "cannot be read"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(("engine", "router"), {}, {}, write(tmp_path / "a.yaml", text))


def test_an_unknown_variable_of_a_known_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match="DIPTYCH_ROUTER_PROT"):
        load(("router",), {}, {"DIPTYCH_ROUTER_PROT": "1"})


def test_variables_of_others_are_left_alone() -> None:
    load(("router",), {}, {"DIPTYCH_CACHE": "/x", "ROUTER_PROT": "1"})
