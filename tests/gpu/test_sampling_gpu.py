"""Sampling on a GPU is sampling on a CPU: the same bits, the same tokens."""

import pytest
import torch

from diptych.engine.sampler import Sampler
from diptych.engine.sampling_rows import SamplingRows
from diptych.engine.step import NewRequest
from diptych.engine.vector_math import settle_vector_math
from diptych.kernels.dispatch import select_ops
from diptych.kernels.noise import gumbel_noise, random_bits
from diptych.sampling_params import SamplingParams

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 1.2, "top_k": 1500, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "allowed_token_ids": [5, 6, 700], "min_tokens": 9},
    {"temperature": 0.0, "bad_words_token_ids": [[3, 3, 9], [11]]},
]
COUNT = len(KINDS) * 8


@pytest.fixture(autouse=True, scope="module")
def settled() -> None:
    settle_vector_math()


def test_the_noise_has_the_same_bits() -> None:
    seeds = torch.tensor([0, 42, -1, 2**62])
    positions = torch.tensor([0, 1, 77, 100000])
    ours = random_bits(seeds.to(CUDA), positions.to(CUDA), 50000)
    assert torch.equal(ours.cpu(), random_bits(seeds, positions, 50000))
    noise = gumbel_noise(seeds.to(CUDA), positions.to(CUDA), 50000).cpu()
    torch.testing.assert_close(noise, gumbel_noise(seeds, positions, 50000), rtol=1e-5, atol=1e-5)


def sampled(device: torch.device, backend: str, logits: torch.Tensor, steps: int) -> list:
    """Tokens of some steps over the same logits: each counts in the next."""
    rows = SamplingRows(COUNT, logits.shape[1], device)
    for row in range(COUNT):
        params = SamplingParams(seed=row, **KINDS[row % len(KINDS)])
        known = [row, 2, 3, 3, row % 7]
        rows.set(row, NewRequest(str(row), known, 2, params, [1], ([],), 0))
    rows.flush()
    sampler = Sampler(select_ops(device, backend), rows)
    logits, order = logits.to(device), torch.arange(COUNT, device=device)
    return [
        sampler.sample(logits, order, torch.full_like(order, 3 + step)).tolist()
        for step in range(steps)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_parameter_gives_the_same_tokens(dtype) -> None:
    logits = (torch.randn(COUNT, 32000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    expected = sampled(CPU, "torch", logits, 4)
    assert sampled(CUDA, "triton", logits, 4) == expected
    assert sampled(CUDA, "torch", logits, 4) == expected
