"""Every op may be captured in a CUDA graph, and replays on what its inputs hold then."""

from dataclasses import replace

import pytest
import torch

from diptych.kernels import reference
from diptych.kernels import sampling_tables as tables
from diptych.kernels.sampling_tables import make_tables

DEVICE = torch.device("cuda")


@pytest.fixture
def ops():
    from diptych.kernels.dispatch import select_ops

    return select_ops(DEVICE)


def capture(call):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def make_cache(num_blocks: int):
    kv = torch.randn(num_blocks, 2, 2, 2, 16, 64, device=DEVICE)
    return kv[:, :, 1, 0], kv[:, :, 1, 1]


def test_decode_replays_with_new_lengths_and_blocks(ops) -> None:
    k_cache, v_cache = make_cache(400)
    q = torch.randn(3, 8, 64, device=DEVICE)
    tables = torch.randperm(400, device=DEVICE)[:300].int().view(3, 100)
    lengths = torch.tensor([1600, 700, 5], dtype=torch.int32, device=DEVICE)
    args = (q, k_cache, v_cache, tables, lengths, 0.125)
    graph, out = capture(lambda: ops.paged_decode_attention(*args))
    for new in ([1600, 700, 5], [1, 0, 1599], [900, 257, 256]):
        lengths.copy_(torch.tensor(new))
        tables.copy_(torch.randperm(400, device=DEVICE)[:300].int().view(3, 100))
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        expected = reference.paged_decode_attention(*args)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)


def test_prefill_replays_with_another_batch_of_the_same_size(ops) -> None:
    k_cache, v_cache = make_cache(100)
    q = torch.randn(130, 8, 64, device=DEVICE)
    tables = torch.randperm(100, device=DEVICE)[:60].int().view(3, 20)
    starts = torch.tensor([0, 100, 129, 130], dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([100, 129, 300], dtype=torch.int32, device=DEVICE)
    args = (q, k_cache, v_cache, tables, starts, lengths, 0.125)
    graph, out = capture(lambda: ops.paged_prefill_attention(*args))
    for ends, new in (([1, 2, 130], [77, 3, 300]), ([50, 50, 120], [50, 0, 99])):
        starts[1:].copy_(torch.tensor(ends))
        lengths.copy_(torch.tensor(new))
        out.fill_(torch.nan)
        graph.replay()
        expected = reference.paged_prefill_attention(*args)
        rows = ends[-1]
        torch.testing.assert_close(out[:rows], expected[:rows], rtol=2e-5, atol=2e-5)


def test_the_rest_of_a_layer_replays(ops) -> None:
    k_cache, v_cache = make_cache(10)
    qkv = torch.randn(4, 12, 64, device=DEVICE)
    q, k, v = qkv.split([8, 2, 2], dim=1)
    positions = torch.tensor([3, 0, 99, 7], device=DEVICE)
    slots = torch.tensor([3, -1, 159, 17], device=DEVICE)
    cos_sin = torch.randn(100, 64, device=DEVICE)
    weight = torch.randn(512, device=DEVICE)
    residual = torch.randn(4, 512, device=DEVICE)

    def layer(impl, k_cache, v_cache):
        rotated_q = impl.rope_store_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots)
        normed, total = impl.add_rms_norm(rotated_q.flatten(1), residual, weight, 1e-5)
        return impl.silu_mul(impl.rms_norm(normed, weight, 1e-5)), total

    graph, out = capture(lambda: layer(ops, k_cache, v_cache))
    qkv.normal_()
    positions.copy_(torch.tensor([9, 8, 7, 6]))
    slots.copy_(torch.tensor([-1, 0, 100, 101]))
    ours, theirs = (k_cache, v_cache), (k_cache.clone(), v_cache.clone())
    graph.replay()
    expected = layer(reference, *theirs)
    for got, want in zip((*out, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_sampling_replays_with_other_logits_rows_and_parameters(ops) -> None:
    logits = torch.randn(5, 5000, device=DEVICE)
    state = make_tables(8, 5000, DEVICE)
    temperatures = torch.tensor([0.0, 0.5, 1.0, 1.5, 0.9, 1.1, 0.7, 0.8], device=DEVICE)
    state.floats[:, tables.TOP_P] = 1.0
    state.floats[:, tables.LOG_MIN_P] = -torch.inf
    state.floats[:, tables.REPETITION] = 1.2
    rows = torch.tensor([3, 0, 7, 5, -1], device=DEVICE)
    positions = torch.tensor([0, 0, 5, 6, 0], device=DEVICE)
    graph, out = capture(lambda: ops.sample_rows(logits, rows, positions, state))
    for step in range(6):
        logits.normal_()
        positions.add_(1)
        rows.copy_(rows.roll(1))
        state.ints[:, tables.SEED] += step
        state.ints[:, tables.TOP_K] = 0 if step % 2 else 7
        state.ints[:, tables.FLAGS] = tables.LIMITED * (step > 1) + tables.PENALISED * (step > 3)
        state.floats[:, tables.TOP_P] = 1.0 - 0.1 * step
        state.floats[:, tables.TEMPERATURE] = temperatures if step < 2 else temperatures + 0.1
        state.counts.random_(0, 3)
        out.fill_(-1)
        theirs = replace(state, counts=state.counts.clone())
        graph.replay()
        assert torch.equal(out, reference.sample_rows(logits, rows, positions, theirs))
        assert torch.equal(state.counts, theirs.counts)
