"""Ops on eight-bit floats give what their plain-torch meaning gives."""

import pytest
import torch

from diptych.kernels import fp8_tensor, reference
from diptych.kernels.fp8_tensor import Fp8Tensor
from diptych.models.fp8 import quantise_squares

rms_norm = pytest.importorskip("diptych.kernels.rms_norm")
quantise_rows = pytest.importorskip("diptych.kernels.quantise_rows")
fp8_linear = pytest.importorskip("diptych.kernels.fp8_linear")


def assert_equal_but_for_ties(ours: Fp8Tensor, theirs: Fp8Tensor, share: float = 0.0) -> None:
    """`share` of the numbers may be the next ones."""
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-2 if share else 0.0, atol=0)
    differ = ours.values.float() != theirs.values.float()
    assert differ.sum() <= share * differ.numel()
    torch.testing.assert_close(ours.values.float(), theirs.values.float(), rtol=0.15, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [0, 128])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 64), (7, 300), (3, 4096), (40, 576), (0, 64)])
def test_rows_are_rounded(tokens, columns, tile, dtype, device) -> None:
    torch.manual_seed(0)
    x = (torch.randn(tokens, columns + 8, device=device) * 30).to(dtype)[:, :columns]
    x[tokens // 2 :, : columns // 2] = 0.0
    ours = quantise_rows.quantise_rows(x, tile)
    assert_equal_but_for_ties(ours, fp8_tensor.quantise_rows(x, tile))
    assert ours.values.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [0, 128])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 96), (5, 1536)])
def test_the_gated_activation_is_rounded_as_if_stored(tokens, columns, tile, dtype, device) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 2 * columns, device=device).to(dtype)
    expected = fp8_tensor.quantise_rows(reference.silu_mul(x), tile)
    assert_equal_but_for_ties(quantise_rows.silu_mul_fp8(x, tile), expected, share=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tile", [0, 128])
@pytest.mark.parametrize("num_parts", [0, 1, 3])
def test_norms_are_rounded_as_if_stored(num_parts, tile, dtype, device) -> None:
    torch.manual_seed(0)
    weight = (torch.rand(300, device=device) + 0.5).to(dtype)
    residual = torch.randn(5, 300, device=device).to(dtype)
    if num_parts == 0:
        ours = rms_norm.rms_norm_fp8(residual, weight, 1e-5, tile)
        theirs = fp8_tensor.rms_norm_fp8(residual, weight, 1e-5, tile)
    else:
        x = torch.randn(num_parts, 5, 300, device=device)
        x = x[0].to(dtype) if num_parts == 1 else x
        args = (x, residual, weight, 1e-5, tile)
        (ours, total), (theirs, expected) = (
            op(*args) for op in (rms_norm.add_rms_norm_fp8, fp8_tensor.add_rms_norm_fp8)
        )
        torch.testing.assert_close(total, expected, rtol=1e-2, atol=1e-5)
    assert_equal_but_for_ties(ours, theirs, share=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"),
    [(1, 64, 128), (7, 300, 1000), (17, 130, 576), (64, 64, 2048), (90, 256, 320), (0, 64, 64)],
)
def test_linear_layers(tokens, outputs, columns, tiled, dtype, device) -> None:
    torch.manual_seed(0)
    x = fp8_tensor.quantise_rows(torch.randn(tokens, columns, device=device), 128 * tiled)
    weight = torch.randn(outputs, columns, device=device) / columns**0.5
    weight = quantise_squares(weight) if tiled else fp8_tensor.quantise_rows(weight)
    bias = torch.randn(outputs, device=device).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-3 if device.type == "cuda" else 1e-4
    close = {"rtol": tolerance, "atol": tolerance}

    for given in (bias, None):
        y = fp8_linear.fp8_linear(x, weight, dtype, given)
        assert y.dtype == dtype
        torch.testing.assert_close(y, fp8_tensor.fp8_linear(x, weight, dtype, given), **close)
    if outputs % 2 == 0:
        y = fp8_linear.fp8_gated_linear(x, weight, dtype)
        gated = fp8_tensor.fp8_gated_linear(x, weight, dtype)
        torch.testing.assert_close(y, gated, rtol=0.05, atol=2 * tolerance)
        rounded = fp8_linear.fp8_gated_linear(x, weight, dtype, 128 * tiled)
        again = quantise_rows.quantise_rows(y, 128 * tiled)
        assert_equal_but_for_ties(rounded, again, share=0.02)
    parts = fp8_linear.fp8_linear_parts(x, weight, dtype)
    expected = fp8_tensor.fp8_linear_parts(x, weight, dtype)
    torch.testing.assert_close(reference.joined(parts, dtype), expected, **close)
