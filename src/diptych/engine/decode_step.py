"""A decode step over static tensors: what a CUDA graph holds, from rows to rows one token on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diptych.engine.resident_rows import ResidentRows
from diptych.engine.sampler import Sampler
from diptych.kernels.dispatch import Ops
from diptych.kernels.row_inputs import RowInputs
from diptych.models.layers import ForwardBatch, KVView, SingleQueries
from diptych.models.llama import Decoder


class DecodeStep:
    """The step, and its results: `logits` `[max_rows, V]`, `tokens` `[max_rows]` int64.

    Args:
        model, ops, kv: what computes, and the cache's layers.
        rows: which rows it computes, and where they stand; it moves them on.
        sampler: of the same rows.
        block_tables: `[max_num_seqs, max_blocks]` int32, by row.
        vocab_size, block_size: of the model, of the cache.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        kv: Sequence[KVView],
        rows: ResidentRows,
        sampler: Sampler,
        block_tables: Tensor,
        vocab_size: int,
        block_size: int,
    ) -> None:
        max_rows, device = len(block_tables), block_tables.device
        self._model, self._ops, self._kv = model, ops, kv
        self._block_tables, self._block_size = block_tables, block_size
        self._sampler = sampler
        self.rows = rows
        self.logits = torch.zeros(max_rows, vocab_size, dtype=model.dtype, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def run(self, size: int, context: int) -> None:
        """Compute `size` rows of at most `context` tokens each. Waits for nothing on the device."""
        inputs = self._read(size, context)
        logits = self.logits[:size]
        self._model.logits(self._model.forward(_batch(inputs, context), self._kv), logits)
        rows = self.rows
        sampled = self._sampler.sample(logits, rows.order[:size], inputs.num_outputs)
        self._ops.advance_rows(
            rows.order[:size], sampled, rows.last_tokens, rows.positions, self.tokens[:size]
        )

    def _read(self, size: int, context: int) -> RowInputs:
        rows = self.rows
        return self._ops.read_rows(
            rows.order[:size],
            rows.last_tokens,
            rows.positions,
            rows.prompt_lens,
            self._block_tables,
            self._block_size,
            -(-context // self._block_size),
        )


def _batch(inputs: RowInputs, context: int) -> ForwardBatch:
    return ForwardBatch(
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        slot_mapping=inputs.slots,
        singles=SingleQueries(inputs.block_tables, inputs.seq_lens, context),
    )
