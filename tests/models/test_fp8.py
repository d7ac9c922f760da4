"""Weights of e4m3: rounded when loaded, or from checkpoints that hold them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diptych import LLM, SamplingParams
from diptych.config import EngineConfig
from diptych.engine.executor import UniprocExecutor
from diptych.errors import ConfigError, ModelLoadError
from diptych.kernels.dispatch import select_ops
from diptych.kernels.fp8_tensor import E4M3, Fp8Tensor, dequantise, quantise_rows
from diptych.models.fp8 import quantise_squares
from diptych.models.fp8_scheme import Fp8Scheme
from diptych.models.layers import load_matrix
from diptych.models.loader import SafetensorsWeights
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")
# matrices of whole squares of 128
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2}
PROMPTS = ["the capital of France is", "What is the weather in the mountains?", "one, two,"]
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "dynamic": False},
            "input_activations": {"type": "float", "num_bits": 8, "strategy": "token"},
        }
    },
    "ignore": ["lm_head"],
}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
TILED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def by_tensor(weight: Tensor) -> Fp8Tensor:
    values, scale = quantise_rows(weight.reshape(1, -1))
    return Fp8Tensor(values.view(weight.shape), scale.view(()))


WAYS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "channel": (CHANNEL, quantise_rows, "weight_scale"),
    "tensor": (TENSOR, by_tensor, "weight_scale"),
    "tiled": (TILED, quantise_squares, "weight_scale_inv"),
}


def write_fp8(plain: Path, target: Path, way: str, ignored: tuple[str, ...] = ()) -> Path:
    """The model `plain` with its linear layers in e4m3, but for those `ignored`."""
    config, quantise, suffix = WAYS[way]
    config = json.loads(json.dumps(config))
    if ignored:
        config.setdefault("ignore", []).extend(ignored)
    weights: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module in ignored:
            weights[name] = tensor
            continue
        weights[name], weights[f"{module}.{suffix}"] = quantise(tensor)
        if config.get("activation_scheme") == "static":
            weights[f"{module}.input_scale"] = torch.tensor(0.01)
    make_tiny_model(target, quantization_config=config, **SIZES)
    save_file(weights, target / "model.safetensors")
    return target


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain", **SIZES)


def answers(model: Path, **settings) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens, and the log probabilities of all prompt tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, prompt_logprobs=0)
    with LLM(str(model), device="cpu", num_kv_blocks=64, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    prompts = [at for o in outputs for at in o.prompt_logprobs or () if at is not None]
    logprobs = [next(iter(at.values())).logprob for at in prompts]
    return [o.outputs[0].token_ids for o in outputs], torch.tensor(logprobs)


def test_a_checkpoint_of_e4m3_needs_no_flag_and_answers_as_weights_rounded_when_loaded(
    plain: Path, tmp_path: Path
) -> None:
    rounded = answers(plain, quantization="fp8")
    for settings in ({}, {"quantization": "fp8"}):
        stored = answers(write_fp8(plain, tmp_path / "m", "channel"), **settings)
        assert stored[0] == rounded[0]
        assert torch.equal(stored[1], rounded[1])


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_scale_is_near_the_plain_model(plain: Path, tmp_path: Path, way: str) -> None:
    _, logprobs = answers(plain)
    _, eight = answers(write_fp8(plain, tmp_path / "m", way))
    # 4 significant bits in every product; not one of them left out
    assert 1e-3 < (eight - logprobs).abs().mean() < 0.5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rows", "columns"), [([256, 128, 200], 256), ([40], 300), ([128], 64)])
def test_a_matrix_multiplies_what_was_rounded(
    tmp_path: Path, way: str, rows: list[int], columns: int
) -> None:
    torch.manual_seed(0)
    _, quantise, suffix = WAYS[way]
    names = [f"m{i}" for i in range(len(rows))]
    parts = [quantise(torch.randn(count, columns) * (i + 1)) for i, count in enumerate(rows)]
    tensors = {"m0.bias": torch.randn(rows[0]), "m1.bias": torch.randn(1), "m2.bias": torch.ones(1)}
    tensors = tensors if len(rows) == 1 else {}
    for name, (values, scale) in zip(names, parts, strict=True):
        tensors |= {f"{name}.weight": values, f"{name}.{suffix}": scale}
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(7, columns)
    scheme = Fp8Scheme(stored=True, tiled=way == "tiled")
    with SafetensorsWeights(tmp_path, torch.float32, CPU, scheme) as weights:
        matrix = load_matrix(select_ops(CPU), weights, names, rows, columns)
    weight = torch.cat(
        [
            values.float() * scale if way == "tensor" else dequantise(Fp8Tensor(values, scale))
            for values, scale in parts
        ]
    )
    expected = dequantise(quantise_rows(x, 128 if way == "tiled" else 0)) @ weight.T
    expected += tensors.get("m0.bias", torch.zeros(()))
    torch.testing.assert_close(matrix(x), expected, rtol=1e-4, atol=1e-3)
    exact = x @ weight.T + tensors.get("m0.bias", torch.zeros(()))
    assert 0.005 < (matrix(x) - exact).norm() / exact.norm() < 0.05


def test_kv_of_rounded_weights_has_another_name(plain: Path) -> None:
    config = EngineConfig(model=str(plain), device="cpu", max_model_len=256, num_kv_blocks=64)
    executors = [UniprocExecutor(replace(config, quantization=q)) for q in (None, "fp8", "fp8")]
    names = [executor.kv_namespace for executor in executors]
    assert names[0] != names[1] == names[2]


def test_rows_alone_decide_their_rounding(plain: Path) -> None:
    whole, _ = answers(plain, quantization="fp8")
    chunked = answers(plain, quantization="fp8", max_num_batched_tokens=16, max_num_seqs=2)
    assert chunked[0] == whole


def test_modules_may_be_left_out_but_not_of_one_matrix(plain: Path, tmp_path: Path) -> None:
    down = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(2))
    mixed, _ = answers(write_fp8(plain, tmp_path / "down", "channel", down))
    assert len(mixed) == len(PROMPTS)
    gate = ("model.layers.1.mlp.gate_proj",)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.gate_proj is not quantised"):
        answers(write_fp8(plain, tmp_path / "gate", "channel", gate))


def test_names_and_expressions_leave_modules_out() -> None:
    scheme = Fp8Scheme(ignored=("lm_head", "re:.*self_attn.*", "model.layers.0"))
    left_out = ("lm_head", "model.layers.3.self_attn.q_proj", "model.layers.0.mlp.up_proj")
    assert not any(scheme.covers([name]) for name in left_out)
    assert scheme.covers(["model.layers.10.mlp.up_proj"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantised by gptq: not supported"),
        (TILED | {"weight_block_size": [64, 64]}, r"squares are of \[64, 64\], not 128"),
        (TILED | {"fmt": "e5m2"}, "fmt is e5m2"),
        (CHANNEL | {"config_groups": {}}, "one group for all Linear"),
        (
            CHANNEL
            | {
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": {"type": "int", "num_bits": 4, "strategy": "group"},
                    }
                }
            },
            "int of 4 bits",
        ),
        (CHANNEL | {"config_groups": [3]}, "not supported"),
    ],
)
def test_other_ways_are_named(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    model = make_tiny_model(tmp_path / "m", quantization_config=config)
    with pytest.raises(ModelLoadError, match=message):
        answers(model)


def test_tensors_that_are_not_what_the_config_says_are_named(plain: Path, tmp_path: Path) -> None:
    model = write_fp8(plain, tmp_path / "m", "channel")
    tensors = load_file(model / "model.safetensors")
    scale = "model.layers.1.mlp.up_proj.weight_scale"
    save_file({k: v for k, v in tensors.items() if k != scale}, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"has no tensor {scale}"):
        answers(model)
    weight = scale.removesuffix("_scale")
    save_file(tensors | {weight: tensors[weight].float()}, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{weight} .* dtype F32; supported are F8_E4M3"):
        answers(model)
    save_file(tensors | {scale: torch.ones(384, 2)}, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{scale} has shape \(384, 2\), not \(384, 1\)"):
        answers(model)
    save_file(tensors | {scale: tensors[scale] * float("nan")}, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{scale} has scales that are negative or not finite"):
        answers(model)
    # a checkpoint that does not say so holds numbers without their scales
    bare = make_tiny_model(tmp_path / "bare", **SIZES)
    save_file(tensors, bare / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"dtype F8_E4M3; supported are F32, F16, BF16"):
        answers(bare)


def test_an_unknown_way_to_quantise_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be one of fp8, not 'awq'"):
        answers(plain, quantization="awq")


def test_rounding_keeps_four_bits_and_zeros() -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 300) * torch.logspace(-8, 8, 9)[:, None]
    x[4] = 0.0
    for tile in (0, 128):
        rounded = quantise_rows(x, tile)
        assert rounded.values.dtype == E4M3
        assert rounded.scale.shape == (9, 3 if tile else 1)
        back = dequantise(rounded)
        assert torch.equal(back[4], x[4])
        assert ((back - x).abs() <= 2.0**-4 * x.abs() + rounded.scale.amax(1)[:, None] / 512).all()
