"""The scatter writes each token's slot and nothing else."""

import pytest
import torch

from diptych.kernels import reference

store_kv = pytest.importorskip("diptych.kernels.store_kv").store_kv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "block_size"),
    [(1, 1, 64, 16), (63, 8, 128, 64), (200, 3, 80, 32)],
)
def test_store_kv_matches_reference(tokens, heads, dim, block_size, dtype, device) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(tokens, 3 * heads, dim, device=device).to(dtype)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 2 * heads :]
    slots = torch.randperm(256, device=device)[:tokens]
    slots[3::7] = -1
    shape = (256 // block_size, heads, 3, 2, block_size, dim)
    ours = torch.full(shape, torch.nan, dtype=dtype, device=device)
    theirs = ours.clone()

    store_kv(k, v, ours[:, :, 1, 0], ours[:, :, 1, 1], slots)
    reference.store_kv(k, v, theirs[:, :, 1, 0], theirs[:, :, 1, 1], slots)

    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_cache_of_e4m3_holds_scaled_and_saturated_values(dtype, device) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 20, 3, 64, device=device).to(dtype).unbind()
    k[0, 0, :4] = torch.tensor([1e4, -1e4, torch.inf, -torch.inf])
    # below the least normal number, and half-way between neighbours
    k[1, 0, :4] = torch.tensor([0.25, 2.0**-8, 2.0**-10, 1.0625]) * 0.25
    slots = torch.randperm(64, device=device)[:20]
    ours = torch.zeros(4, 3, 1, 2, 16, 64, device=device).to(torch.float8_e4m3fn)
    theirs = ours.clone()

    store_kv(k, v, ours[:, :, 0, 0], ours[:, :, 0, 1], slots, 0.25, 3.0)
    reference.store_kv(k, v, theirs[:, :, 0, 0], theirs[:, :, 0, 1], slots, 0.25, 3.0)

    assert torch.equal(ours.float(), theirs.float())
    block, offset = divmod(int(slots[0]), 16)
    assert ours[block, 0, 0, 0, offset, :4].float().tolist() == [448.0, -448.0, 448.0, -448.0]
    block, offset = divmod(int(slots[1]), 16)
    assert ours[block, 0, 0, 0, offset, :4].float().tolist() == [0.25, 2.0**-8, 0.0, 1.0]


def test_no_tokens_write_nothing(device) -> None:
    kv = torch.zeros(2, 1, 1, 2, 16, 64, device=device)
    empty = torch.zeros(0, 1, 64, device=device)
    slots = torch.zeros(0, dtype=torch.int64, device=device)
    store_kv(empty, empty, kv[:, :, 0, 0], kv[:, :, 0, 1], slots)
    assert not kv.any()
