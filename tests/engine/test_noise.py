import math

import torch

from diptych.kernels.noise import gumbel_noise, random_bits

GOLDEN = [
    [-1180416570, 119544175, 1826903161, -1997671052],
    [-121100933, -365325421, -2135567514, -86871940],
    [711562383, -1596492356, -1306111457, -1248321891],
]


def test_the_bits_are_these_for_ever() -> None:
    """Two halves of one request run in different processes, perhaps of different versions."""
    bits = random_bits(torch.tensor([42, -1, 2**62]), torch.tensor([0, 7, 100000]), 4)
    assert bits.tolist() == GOLDEN


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds = torch.tensor([1, 2, 1, 3])
    positions = torch.tensor([0, 0, 5, 9])
    together = gumbel_noise(seeds, positions, 1000)
    for i in range(4):
        alone = gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 300)
        assert torch.equal(alone[0], together[i, :300])


def test_noise_follows_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(64), torch.arange(64) * 3, 4096).double()
    assert noise.isfinite().all()
    assert abs(noise.mean() - 0.5772156649) < 0.01
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    below_zero = (noise < 0).double().mean()
    assert abs(below_zero - math.exp(-1)) < 0.003


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    by_seed = gumbel_noise(torch.arange(256), torch.zeros(256, dtype=torch.int64), 1024)
    by_position = gumbel_noise(torch.zeros(256, dtype=torch.int64), torch.arange(256), 1024)
    for noise in (by_seed, by_position):
        for shifted in (noise.roll(1, 0), noise.roll(1, 1)):
            correlation = torch.corrcoef(torch.stack((noise.flatten(), shifted.flatten())))[0, 1]
            assert abs(correlation) < 0.01
    assert abs(torch.corrcoef(torch.stack((by_seed.flatten(), by_position.flatten())))[0, 1]) < 0.01
