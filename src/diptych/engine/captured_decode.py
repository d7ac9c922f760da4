"""Decode steps, captured: the tensors they run over, and their graphs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.engine.decode_step import DecodeStep
from diptych.engine.graphs import Capture, DecodeGraphs, batch_sizes, context_lengths
from diptych.engine.input_batch import InputBatch
from diptych.engine.resident_rows import ResidentRows
from diptych.engine.sampler import Sampler
from diptych.kernels.dispatch import Ops
from diptych.models.layers import layer_views
from diptych.models.llama import Decoder


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """`step.rows.load` its rows, `graphs.replay` it, read `step.logits` and `step.tokens`."""

    step: DecodeStep
    graphs: DecodeGraphs


def capture_decode(
    model: Decoder,
    ops: Ops,
    kv_cache: Tensor,
    batch: InputBatch,
    sampler: Sampler,
    *,
    vocab_size: int,
    max_model_len: int,
    capture: Capture,
) -> CapturedDecode:
    """Capture decode steps of the rows of `batch`; the cache stays as it is."""
    step = DecodeStep(
        model,
        ops,
        layer_views(kv_cache),
        ResidentRows(batch.last_tokens, ops, batch.uploads),
        sampler,
        block_tables=batch.block_tables,
        vocab_size=vocab_size,
        block_size=kv_cache.shape[4],
    )
    sizes, contexts = batch_sizes(batch.max_num_seqs), context_lengths(max_model_len)
    return CapturedDecode(step, DecodeGraphs(step.run, sizes, contexts, capture))
