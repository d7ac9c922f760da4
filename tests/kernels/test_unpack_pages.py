"""Attention over the pages that were unpacked is attention over the cache."""

import pytest
import torch

from diptych.kernels import reference

module = pytest.importorskip("diptych.kernels.unpack_pages")


@pytest.mark.parametrize("block_size", [16, 48, 64])
@pytest.mark.parametrize("slot_outermost", [False, True])
def test_sequences_keep_their_keys_and_values(paged_kv, block_size, slot_outermost) -> None:
    lengths = [1, 63, 0, 64, 130]
    kv = paged_kv(lengths, 3, 80, block_size, torch.float8_e4m3fn, slot_outermost)
    q = torch.randn(len(lengths), 6, 80, device=kv.seq_lens.device)
    cache = (kv.k_cache, kv.v_cache, kv.block_tables)
    pages = module.unpack_pages(*cache, kv.seq_lens, 0.5, 3.0, torch.float32)
    assert pages[0].dtype == torch.float32
    ours = reference.paged_decode_attention(q, *pages, kv.seq_lens, 0.1)
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    theirs = reference.paged_decode_attention(q, *cache, kv.seq_lens, 0.1, **scales)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
