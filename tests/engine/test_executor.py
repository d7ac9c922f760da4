from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from diptych.config import MIB, EngineConfig
from diptych.engine.executor import UniprocExecutor
from diptych.engine.step import SchedulerOutput
from diptych.errors import ConfigError, EngineError, ModelLoadError
from tests.tiny_models import make_tiny_model

CONFIG = EngineConfig(device="cpu", num_kv_blocks=64, max_model_len=256)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "m")


def make(model: Path, **settings) -> UniprocExecutor:
    return UniprocExecutor(replace(CONFIG, model=str(model), **settings))


def test_the_cpu_cache_has_the_blocks_that_its_budget_holds(model: Path) -> None:
    layout = make(model, num_kv_blocks=None, cpu_kv_cache_bytes=3 * MIB).kv_layout
    # 2 (k, v) x 2 heads x 3 layers x 16 tokens x 16 dimensions x 4 bytes = 12 KiB
    assert layout.num_blocks == 256
    assert (layout.block_size, layout.head_dim, layout.dtype) == (16, 16, "float32")


def test_what_cannot_fit_is_refused_with_the_arithmetic(model: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        make(model, num_kv_blocks=None, cpu_kv_cache_bytes=MIB // 10, max_model_len=200)
    for part in ("max_model_len 200", "13 blocks of 16 tokens", "there are 8", "128 or less"):
        assert part in str(refused.value)
    with pytest.raises(ConfigError, match=r"there are 0 .*; raise the budget$"):
        make(model, num_kv_blocks=None, cpu_kv_cache_bytes=10)
    with pytest.raises(ConfigError, match="num_kv_blocks = 3"):
        make(model, num_kv_blocks=3)
    with pytest.raises(ConfigError, match="2000 is more than the 1024 positions"):
        make(model, max_model_len=2000)


def test_a_missing_device_or_type_is_named(model: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cuda was asked for, but torch sees 0 GPUs"):
            make(model, device="cuda")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "float8_e4m3fn"}))
    with pytest.raises(ModelLoadError, match=r"dtype float8_e4m3fn .* not supported"):
        make(model)


def test_equal_models_have_equal_namespaces(model: Path, tmp_path: Path) -> None:
    first = make(model).kv_namespace
    assert make(make_tiny_model(tmp_path / "elsewhere")).kv_namespace == first
    assert make(model, block_size=32, max_model_len=100, num_kv_blocks=9).kv_namespace == first


def test_other_weights_types_or_rope_have_other_namespaces(model: Path, tmp_path: Path) -> None:
    namespaces = {make(model).kv_namespace, make(model, dtype="bfloat16").kv_namespace}
    namespaces.add(make(make_tiny_model(tmp_path / "a", rope_theta=5000.0)).kv_namespace)
    # a fine-tune: same names, sizes and header
    tuned = make_tiny_model(tmp_path / "b")
    tensors = {n: t * 1.01 for n, t in load_file(tuned / "model.safetensors").items()}
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    namespaces.add(make(tuned).kv_namespace)
    dummies = {make(model, load_format="dummy", seed=seed).kv_namespace for seed in (0, 0, 1)}
    assert len(namespaces) == 4
    assert len(dummies) == 2
    assert not namespaces & dummies


def test_random_weights_need_no_weight_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    make(model, load_format="dummy").execute_model(SchedulerOutput())


def test_weights_that_do_not_fit_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # more than any model has: what such a model's config allows may be granted here
    monkeypatch.setattr("diptych.models.config._MOST_PARAMETERS", 10**18)
    config = json.loads((model / "config.json").read_text())
    # beyond what a process can address: smaller ones would be granted, and taken when written
    sizes = {"vocab_size": (1 << 31) - 1, "hidden_size": 1 << 20}
    (model / "config.json").write_text(json.dumps(config | sizes))
    with pytest.raises(ModelLoadError, match="weights of m do not fit cpu"):
        make(model, load_format="dummy")


def test_an_executor_that_is_shut_down_says_so(model: Path) -> None:
    executor = make(model)
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        executor.execute_model(SchedulerOutput())
