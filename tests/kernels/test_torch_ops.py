"""The fast torch ops mean what the reference means."""

import pytest
import torch

from diptych.kernels import reference
from diptych.kernels.torch_ops import TorchOps

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = [
    pytest.param([1], id="one"),
    pytest.param([65], id="one-block-and-a-slot"),
    pytest.param([64, 64, 64], id="equal"),
    pytest.param([1, 63, 0, 64, 65, 200], id="ragged"),
    pytest.param([1000, 3, 900, 17, 1], id="very-ragged"),
]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = 1e-5 if theirs.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [0, 16, 50])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(("heads", "group", "slot_outermost"), [(3, 3, False), (2, 1, True)])
def test_decode_attention(paged_kv, lengths, window, heads, group, slot_outermost) -> None:
    kv = paged_kv(lengths, heads, 64, 16, slot_outermost=slot_outermost)
    q = torch.randn(len(lengths), 2 * heads * group, 64, device=kv.seq_lens.device)
    args = (kv.k_cache, kv.v_cache, kv.block_tables, kv.seq_lens, 0.125, window)
    # a slice of a wider projection, as the model has it
    q = q[:, : heads * group]
    close(TorchOps().paged_decode_attention(q, *args), reference.paged_decode_attention(q, *args))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [0, 16, 100])
@pytest.mark.parametrize(
    ("queries", "lengths"),
    [
        ([1], [1]),
        ([200], [200]),
        ([65, 1, 1, 0, 64, 130], [65, 17, 200, 33, 190, 131]),
        ([1, 1, 1], [5, 60, 17]),
    ],
    ids=["token", "prompt", "mixed", "decodes"],
)
def test_prefill_attention(paged_kv, queries, lengths, window, dtype) -> None:
    kv = paged_kv(lengths, 2, 80, 16, dtype)
    q = torch.randn(sum(queries), 6, 80, device=kv.seq_lens.device).to(dtype)
    starts = torch.tensor([0, *queries], device=q.device).cumsum(0).int()
    args = (kv.k_cache, kv.v_cache, kv.block_tables, starts, kv.seq_lens, 0.1, window)
    close(TorchOps().paged_prefill_attention(q, *args), reference.paged_prefill_attention(q, *args))


def test_keys_and_values_of_8_bits_are_scaled(paged_kv) -> None:
    kv = paged_kv([40, 1, 21], 2, 64, 16, torch.float8_e4m3fn)
    starts = torch.tensor([0, 40, 41, 44], dtype=torch.int32, device=kv.seq_lens.device)
    q = torch.randn(44, 4, 64, device=kv.seq_lens.device)
    args = (kv.k_cache, kv.v_cache, kv.block_tables)
    scales = {"k_scale": 0.5, "v_scale": 3.0}
    for attend in ("paged_prefill_attention", "paged_decode_attention"):
        rest = (starts, kv.seq_lens, 0.1) if "prefill" in attend else (kv.seq_lens, 0.1)
        queries = q if "prefill" in attend else q[:3]
        close(
            getattr(TorchOps(), attend)(queries, *args, *rest, **scales),
            getattr(reference, attend)(queries, *args, *rest, **scales),
        )


def test_a_plan_follows_its_inputs_when_they_change_in_place(paged_kv) -> None:
    kv, ops = paged_kv([40, 40, 33], 3, 64, 16), TorchOps()
    q = torch.randn(3, 9, 64, device=kv.seq_lens.device)
    args = (kv.k_cache, kv.v_cache, kv.block_tables, kv.seq_lens, 0.125)
    for change in (
        lambda: kv.seq_lens.sub_(1),
        lambda: kv.block_tables.copy_(kv.block_tables[[1, 0, 2]]),
        lambda: kv.seq_lens[2].fill_(0),
    ):
        close(ops.paged_decode_attention(q, *args), reference.paged_decode_attention(q, *args))
        change()
        close(ops.paged_decode_attention(q, *args), reference.paged_decode_attention(q, *args))


@pytest.mark.parametrize("padding", [False, True])
def test_store_kv(device, padding) -> None:
    ops = TorchOps()
    kv = torch.full((8, 3, 2, 2, 16, 64), torch.nan, device=device)
    ours, theirs = kv.clone(), kv.clone()
    k, v = torch.randn(5, 4, 3, 64, device=device).unbind(1)[1:3]
    slots = torch.tensor([100, 3, 17, 64, 127], device=device)
    if padding:
        slots[1:3] = -1
    for _ in range(2):
        ops.store_kv(k, v, ours[:, :, 1, 0], ours[:, :, 1, 1], slots)
        reference.store_kv(k, v, theirs[:, :, 1, 0], theirs[:, :, 1, 1], slots)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        slots += 0 if padding else -1


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_elementwise_ops(device, dtype) -> None:
    ops = TorchOps()
    x, residual = torch.randn(2, 5, 576, device=device).to(dtype)
    weight = torch.randn(576, device=device).to(dtype)
    close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    close(ops.rms_norm(x * 0, weight, 1e-5), x * 0)
    for got, want in zip(
        ops.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        close(got, want)
    close(ops.silu_mul(x), reference.silu_mul(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_rope_follows_positions_that_change_in_place(device, dtype) -> None:
    ops = TorchOps()
    qkv = torch.randn(5, 15, 80, device=device).to(dtype)
    q, k = qkv[:, :9], qkv[:, 9:12]
    cos_sin = torch.randn(100, 80, device=device)
    positions = torch.tensor([0, 99, 3, 3, 50], device=device)
    for _ in range(2):
        for got, want in zip(
            ops.rope(q, k, positions, cos_sin),
            reference.rope(q, k, positions, cos_sin),
            strict=True,
        ):
            close(got, want)
        positions[1] = 7
