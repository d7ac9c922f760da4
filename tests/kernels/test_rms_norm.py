"""RMSNorm rounds where the reference rounds."""

import pytest
import torch

from diptych.kernels import reference

kernels = pytest.importorskip("diptych.kernels.rms_norm")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


@DTYPES
@pytest.mark.parametrize("size", [64, 80, 576, 4096])
def test_rms_norm_matches_reference(size, dtype, device) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    ours = kernels.rms_norm(x, weight, 1e-5)
    theirs = reference.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_rms_norm_of_the_heads_of_a_projection(dtype, device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(3, 7, 80, device=device).to(dtype)
    weight = torch.randn(80, device=device).to(dtype)
    ours = kernels.rms_norm(qkv[:, 2:5], weight, 1e-6)
    theirs = reference.rms_norm(qkv[:, 2:5], weight, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@DTYPES
def test_add_rms_norm_matches_reference(dtype, device) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, 5, 600, device=device).to(dtype)
    weight = torch.randn(600, device=device).to(dtype)
    ours = kernels.add_rms_norm(x, residual, weight, 1e-5)
    theirs = reference.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=0)
    torch.testing.assert_close(ours[0], theirs[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_row_of_zeros_stays_zero(device) -> None:
    zeros = torch.zeros(1, 64, device=device)
    assert not kernels.rms_norm(zeros, torch.ones(64, device=device), 1e-5).any()
    assert kernels.rms_norm(zeros[:0], torch.ones(64, device=device), 1e-5).shape == (0, 64)


@pytest.mark.parametrize("parts", [1, 3])
@DTYPES
def test_what_comes_in_parts_is_summed_and_rounded_once(parts, dtype, device) -> None:
    torch.manual_seed(0)
    x = torch.randn(parts, 5, 600, device=device)
    residual, weight = torch.randn(5, 600, device=device).to(dtype), torch.randn(600, device=device)
    ours = kernels.add_rms_norm(x, residual, weight.to(dtype), 1e-5)
    theirs = reference.add_rms_norm(x, residual, weight.to(dtype), 1e-5)
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
