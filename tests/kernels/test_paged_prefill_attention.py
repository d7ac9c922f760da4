"""Prefill attention of ragged batches over scrambled pages; what no sequence owns is NaN."""

import pytest
import torch

from diptych.kernels import reference

module = pytest.importorskip("diptych.kernels.paged_prefill_attention")


def check(kv, queries, group, dtype, padding=0, scales=(1.0, 1.0), **options) -> None:
    heads, dim = kv.k_cache.shape[1] * group, kv.k_cache.shape[3]
    device, total = kv.seq_lens.device, sum(queries)
    # a slice of a wider projection, as the model has it
    q = torch.randn(total + padding, 2 * heads, dim, device=device).to(dtype)[:, :heads]
    starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables, starts, kv.seq_lens, dim**-0.5)
    scaled = {"k_scale": scales[0], "v_scale": scales[1]}
    ours = module.paged_prefill_attention(*args, **options, **scaled)
    theirs = reference.paged_prefill_attention(*args, **scaled)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours[:total], theirs[:total], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(2, 1, 64, 16), (1, 3, 80, 32), (1, 4, 128, 64)],
)
def test_prefill_matches_reference(paged_kv, kv_heads, group, dim, block_size, dtype) -> None:
    # a token, whole prompts, chunks after a prefix, a sequence with nothing this step
    queries, lengths = [1, 63, 0, 64, 65, 7], [1, 63, 40, 130, 65, 200]
    check(paged_kv(lengths, kv_heads, dim, block_size, dtype), queries, group, dtype)


@pytest.mark.parametrize("window", [1, 16, 50])
def test_a_window_hides_older_keys(paged_kv, window) -> None:
    kv, queries = paged_kv([100, 190, 3], 1, 64, 16), [100, 20, 1]
    # pages that lie before the window of every query belong to others by now
    gone = kv.block_tables[1, : (190 - 20 - window + 1) // 16].long()
    kept = kv.k_cache[gone], kv.v_cache[gone]
    q = torch.randn(sum(queries), 3, 64, device=kv.seq_lens.device)
    starts = torch.tensor([0, *queries], device=q.device).cumsum(0).int()
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables, starts, kv.seq_lens, 0.125, window)
    kv.k_cache[gone] = kv.v_cache[gone] = torch.nan
    ours = module.paged_prefill_attention(*args)
    kv.k_cache[gone], kv.v_cache[gone] = kept
    theirs = reference.paged_prefill_attention(*args)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_padding_rows_of_a_captured_batch_are_harmless(paged_kv) -> None:
    kv = paged_kv([40, 17], 1, 64, 16)
    check(kv, [40, 1], 3, torch.float32, padding=200)


@pytest.mark.parametrize("hint", [0, 3])
def test_a_hint_changes_the_tiles_and_not_the_answer(paged_kv, hint) -> None:
    kv = paged_kv([33, 64, 3], 1, 64, 64)
    check(kv, [3, 2, 3], 3, torch.float32, max_query_len=hint)


def test_fp16_and_a_cache_with_the_head_inside_the_slot(paged_kv) -> None:
    kv = paged_kv([65, 3], 3, 64, 16, torch.float16, slot_outermost=True)
    check(kv, [65, 3], 1, torch.float16)


def test_a_wide_head(paged_kv) -> None:
    check(paged_kv([20], 1, 256, 16, torch.bfloat16), [20], 2, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_of_8_bits_are_scaled(paged_kv, dtype) -> None:
    kv = paged_kv([40, 21], 2, 64, 16, torch.float8_e4m3fn)
    check(kv, [40, 3], 2, dtype, scales=(0.5, 3.0))
