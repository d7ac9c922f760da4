"""The fused start of attention gives what its parts give, one after another."""

import pytest
import torch

from diptych.kernels import reference

kernels = pytest.importorskip("diptych.kernels.rope_store_kv")
rope_store_kv = kernels.rope_store_kv


@pytest.mark.parametrize("many", [2, 256], ids=["program per token", "program per head"])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "block_size"),
    [
        (1, 9, 3, 64, 16),
        (7, 4, 4, 80, 64),
        (5, 8, 2, 128, 32),
        (3, 5, 1, 16, 16),
    ],
)
def test_agrees_with_its_parts(
    tokens, heads, kv_heads, dim, block_size, dtype, norm, many, device, monkeypatch
) -> None:
    monkeypatch.setattr(kernels, "_MANY_TOKENS", many)
    torch.manual_seed(0)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device).to(dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cos_sin = torch.randn(300, dim, device=device)
    positions = torch.randint(300, (tokens,), device=device)
    slots = torch.randperm(512, device=device)[:tokens]
    slots[2::3] = -1
    ours = torch.full((512 // block_size, kv_heads, 3, 2, block_size, dim), torch.nan, dtype=dtype)
    ours = ours.to(device)
    theirs = ours.clone()
    weights = (torch.rand(2, dim, device=device) + 0.5).to(dtype).unbind() if norm else (None, None)

    out, expected = (
        op(q, k, v, positions, cos_sin, kv[:, :, 1, 0], kv[:, :, 1, 1], slots, *weights, 1e-5)
        for op, kv in ((rope_store_kv, ours), (reference.rope_store_kv, theirs))
    )

    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)
    # values are moved, not computed
    assert torch.equal(ours[:, :, 1, 1].nan_to_num(), theirs[:, :, 1, 1].nan_to_num())


def test_a_cache_of_e4m3_gets_what_its_parts_give(device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(30, 8, 64, device=device).bfloat16() * 8
    q, k, v = qkv.split([4, 2, 2], dim=1)
    cos_sin = torch.randn(300, 64, device=device)
    positions, slots = torch.randint(300, (2, 30), device=device).unbind()
    slots = torch.randperm(64, device=device)[:30]
    ours = torch.zeros(4, 2, 1, 2, 16, 64, device=device).to(torch.float8_e4m3fn)
    theirs = ours.clone()
    scales = {"k_scale": 0.05, "v_scale": 3.0}

    for op, kv in ((rope_store_kv, ours), (reference.rope_store_kv, theirs)):
        views = kv[:, :, 0, 0], kv[:, :, 0, 1]
        op(q, k, v, positions, cos_sin, *views, slots, **scales)

    # a rounding of the rotation may move a key to the next number: 2**-3 apart at most
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.13, atol=0.02)
    assert torch.equal(ours[:, :, :, 1].float(), theirs[:, :, :, 1].float())
    assert (ours[:, :, :, 0].float() != theirs[:, :, :, 0].float()).float().mean() < 0.01


def test_no_tokens_write_nothing(device) -> None:
    kv = torch.zeros(2, 1, 1, 2, 16, 64, device=device)
    empty = torch.zeros(0, 1, 64, device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    table = torch.zeros(9, 64, device=device)
    views = (kv[:, :, 0, 0], kv[:, :, 0, 1])
    assert rope_store_kv(empty, empty, empty, none, table, *views, none).shape == (0, 1, 64)
    assert not kv.any()
