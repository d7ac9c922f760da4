"""Sampling in one pass, against torch's noise and argmax."""

import pytest
import torch

from diptych.kernels import reference

gumbel_argmax = pytest.importorskip("diptych.kernels.gumbel_argmax").gumbel_argmax


@pytest.mark.parametrize("vocab", [1, 7, 384, 2048, 2049, 50001], ids=lambda v: f"V{v}")
@pytest.mark.parametrize("rows", [1, 5])
def test_agrees_with_torch(rows: int, vocab: int, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(rows, vocab, device=device) * 3
    temperature = torch.tensor([1.0, 0.0, 0.3, 1.7, 1e-2], device=device)[:rows]
    # as columns of the engine's row tensors
    seeds = torch.tensor([[42, 0], [0, 0], [-1, 0], [2**62, 0], [-(2**63), 0]], device=device)
    positions = torch.tensor([0, 7, 100000, 1, 2], device=device)[:rows]
    args = (logits, temperature, seeds[:rows, 0], positions)
    before = logits.clone()
    assert torch.equal(gumbel_argmax(*args), reference.gumbel_argmax(*args))
    assert torch.equal(logits, before)


def test_many_draws_are_the_same_draws(device: torch.device) -> None:
    """Flat logits: the noise alone decides."""
    logits = torch.zeros(64, 3000, device=device)
    ones, at = torch.ones(64, device=device), torch.arange(64, device=device)
    drawn = gumbel_argmax(logits, ones, at * 7, at)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, ones, at * 7, at))
    assert len(set(drawn.tolist())) > 55


def test_of_equal_maxima_the_first_wins_and_masked_tokens_never(device: torch.device) -> None:
    logits = torch.full((2, 5000), -torch.inf, device=device)
    logits[:, [3000, 4100]] = 2.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    greedy = gumbel_argmax(logits, torch.zeros(2, device=device), zeros, zeros)
    assert greedy.tolist() == [3000, 3000]
    for seed in range(8):
        drawn = gumbel_argmax(logits, torch.ones(2, device=device), zeros + seed, zeros)
        assert set(drawn.tolist()) <= {3000, 4100}


def test_no_rows_give_no_tokens(device: torch.device) -> None:
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    assert gumbel_argmax(torch.zeros(0, 9, device=device), empty.float(), empty, empty).shape == (
        0,
    )
