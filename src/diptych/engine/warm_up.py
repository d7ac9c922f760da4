"""Steps on nothing: compile kernels before the first request, and find what a step needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.config import EngineConfig
from diptych.connectors.base import KVLayout
from diptych.engine.kv_cache import allocate
from diptych.engine.logprobs import LOGITS_CHUNK, TopLogprobs
from diptych.engine.sampler import Sampler
from diptych.models.layers import ForwardBatch, ManyQueries, SingleQueries, layer_views
from diptych.models.llama import Decoder


class Shape(NamedTuple):
    """A step of `sequences` of `tokens` each, launched as for one of `longest` tokens."""

    sequences: int
    tokens: int
    longest: int


def serving_shapes(max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> list[Shape]:
    """Shapes of steps that between them launch every variant of every kernel.

    Kernels choose their variants by tokens of a step, sequences, and the longest query or sequence;
    all choices are steps of a power of two or change at one, just above it or below it.
    """
    seqs, tokens = _ladder(max_num_seqs), _ladder(min(max_num_tokens, max_model_len))
    contexts = _ladder(max_model_len)
    shapes = [Shape(count, 1, max_model_len) for count in seqs]
    # one token per sequence: of a long one, whose keys decode splits, or of a short one
    shapes += [Shape(count, 1, length) for count in (1, max_num_seqs) for length in contexts]
    shapes += [Shape(1, count, count) for count in tokens if count > 1]
    return list(dict.fromkeys(shapes))


def _ladder(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


@torch.inference_mode()
def warm_up(
    model: Decoder,
    sampler: Sampler,
    kv_cache: Tensor,
    layout: KVLayout,
    shapes: Sequence[Shape],
) -> None:
    """Run a step of each shape; the cache stays as it is."""
    for shape in shapes:
        _run(model, sampler, kv_cache, layout, shape, shape.sequences)
    if kv_cache.device.type == "cuda":
        torch.cuda.synchronize(kv_cache.device)


@torch.inference_mode()
def peak_memory(
    model: Decoder,
    sampler: Sampler,
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
    _run(model, sampler, cache, layout, Shape(most, 1, max_model_len), most)
    hidden = _run(model, sampler, cache, layout, Shape(max(tokens // each, 1), each, each), most)
    positions = torch.zeros(LOGITS_CHUNK, dtype=torch.int64, device=device)
    TopLogprobs(model.logits(hidden[positions]), positions, config.max_logprobs)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak


@torch.inference_mode()
def forward_memory(
    model: Decoder, sampler: Sampler, layout: KVLayout, shape: Shape, device: torch.device
) -> int:
    """Bytes of GPU memory that a step takes, weights and KV cache aside."""
    cache = allocate(layout, device)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = _make_batch(layout, shape, device)
    hidden = model.forward(batch, layer_views(cache))[: shape.sequences]
    _sample(sampler, model.logits(hidden))
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _run(
    model: Decoder,
    sampler: Sampler,
    kv_cache: Tensor,
    layout: KVLayout,
    shape: Shape,
    num_samples: int,
) -> Tensor:
    """Block 0 stands for all blocks and nothing is written. Returns the hidden states."""
    device = kv_cache.device
    hidden = model.forward(_make_batch(layout, shape, device), layer_views(kv_cache))
    rows = torch.arange(num_samples, device=device) % len(hidden)
    _sample(sampler, model.logits(hidden[rows]))
    return hidden


def _make_batch(layout: KVLayout, shape: Shape, device: torch.device) -> ForwardBatch:
    sequences, tokens, longest = shape
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


def _sample(sampler: Sampler, logits: Tensor) -> None:
    """For the first rows, whatever they are; which they are changes no launch."""
    rows = torch.arange(len(logits), device=logits.device)
    for limits in (True, False):
        sampler.sample(logits, rows, torch.zeros_like(rows), limits)
