from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch

from diptych.errors import ModelLoadError
from diptych.kernels.dispatch import select_ops
from diptych.models.config import ModelConfig
from diptych.models.llama import Decoder
from diptych.models.loader import DummyWeights, SafetensorsWeights, weight_files
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "m")


def load(model: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    with SafetensorsWeights(model, dtype, CPU) as weights:
        return Decoder(ModelConfig.from_directory(model), weights, select_ops(CPU), 64, CPU)


def edit(model: Path, **changes: np.ndarray | None) -> None:
    """Replace tensors, or remove those that are None; `/` in a name stands for a dot."""
    tensors = load_file(model / "model.safetensors")
    for name, value in changes.items():
        name = name.replace("/", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, model / "model.safetensors")


def test_tensors_that_are_used_together_lie_in_one(model: Path) -> None:
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    theirs = load_file(model / "model.safetensors")
    with SafetensorsWeights(model, torch.float32, CPU) as weights:
        fused = weights.load(names, [64, 32, 32], 64)
    np.testing.assert_array_equal(fused.numpy(), np.concatenate([theirs[n] for n in names]))


def test_shards_are_found_through_the_index(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, model / shard)
    save_file({"other": np.zeros(1)}, model / "consolidated.safetensors")
    index = {name: shard for shard, members in shards.items() for name in members}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    load(model)

    (model / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"b\.safetensors is missing"):
        load(model)


def test_weights_come_in_the_type_that_is_asked_for(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    halved = {name: torch.from_numpy(array).bfloat16() for name, array in tensors.items()}
    save_torch(halved, model / "model.safetensors")
    with SafetensorsWeights(model, torch.float32, CPU) as weights:
        loaded = weights.load([Q_PROJ], [64], 64)
    assert torch.equal(loaded, halved[Q_PROJ].float())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: edit(m, **{Q_PROJ: None}), f"no tensor {Q_PROJ}"),
        (lambda m: edit(m, **{"lm_head.weight": None}), "no tensor lm_head.weight"),
        (
            lambda m: edit(m, **{Q_PROJ: np.zeros((32, 64), np.float32)}),
            rf"{Q_PROJ} .* shape \(32, 64\), not \(64, 64\)",
        ),
        (
            lambda m: edit(m, **{Q_PROJ: np.zeros((64, 64), np.float64)}),
            f"{Q_PROJ} .* dtype F64; supported are F32, F16, BF16",
        ),
        (lambda m: truncate(m, 0.9), "truncated or damaged"),
        (lambda m: truncate(m, 0.01), "truncated or damaged"),
        (lambda m: (m / "model.safetensors").write_bytes(b""), "truncated or damaged"),
        (lambda m: (m / "model.safetensors").unlink(), r"has no \.safetensors file"),
    ],
)
def test_damaged_weights_are_refused_by_name(model: Path, damage, message: str) -> None:
    damage(model)
    with pytest.raises(ModelLoadError, match=message):
        load(model)


def test_a_rope_scaling_that_is_not_known_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", rope_scaling={"rope_type": "yarn", "factor": 2.0})
    with pytest.raises(ModelLoadError, match=r"'yarn' .* not supported"):
        load(model)


def test_dummy_weights_are_equal_for_equal_seeds() -> None:
    first, again, other = (DummyWeights(torch.float32, CPU, seed, False) for seed in (1, 1, 2))
    drawn = [weights.load(["w"], [8], 16) for weights in (first, again, other)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_weight_files_are_in_order(model: Path) -> None:
    assert weight_files(model) == [model / "model.safetensors"]


def truncate(model: Path, share: float) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
