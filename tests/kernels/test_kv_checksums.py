"""Checksums of KV say what is there, not where: and no single change passes."""

import pytest
import torch
from torch import Tensor

from diptych.kernels import reference

kv_checksums = pytest.importorskip("diptych.kernels.kv_checksums").kv_checksums


def make_cache(
    device: torch.device, block_size: int = 16, layers: int = 3, heads: int = 2, dim: int = 8
) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(6, heads, layers, 2, block_size, dim, device=device)


def ids(device: torch.device, *blocks: int) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("dim", "block_size", "end"), [(64, 16, 48), (8, 64, 150), (24, 32, 1)])
def test_the_kernel_matches_reference(dim, block_size, end, dtype, device) -> None:
    cache = make_cache(device, block_size, dim=dim).to(dtype)
    blocks = ids(device, 5, 0, 3)[: -(-end // block_size)]
    for layer in (0, 7):
        ours = kv_checksums(cache, blocks, 0, end, layer)
        assert torch.equal(ours, reference.kv_checksums(cache, blocks, 0, end, layer))
    assert kv_checksums(cache, blocks[:0], 0, 0).shape == (0, 2)


def test_every_flipped_bit_shows_in_its_token_and_head_alone(device) -> None:
    cache = make_cache(device)
    blocks = ids(device, 2, 4)
    before = reference.kv_checksums(cache, blocks, 0, 32)
    flat = cache.view(torch.int32).view(-1)
    for bit in range(32):
        flip = 1 << bit if bit < 31 else -(1 << 31)
        # block 4, head 1, layer and part bit % 6, slot bit % 16
        at = (((4 * 2 + 1) * 6 + bit % 6) * 16 + bit % 16) * 8 + bit % 8
        flat[at] ^= flip
        changed = reference.kv_checksums(cache, blocks, 0, 32) != before
        assert changed.nonzero().tolist() == [[16 + bit % 16, 1]]
        flat[at] ^= flip


def test_tokens_and_layers_in_the_wrong_place_show(device) -> None:
    cache = make_cache(device)
    before = reference.kv_checksums(cache, ids(device, 2, 4), 0, 32)
    assert not (reference.kv_checksums(cache, ids(device, 4, 2), 0, 32) == before).any()
    assert not (reference.kv_checksums(cache, ids(device, 2, 4), 16, 48) == before).any()
    for axis in (2, 3, 4, 5):
        moved = cache.roll(1, axis)
        assert not (reference.kv_checksums(moved, ids(device, 2, 4), 0, 32) == before).any()


def test_what_lies_past_the_end_does_not_count(device) -> None:
    cache = make_cache(device)
    before = reference.kv_checksums(cache, ids(device, 2, 4), 0, 20)
    cache[4, :, :, :, 4:] = torch.nan
    assert torch.equal(reference.kv_checksums(cache, ids(device, 2, 4), 0, 20), before)
    cache[4, :, :, :, 3] += 1
    assert not torch.equal(reference.kv_checksums(cache, ids(device, 2, 4), 0, 20), before)


def test_unlike_blocks_ranks_and_stages_agree(device) -> None:
    wide = make_cache(device, block_size=64)
    order = ids(device, 3, 1)
    whole = reference.kv_checksums(wide, order, 64, 64 + 100)
    # blocks of 16 that hold the same tokens, somewhere else
    narrow = torch.zeros(9, 2, 3, 2, 16, 8, device=device)
    places = ids(device, 8, 0, 3, 2, 5, 1, 7)
    for index, place in enumerate(places.tolist()):
        block, slot = divmod(16 * index, 64)
        narrow[place] = wide[order[block], :, :, :, slot : slot + 16]
    assert torch.equal(reference.kv_checksums(narrow, places, 64, 64 + 100), whole)
    # one rank's heads, one stage's layers
    heads = [reference.kv_checksums(wide[:, h : h + 1], order, 64, 164) for h in range(2)]
    assert torch.equal(torch.cat(heads, 1), whole)
    first = reference.kv_checksums(wide[:, :, :1].contiguous(), order, 64, 164)
    rest = reference.kv_checksums(wide[:, :, 1:].contiguous(), order, 64, 164, 1)
    assert torch.equal(first + rest, whole)
