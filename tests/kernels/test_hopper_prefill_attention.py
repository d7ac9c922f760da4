"""The prefill kernel for Hopper, on one: ragged batches over scrambled pages, the rest NaN."""

import pytest
import torch

from diptych.kernels import reference
from diptych.kernels.attention_spec import AttentionSpec, UnfitBackendError

module = pytest.importorskip("diptych.kernels.hopper_prefill_attention")

SPEC = {
    "dtype": torch.bfloat16,
    "kv_dtype": torch.bfloat16,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "block_size": 64,
}
needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a Hopper GPU",
)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "group", "dim", "block_size"),
    [(2, 4, 128, 64), (1, 3, 128, 16), (2, 1, 64, 32), (1, 2, 64, 128)],
)
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        # a token, whole prompts, chunks after a prefix, a sequence with nothing this step
        ([1, 63, 0, 64, 65, 7], [1, 63, 40, 130, 65, 200]),
        # tiles that a group sees none of; more than one block of queries
        ([129, 1000, 5], [129, 1000, 900]),
        ([300, 128, 127], [1324, 128, 255]),
    ],
)
@pytest.mark.parametrize("turns", [True, False])
def test_prefill_matches_reference(
    paged_kv, queries, lengths, kv_heads, group, dim, block_size, dtype, turns
) -> None:
    kv = paged_kv(lengths, kv_heads, dim, block_size, dtype)
    device, total, heads = kv.seq_lens.device, sum(queries), kv_heads * group
    # a slice of a wider projection; then padding
    q = torch.randn(total + 70, 2 * heads, dim, device=device).to(dtype)[:, :heads]
    starts = torch.tensor([0, *queries], device=device).cumsum(0).int()
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables, starts, kv.seq_lens, dim**-0.5)
    ours = module.hopper_prefill_attention(*args, turns=turns)
    theirs = reference.paged_prefill_attention(*args)
    torch.testing.assert_close(ours[:total], theirs[:total], rtol=2e-2, atol=2e-2)


@needs_hopper
@pytest.mark.parametrize("limit", [0, 1 << 27], ids=["packed", "unpacked"])
def test_pages_of_8_bits_are_unpacked_where_they_fit(paged_kv, monkeypatch, limit) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED", limit)
    kv = paged_kv([40, 200, 130], 2, 128, 64, torch.float8_e4m3fn)
    attend = module.HopperPrefill(
        AttentionSpec(**(SPEC | {"kv_dtype": torch.float8_e4m3fn})), kv.seq_lens.device
    )
    q = torch.randn(40 + 70 + 3, 8, 128, device=kv.seq_lens.device).bfloat16()
    starts = torch.tensor([0, 40, 110, 113], dtype=torch.int32, device=q.device)
    args = (q, kv.k_cache, kv.v_cache, kv.block_tables[:, :-1], starts, kv.seq_lens, 0.1)
    rest = {"max_query_len": 70, "k_scale": 0.5, "v_scale": 3.0}
    theirs = reference.paged_prefill_attention(*args, **rest)
    torch.testing.assert_close(attend(*args, **rest), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "computes in"),
        ({"kv_dtype": torch.float16}, "reads no cache"),
        ({"head_dim": 80}, "not 80"),
        ({"block_size": 48}, "not 48"),
        ({"sliding_window": 50}, "window"),
    ],
)
def test_it_names_what_it_cannot_do(monkeypatch, change, reason) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UnfitBackendError, match=reason):
        module.HopperPrefill(AttentionSpec(**(SPEC | change)), torch.device("cuda"))


def test_another_device_is_refused() -> None:
    with pytest.raises(UnfitBackendError, match="Hopper"):
        module.HopperPrefill(AttentionSpec(**SPEC), torch.device("cpu"))
