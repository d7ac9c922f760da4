"""Sampling on a GPU is sampling on a CPU: the same bits, the same tokens."""

import numpy as np
import pytest
import torch

from diptych.engine.sampler import sample
from diptych.engine.sampling_rows import RowTokens, SamplingRows
from diptych.engine.step import NewRequest
from diptych.engine.vector_math import settle_vector_math
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
]


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


def sampled(device: torch.device, logits: torch.Tensor) -> list[int]:
    rows = SamplingRows(len(KINDS) * 8, logits.shape[1], device)
    tokens = np.zeros((len(KINDS) * 8, 16), np.int32)
    for row in range(len(KINDS) * 8):
        tokens[row, :5] = [row, 2, 3, 3, row % 7]
        params = SamplingParams(seed=row, **KINDS[row % len(KINDS)])
        rows.set(row, NewRequest(str(row), [], 0, params, [1], ([],), 0))
    prompts = np.full(len(KINDS) * 8, 2)
    batch = rows.batch(RowTokens(np.arange(len(KINDS) * 8), tokens, prompts, prompts + 3))
    return sample(logits.to(device), batch).tolist()


def test_every_parameter_gives_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(KINDS) * 8, 32000, generator=generator) * 3
    assert sampled(CUDA, logits.clone()) == sampled(CPU, logits.clone())
