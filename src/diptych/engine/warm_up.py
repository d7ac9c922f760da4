"""Steps on nothing: compile kernels before the first request, and find what a step needs."""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.config import EngineConfig
from diptych.connectors.base import KVLayout
from diptych.engine.kv_cache import allocate
from diptych.engine.sampler import RandomRows, SamplingBatch, sample
from diptych.models.layers import ForwardBatch, ManyQueries, SingleQueries, layer_views
from diptych.models.llama import Decoder


@torch.inference_mode()
def warm_up(model: Decoder, kv_cache: Tensor, layout: KVLayout, max_model_len: int) -> None:
    """Run a prefill and a decode step of each size class; the cache stays as it is."""
    sizes = [(1, 1), (1, 2)]
    if kv_cache.device.type == "cuda":
        sizes += [(2, 1), (16, 1), (1, 64), (4, 128)]
    for sequences, tokens in sizes:
        if tokens <= max_model_len:
            # one token per sequence: of a long one, whose keys decode splits
            longest = max_model_len if tokens == 1 else tokens
            _run(model, kv_cache, layout, sequences, tokens, sequences, longest)
    if kv_cache.device.type == "cuda":
        torch.cuda.synchronize(kv_cache.device)


@torch.inference_mode()
def peak_memory(
    model: Decoder,
    layout: KVLayout,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Bytes of GPU memory at the peak of the largest step, weights included, KV cache not."""
    tokens, most = config.max_num_batched_tokens or 1, config.max_num_seqs or 1
    each = min(tokens, max_model_len)
    cache = allocate(layout, device)
    torch.cuda.reset_peak_memory_stats(device)
    _run(model, cache, layout, most, 1, most, max_model_len)
    _run(model, cache, layout, max(tokens // each, 1), each, most, each)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def decode_memory(
    model: Decoder,
    layout: KVLayout,
    config: EngineConfig,
    max_model_len: int,
    device: torch.device,
) -> int:
    """Bytes of GPU memory that the largest decode step takes, weights and KV cache aside."""
    most = config.max_num_seqs or 1
    cache = allocate(layout, device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = _make_batch(layout, most, 1, max_model_len, device)
    model.logits(model.forward(batch, layer_views(cache)))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _run(
    model: Decoder,
    kv_cache: Tensor,
    layout: KVLayout,
    sequences: int,
    tokens: int,
    samples: int,
    longest: int,
) -> None:
    """`sequences` of `tokens` each, launched as for one of `longest`; block 0 stands for all blocks
    and nothing is written."""
    device = kv_cache.device
    batch = _make_batch(layout, sequences, tokens, longest, device)
    hidden = model.forward(batch, layer_views(kv_cache))
    rows = torch.arange(samples, device=device) % (sequences * tokens)
    sample(model.logits(hidden[rows]), SamplingBatch(random=_random_rows(samples, device)))


def _make_batch(
    layout: KVLayout, sequences: int, tokens: int, longest: int, device: torch.device
) -> ForwardBatch:
    total = sequences * tokens
    blocks = -(-tokens // layout.block_size)
    tables = torch.zeros((sequences, blocks), dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), tokens, dtype=torch.int32, device=device)
    starts = torch.arange(0, total + 1, tokens, dtype=torch.int32, device=device)
    single = tokens == 1
    return ForwardBatch(
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.arange(tokens, device=device).repeat(sequences),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        singles=SingleQueries(tables, lengths, longest) if single else None,
        many=None if single else ManyQueries(tables, starts, lengths, tokens),
    )


def _random_rows(samples: int, device: torch.device) -> RandomRows:
    ones = torch.ones(samples, device=device)
    zeros = torch.zeros(samples, dtype=torch.int64, device=device)
    return RandomRows(
        temperature=ones,
        all_random=True,
        min_p=None,
        top_k=zeros,
        top_p=ones * 0.9,
        limited_by_topk=[],
        limited_by_topp=list(range(samples)),
        max_top_k=0,
        seeds=zeros,
        positions=zeros,
    )
