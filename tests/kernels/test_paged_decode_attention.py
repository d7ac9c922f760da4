"""Decode attention over scrambled pages, split or not; what no sequence owns is NaN."""

import pytest
import torch

from diptych.kernels import reference

module = pytest.importorskip("diptych.kernels.paged_decode_attention")

LENGTHS = [1, 63, 0, 64, 65, 200]


def check(kv, group, dtype, window=0, scales=(1.0, 1.0), **options) -> None:
    heads, dim = kv.k_cache.shape[1] * group, kv.k_cache.shape[3]
    device = kv.seq_lens.device
    # a slice of a wider projection, as the model has it
    q = torch.randn(len(kv.seq_lens), 2 * heads, dim, device=device).to(dtype)[:, :heads]
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables, kv.seq_lens, dim**-0.5, window)
    scaled = {"k_scale": scales[0], "v_scale": scales[1]}
    ours = module.paged_decode_attention(*args, **options, **scaled)
    theirs = reference.paged_decode_attention(*args, **scaled)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(2, 1, 64, 16), (1, 3, 80, 32), (1, 4, 128, 64), (1, 4, 8, 16)],
)
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_matches_reference(
    paged_kv, kv_heads, group, dim, block_size, splits, dtype
) -> None:
    kv = paged_kv(LENGTHS, kv_heads, dim, block_size, dtype)
    check(kv, group, dtype, num_splits=splits, min_split=64)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("window", [1, 16, 50, 150])
def test_a_window_hides_older_keys(paged_kv, window, splits) -> None:
    kv = paged_kv(LENGTHS, 1, 64, 16)
    for i, length in enumerate(LENGTHS):
        # pages that lie before the window belong to others by now
        for j in range(max(length - window, 0) // 16):
            kv.k_cache[kv.block_tables[i, j]] = torch.nan
            kv.v_cache[kv.block_tables[i, j]] = torch.nan
    q = torch.randn(len(LENGTHS), 3, 64, device=kv.seq_lens.device)
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables, kv.seq_lens, 0.125, window)
    ours = module.paged_decode_attention(*args, num_splits=splits, min_split=32)
    kv.k_cache.nan_to_num_()
    kv.v_cache.nan_to_num_()
    theirs = reference.paged_decode_attention(*args)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("splits", [2, module.MAX_JOINED, module.MAX_JOINED + 2, 20])
def test_parts_are_joined_by_the_last_program_or_by_a_second_kernel(paged_kv, splits) -> None:
    kv = paged_kv([300, 0, 33], 2, 64, 16)
    check(kv, 3, torch.float32, num_splits=splits, min_split=32)


def test_the_splits_chosen_for_a_hint_or_none_agree(paged_kv) -> None:
    kv = paged_kv([600, 5], 1, 64, 64)
    check(kv, 3, torch.float32)
    check(kv, 3, torch.float32, max_seq_len=600)


def test_fp16_and_a_cache_with_the_head_inside_the_slot(paged_kv) -> None:
    kv = paged_kv([65, 3], 3, 64, 16, torch.float16, slot_outermost=True)
    check(kv, 1, torch.float16, num_splits=2, min_split=64)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_of_8_bits_are_scaled(paged_kv, dtype, splits) -> None:
    kv = paged_kv(LENGTHS, 2, 64, 16, torch.float8_e4m3fn)
    check(kv, 2, dtype, scales=(0.5, 3.0), num_splits=splits, min_split=64)


def test_the_program_that_ends_last_joins_the_splits_and_gives_the_tickets_back(paged_kv) -> None:
    kv = paged_kv([600, 5, 0, 300, 129], 2, 64, 64)
    decode = module.PagedDecode()
    # launch after launch, of other batches in between
    for count in (5, 2, 5):
        q = torch.randn(count, 6, 64, device=kv.seq_lens.device)
        args = (q, kv.k_cache, kv.v_cache, kv.block_tables[:count], kv.seq_lens[:count], 0.125)
        theirs = reference.paged_decode_attention(*args)
        torch.testing.assert_close(decode(*args), theirs, rtol=2e-5, atol=2e-5)
    assert not decode._tickets[-1].any()
    assert len(decode._tickets) == 1


@pytest.mark.parametrize(
    ("programs", "max_keys", "splits"),
    [
        (8, 0, 64),
        (8, 32768, 64),
        (64, 8192, 8),
        (256, 8192, 4),
        (512, 1024, 1),
        (512, 32768, 16),
        (8, 200, 2),
        (8, 1, 1),
        (4096, 0, 1),
    ],
)
def test_splits_fill_the_device_and_no_more(monkeypatch, programs, max_keys, splits) -> None:
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    chosen = module._choose_splits(programs, max_keys, 128, torch.device("cuda"))
    assert chosen == splits
