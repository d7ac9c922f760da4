"""A decode step over static tensors: what a CUDA graph holds, from token ids to sampled tokens.

One copy a step fills its inputs. Block tables and sampling parameters stay on the device in rows
of requests and are gathered there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.pinned import PinnedRing
from diptych.kernels.dispatch import Ops
from diptych.models.layers import ForwardBatch, KVView
from diptych.models.llama import Decoder

_FIELDS = 6


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What one decode step needs of its R rows, on the host.

    Attributes:
        rows: `[R]`, where they are among the rows of requests.
        input_ids, positions, slots: `[R]`, the last token of each (-1 for the one that the device
            sampled last for the row), its position and its KV slot.
        num_outputs: `[R]`, output tokens known, which key the noise.
    """

    rows: NDArray[np.int64]
    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    num_outputs: NDArray[np.int64]


class DecodeInputs:
    """`_FIELDS` rows of `max_rows` int64 on the device, and pinned twins on the host.

    A padding row is of no sequence: slot -1, no keys, row 0's parameters, a token nobody reads.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._shape = (_FIELDS, max_rows)
        self._ring = PinnedRing(8 * _FIELDS * max_rows, device)
        self._packed = torch.zeros(self._shape, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.slots, self.rows, self.num_outputs = self._packed[:5]
        self.seq_lens = self._packed[5].view(torch.int32)[:max_rows]
        self.load(DecodeRows(*[np.zeros(0, np.int64)] * 5))

    def load(self, step: DecodeRows) -> None:
        """Copy a step's rows to the device; those beyond them are padding."""
        pinned = self._ring.turn().view(torch.int64).view(self._shape)
        host = pinned.numpy()
        count = len(step.rows)
        columns = (step.input_ids, step.positions, step.slots, step.rows, step.num_outputs)
        for field, values in zip(host, columns, strict=False):
            field[:count] = values
            field[count:] = 0
        host[2, count:] = -1
        lengths = host[5].view(np.int32)
        lengths[:count] = step.positions + 1
        lengths[count:] = 0
        self._packed.copy_(pinned, non_blocking=True)


class DecodeStep:
    """The step, and its results: `logits` `[max_rows, V]` float32, `tokens` `[max_rows]` int64.

    Args:
        model, ops, kv: what computes, and the cache's layers.
        block_tables: `[max_num_seqs, max_blocks]` int32, by row.
        last_tokens: `[max_num_seqs]` int64, by row.
        temperatures, seeds: `[max_num_seqs]`, by row.
        vocab_size, block_size: of the model, of the cache.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        kv: Sequence[KVView],
        block_tables: Tensor,
        last_tokens: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        vocab_size: int,
        block_size: int,
    ) -> None:
        max_rows, device = len(block_tables), block_tables.device
        self._model, self._ops, self._kv = model, ops, kv
        self._block_tables, self._block_size = block_tables, block_size
        self._last_tokens = last_tokens
        self._temperatures, self._seeds = temperatures, seeds
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._inputs = DecodeInputs(max_rows, device)
        self.logits = torch.zeros(max_rows, vocab_size, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def load(self, step: DecodeRows) -> None:
        """Copy the inputs of the next run to the device."""
        self._inputs.load(step)

    @property
    def rows(self) -> Tensor:
        """`[max_rows]` int64 on the device: the rows loaded."""
        rows: Tensor = self._inputs.rows
        return rows

    @torch.inference_mode()
    def run(self, size: int, context: int) -> None:
        """Compute `size` rows of at most `context` tokens each. Waits for nothing on the device."""
        inputs = self._inputs
        rows = inputs.rows[:size]
        width = -(-context // self._block_size)
        batch = ForwardBatch(
            input_ids=torch.where(
                inputs.input_ids[:size] < 0,
                self._last_tokens.index_select(0, rows),
                inputs.input_ids[:size],
            ),
            positions=inputs.positions[:size],
            slot_mapping=inputs.slots[:size],
            query_start_loc=self._starts[: size + 1],
            seq_lens=inputs.seq_lens[:size],
            block_tables=self._block_tables[:, :width].index_select(0, rows),
            max_query_len=1,
            max_seq_len=context,
        )
        logits = self.logits[:size]
        self._model.logits(self._model.forward(batch, self._kv), logits)
        sampled = self._ops.gumbel_argmax(
            logits,
            self._temperatures.index_select(0, rows),
            self._seeds.index_select(0, rows),
            inputs.num_outputs[:size],
        )
        self.tokens[:size].copy_(sampled)
