"""Checksums by blocks: the same whoever takes them, of whatever blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diptych.connectors.kv_checksums import Checksums, HostChecksums, TorchChecksums, checksums_of
from diptych.connectors.plan_geometry import PoolGeometry, Span

HEADS, LAYERS, DIM = Span(2, 5), Span(1, 5), 8


def pool_of(tokens: Tensor, block_ids: list[int], block_size: int) -> Tensor:
    """`tokens` `[T, H, L, 2, D]` in those blocks of a pool that is full of something else."""
    pool = torch.randn(12, len(HEADS), len(LAYERS), 2, block_size, DIM, dtype=tokens.dtype)
    for position, token in enumerate(tokens):
        block, slot = block_ids[position // block_size], position % block_size
        pool[block, :, :, :, slot] = token
    return pool


def both(pool: Tensor) -> list[Checksums]:
    geometry = PoolGeometry(
        num_blocks=pool.shape[0],
        block_size=pool.shape[4],
        heads=HEADS,
        layers=LAYERS,
        atom_bytes=DIM * pool.element_size(),
    )
    assert isinstance(checksums_of(pool, geometry), HostChecksums)
    return [checksums_of(pool, geometry), TorchChecksums(pool, geometry)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("start", "end", "size"), [(0, 64, 16), (32, 83, 16), (32, 83, 32)])
def test_unlike_blocks_and_both_ways_agree(
    dtype: torch.dtype, start: int, end: int, size: int
) -> None:
    torch.manual_seed(0)
    tokens = torch.randn(83, len(HEADS), len(LAYERS), 2, DIM).to(dtype)
    narrow, wide = [3, 0, 7, 11, 5, 2], [4, 1, 9]
    results = [
        checksums.begin(block_ids, start, end, size)()
        for block_ids, block_size in ((narrow, 16), (wide, 32))
        for checksums in both(pool_of(tokens, block_ids, block_size))
    ]
    assert all(result == results[0] for result in results)
    assert len(set(results[0])) == len(results[0]) == -(-(end - start) // size)
    assert all(0 <= number < 1 << 64 for number in results[0])


@pytest.mark.parametrize("which", [0, 1], ids=["host", "torch"])
def test_a_flipped_bit_and_heads_in_each_others_place_show_in_their_block(which: int) -> None:
    torch.manual_seed(0)
    pool = torch.randn(4, len(HEADS), len(LAYERS), 2, 16, DIM)
    checksums = both(pool)[which]
    before = checksums.begin([2, 0, 3], 0, 48, 16)()
    pool.view(torch.int32)[0, 1, 2, 1, 5, 3] ^= 1 << 17
    after = checksums.begin([2, 0, 3], 0, 48, 16)()
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    pool[3] = pool[3].flip(0)
    assert checksums.begin([2, 0, 3], 32, 48, 16)() != before[2:]
