"""Ops on eight-bit floats give what their plain-torch meaning gives."""

import pytest
import torch

from diptych.kernels import fp8_tensor, reference
from diptych.kernels.fp8_tensor import Fp8Tensor
from diptych.models.fp8 import quantise_squares

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
@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize(
    ("tokens", "outputs", "columns"),
    [(1, 64, 128), (7, 300, 1000), (17, 130, 576), (64, 64, 2048), (90, 256, 320), (0, 64, 64)],
)
def test_linear_layers(tokens, outputs, columns, tiled, dtype, device) -> None:
    torch.manual_seed(0)
    x = fp8_tensor.quantise_rows(torch.randn(tokens, columns, device=device), 128 * tiled)
    weight = torch.randn(outputs, columns, device=device)
    weight = quantise_squares(weight) if tiled else fp8_tensor.quantise_rows(weight)
    bias = torch.randn(outputs, device=device).to(dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-3 if device.type == "cuda" else 1e-4
    close = {"rtol": tolerance, "atol": tolerance * columns**0.5}

    for given in (bias, None):
        y = fp8_linear.fp8_linear(x, weight, dtype, given)
        assert y.dtype == dtype
        torch.testing.assert_close(y, fp8_tensor.fp8_linear(x, weight, dtype, given), **close)
    parts = fp8_linear.fp8_linear_parts(x, weight, dtype)
    expected = fp8_tensor.fp8_linear_parts(x, weight, dtype)
    torch.testing.assert_close(reference.joined(parts, dtype), expected, **close)
