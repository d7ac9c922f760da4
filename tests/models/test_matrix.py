import pytest
import torch

from diptych.kernels.dispatch import select_ops
from diptych.models.matrix import PackedMatrix, PlainMatrix, make_matrix

OPS = select_ops(torch.device("cpu"))
packs = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@packs
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (17, 5), (64, 384), (96, 130)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_packed_matrix_is_the_plain_one(
    tokens: int, inputs: int, outputs: int, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(tokens + inputs)
    x = torch.randn(tokens, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator) if with_bias else None
    torch.testing.assert_close(
        PackedMatrix(OPS, weight, bias)(x), PlainMatrix(OPS, weight, bias)(x)
    )


@packs
def test_an_input_may_be_a_slice() -> None:
    x, weight = torch.randn(6, 96), torch.randn(8, 32)
    part = x[::2, 32:64]
    torch.testing.assert_close(PackedMatrix(OPS, weight)(part), PlainMatrix(OPS, weight)(part))


@packs
def test_only_float32_on_a_cpu_is_packed() -> None:
    assert isinstance(make_matrix(OPS, torch.randn(4, 4)), PackedMatrix)
    assert isinstance(make_matrix(OPS, torch.randn(4, 4, dtype=torch.bfloat16)), PlainMatrix)


@packs
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_gated_matrix_combines_its_halves_packed_or_not(tokens: int) -> None:
    x, weight = torch.randn(tokens, 32), torch.randn(24, 32)
    gate, up = (x @ weight.T).chunk(2, dim=-1)
    for matrix in (PackedMatrix(OPS, weight), PlainMatrix(OPS, weight)):
        expected = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(matrix.gated(x, None), expected, rtol=1e-4, atol=1e-5)
