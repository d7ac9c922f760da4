"""Eight-bit weights and KV on a GPU: the streamed and the library's products, and whole engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from diptych import LLM, SamplingParams
from diptych.kernels import fp8_tensor, reference
from diptych.kernels.fp8_linear import fp8_gated_linear, fp8_linear, fp8_linear_parts
from diptych.kernels.fp8_tensor import Fp8Tensor, dequantise
from diptych.models.fp8 import quantise_squares
from tests.tiny_models import make_tiny_model

DEVICE = torch.device("cuda")
if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("has no e4m3", allow_module_level=True)

# of Llama-3.1-8B, and sizes that no tile divides
SHAPES = [(6144, 4096), (4096, 14336), (1000, 1552), (4104, 4112)]
ROWS = [1, 3, 16, 17, 64, 100, 128, 129, 700]
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3}
PROMPTS = [
    "the capital of France is",
    "What is the weather in the mountains? It is raining there, they said. " * 3,
    "one, two, three,",
]


def random(rows: int, columns: int, tile: int = 0) -> Fp8Tensor:
    return fp8_tensor.quantise_rows(torch.randn(rows, columns, device=DEVICE), tile)


def off(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_exact_up_to_rounding(rows, shape, tiled) -> None:
    torch.manual_seed(rows)
    x = random(rows, shape[1], 128 * tiled)
    weight = random(*shape)
    if tiled:
        weight = quantise_squares(dequantise(weight))
    bias = torch.randn(shape[0], device=DEVICE).bfloat16() * 30
    exact = dequantise(x).double() @ dequantise(weight).double().T
    # the matrix units keep 14 bits of a sum of eight-bit products
    assert off(fp8_linear(x, weight, torch.bfloat16), exact) < 6e-3
    assert off(fp8_linear(x, weight, torch.bfloat16, bias), exact + bias.double()) < 6e-3
    parts = fp8_linear_parts(x, weight, torch.bfloat16)
    assert off(reference.joined(parts, torch.float32), exact) < 6e-3
    assert off(fp8_linear(x, weight, torch.float32), exact) < 6e-3


@pytest.mark.parametrize("rows", ROWS)
def test_halves_are_gated_and_rounded(rows) -> None:
    torch.manual_seed(rows)
    x, weight = random(rows, 1552), random(4000, 1552)
    weight = Fp8Tensor(weight.values, weight.scale / 40)
    gate, up = (dequantise(x).double() @ dequantise(weight).double().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    assert off(fp8_gated_linear(x, weight, torch.bfloat16), exact) < 8e-3
    rounded = fp8_gated_linear(x, weight, torch.bfloat16, 0)
    assert isinstance(rounded, Fp8Tensor)
    assert 0.01 < off(dequantise(rounded), exact) < 0.04


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", **SIZES)


def logprobs(model: Path, device: str, **settings) -> torch.Tensor:
    """Of all prompt tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with LLM(str(model), device=device, num_kv_blocks=64, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    prompts = [at for o in outputs for at in o.prompt_logprobs or () if at is not None]
    return torch.tensor([next(iter(at.values())).logprob for at in prompts])


def tokens(model: Path, **settings) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(str(model), device="cuda", num_kv_blocks=64, **settings) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "eight",
    [
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8", "kv_cache_dtype": "fp8"},
    ],
    ids=["weights", "kv", "both"],
)
def test_a_gpu_rounds_as_a_cpu_does(model: Path, eight: dict[str, str]) -> None:
    plain = logprobs(model, "cpu", dtype="float32")
    cpu = logprobs(model, "cpu", dtype="float32", **eight)
    gpu = logprobs(model, "cuda", dtype="float32", **eight)
    # Matrix units keep 14 bits of a sum, which moves one number in thirty to its neighbour: that is
    # half as much noise as rounding makes. Noise of one's own would be 1.4 times as much.
    rounding = (plain - cpu).abs().mean()
    assert (gpu - cpu).abs().mean() < 0.7 * rounding
    assert (gpu - plain).abs().mean() < 1.3 * rounding
    half = logprobs(model, "cuda", dtype="bfloat16", **eight)
    assert (half - plain).abs().mean() < 1.5 * rounding


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_graphs_and_eager_steps_give_the_same_tokens(model: Path, quantization: str | None) -> None:
    eight = {"quantization": quantization, "kv_cache_dtype": "fp8", "dtype": "float32"}
    assert tokens(model, **eight) == tokens(model, enforce_eager=True, **eight)
