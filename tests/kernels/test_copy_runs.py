"""Runs are copied byte for byte, wherever they lie, and nothing else is touched."""

import numpy as np
import pytest
import torch

from diptych.kernels import reference

module = pytest.importorskip("diptych.kernels.copy_runs")

SIZE = 1 << 20


def scattered(lengths: list[int], align: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs at multiples of `align`, in no order, that do not overlap at either side."""
    rng = np.random.default_rng(5)
    length = np.asarray(lengths, np.int64)
    sides = []
    for _ in range(2):
        order = rng.permutation(len(length))
        gaps = rng.integers(0, 3, len(length)) * align
        starts = np.empty(len(length), np.int64)
        at = 0
        for i, gap in zip(order, gaps, strict=True):
            starts[i] = at = -(-(at + gap) // align) * align
            at += length[i]
        assert at <= SIZE
        sides.append(starts)
    return sides[0], sides[1], length


@pytest.mark.parametrize(
    ("lengths", "align"),
    [
        ([16], 16),
        ([4096] * 100, 16),
        ([128 << 10, 48, 300 << 10, 16, 8192], 16),
        ([1, 3, 17, 4097, 70_001, 150_000], 1),
        ([64, 200, 8], 8),
    ],
)
def test_bytes_arrive_where_they_belong_and_nowhere_else(device, lengths, align) -> None:
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    target = torch.full((SIZE,), 9, dtype=torch.uint8, device=device)
    expected = target.clone()
    runs = scattered(lengths, align)
    reference.copy_runs(source, expected, *runs)
    module.copy_runs(source.data_ptr(), target.data_ptr(), *runs, device)
    assert torch.equal(target, expected)


def test_an_address_off_the_grid_is_no_less_exact(device) -> None:
    """The runs are multiples of 16 bytes, the memory begins at none."""
    source = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    target = torch.full((SIZE,), 9, dtype=torch.uint8, device=device)
    expected = target.clone()
    runs = scattered([4096, 32], 16)
    reference.copy_runs(source[3:], expected, *runs)
    module.copy_runs(source.data_ptr() + 3, target.data_ptr(), *runs, device)
    assert torch.equal(target, expected)
