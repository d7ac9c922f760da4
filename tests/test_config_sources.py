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
        ("1: {port: 1}", "unknown section 1"),
        ("router: {1: 1}", "unknown key 1"),
        ("router: {port: {a: 1}}", "router.port must be a whole number"),
        ("router: {host: !!python/name:os.system ''}", "cannot be read"),
    ],
)
def test_a_wrong_file_is_an_error_that_says_where(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(("engine", "router"), {}, {}, write(tmp_path / "a.yaml", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("router: {port: 70000}", "port must be 0 to 65535, not 70000"),
        ("router: {port: -1}", "port must be 0 to 65535, not -1"),
        ("router: {port: 8001, admin_port: 8001}", "port and admin_port cannot both be 8001"),
        ("kvstore: {port: 9, stream_port: 9}", "port and stream_port cannot both be 9"),
        ("worker: {port: 9, admin_port: 9}", "port and admin_port cannot both be 9"),
        ("router: {request_timeout_s: .nan}", "request_timeout_s must be a number"),
        ("router: {request_timeout_s: .inf}", "request_timeout_s must be a number"),
        ("router: {request_timeout_s: 0}", "request_timeout_s must be positive"),
        ("router: {max_in_flight: 0}", "max_in_flight must be positive"),
        ("router: {max_body_bytes: -1}", "max_body_bytes must be positive"),
        ("router: {handoff: pigeon}", "handoff must be one of auto, direct, store, not 'pigeon'"),
        ("router: {workers: [nonsense]}", "workers must be host:port, not 'nonsense'"),
        ("router: {workers: ['a:b:c']}", "workers must be host:port"),
        ("router: {workers: ['a:99999']}", "workers must be host:port"),
        ("worker: {kvstore: nonsense}", "kvstore must be host:port"),
        ("worker: {advertise_address: ':1'}", "advertise_address must be host:port"),
        ("worker: {drain_s: -1}", "drain_s must not be negative"),
        ("worker: {max_frames_queued: 0}", "max_frames_queued must be positive"),
        ("redis: {heartbeat_s: -1}", "heartbeat_s must be positive"),
        ("redis: {heartbeat_s: 5, liveness_s: 1}", "liveness_s must be above heartbeat_s"),
        ("engine: {model: ''}", "model must not be empty"),
        ("engine: {num_threads: 0}", "num_threads must be positive"),
        ("engine: {cpu_kv_cache_bytes: 0}", "cpu_kv_cache_bytes must be positive"),
        ("engine: {max_model_len: 0}", "max_model_len must be positive"),
        ("engine: {max_logprobs: -1}", "max_logprobs must not be negative"),
        ("kvstore: {pool_bytes: 5}", "pool_bytes must be at least"),
        ("kvstore: {lease_s: 0}", "lease_s must be positive"),
        ("planner: {scaler: hand}", "scaler must be one of local, kubernetes"),
        ("planner: {min_decode: 3}", "min_decode is 3, above max_decode, which is 1"),
        ("planner: {worker_budget: 1}", "worker_budget must hold"),
        ("planner: {interval_s: 0}", "interval_s must be positive"),
        ("up: {prefill: 0}", "at least one prefill and one decode worker"),
        ("up: {decode: 0}", "at least one prefill and one decode worker"),
        ("up: {ready_timeout_s: -1}", "ready_timeout_s must be positive"),
    ],
)
def test_a_value_that_cannot_work_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tuple(SECTIONS), {}, {}, write(tmp_path / "a.yaml", text))


def test_addresses_may_be_of_either_family() -> None:
    flags = {"router.workers": ["a.b:1", "10.0.0.1:2", "[::1]:3"], "worker.kvstore": "[::1]:3"}

    assert load(tuple(SECTIONS), flags, {})["router"].workers == flags["router.workers"]


def test_an_unknown_variable_of_a_known_section_is_an_error() -> None:
    with pytest.raises(ConfigError, match="DIPTYCH_ROUTER_PROT"):
        load(("router",), {}, {"DIPTYCH_ROUTER_PROT": "1"})


def test_variables_of_others_are_left_alone() -> None:
    load(("router",), {}, {"DIPTYCH_CACHE": "/x", "ROUTER_PROT": "1"})
