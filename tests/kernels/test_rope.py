"""Queries and keys of strided projections rotate as the reference says."""

import pytest
import torch

from diptych.kernels import reference

rope = pytest.importorskip("diptych.kernels.rope").rope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim"), [(1, 9, 3, 64), (5, 4, 4, 80), (2, 32, 8, 128)]
)
def test_rope_matches_reference(tokens, heads, kv_heads, dim, dtype, device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    q, k = qkv[:, :heads], qkv[:, heads : heads + kv_heads]
    cos_sin = torch.randn(300, dim, device=device)
    positions = torch.randint(300, (tokens,), device=device)
    tolerance = 5e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip(
        rope(q, k, positions, cos_sin), reference.rope(q, k, positions, cos_sin), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
