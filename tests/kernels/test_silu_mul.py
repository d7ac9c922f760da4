"""The gated activation, also where the sigmoid saturates."""

import pytest
import torch

from diptych.kernels import reference

silu_mul = pytest.importorskip("diptych.kernels.silu_mul").silu_mul


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's exp
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "size"), [(1, 64), (3, 1536), (2, 1111)])
def test_silu_mul_matches_reference(tokens, size, dtype, device) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, 2 * size, device=device).to(dtype)
    x[:, :3] = torch.tensor([-100.0, 0.0, 100.0], dtype=dtype)
    tolerance = 5e-6 if dtype == torch.float32 else 1e-2
    ours, theirs = silu_mul(x), reference.silu_mul(x)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
