"""A step of prompts, maybe beside rows that decode, over static tensors: what a CUDA graph holds.

A short prompt is little work for a GPU: launching its kernels one by one takes the host twice as
long as they run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.graphs import MixedSize
from diptych.engine.input_batch import Int64Array, StepRows, StepTokens
from diptych.engine.pinned import PinnedRing
from diptych.engine.sampler import Sampler
from diptych.kernels.dispatch import Ops
from diptych.models.layers import ForwardBatch, KVView, LastTokens, ManyQueries, SingleQueries
from diptych.models.llama import Decoder

# sequences of more than one token in a step that is captured
MOST_PROMPTS = 32
_ALIGNMENT = 16


class MixedInputs:
    """The inputs of steps up to a size, on the device and in pinned memory.

    Padding tokens have no slot; padding sequences have no token, no key, and row -1 where they
    would be sampled for.
    """

    def __init__(self, largest: MixedSize, most_last: int, device: torch.device) -> None:
        total = largest.singles + largest.tokens
        lengths: dict[str, tuple[int, torch.dtype]] = {
            "input_ids": (total, torch.int64),
            "positions": (total, torch.int64),
            "slots": (total, torch.int64),
            "single_rows": (largest.singles, torch.int64),
            "single_ends": (largest.singles, torch.int32),
            "many_rows": (MOST_PROMPTS, torch.int64),
            "many_ends": (MOST_PROMPTS, torch.int32),
            "many_starts": (MOST_PROMPTS + 1, torch.int32),
            "last_index": (most_last, torch.int64),
            "last_rows": (most_last, torch.int64),
            "last_ends": (most_last, torch.int32),
            "last_outputs": (most_last, torch.int64),
        }
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        at = 0
        for name, (count, dtype) in lengths.items():
            num_bytes = count * dtype.itemsize
            self._places[name] = (at, at + num_bytes, dtype)
            at += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._ring = PinnedRing(at, device)
        self._on_host: dict[int, dict[str, NDArray[Any]]] = {}
        self._packed = torch.zeros(at, dtype=torch.uint8, device=device)
        self._on_device = self._views(self._packed)
        self["slots"].fill_(-1)
        self["last_rows"].fill_(-1)

    def __getitem__(self, name: str) -> Tensor:
        """One of them, on the device."""
        return self._on_device[name]

    def load(
        self, size: MixedSize, step: StepRows, tokens: StepTokens, num_outputs: Int64Array
    ) -> None:
        """Copy a step's inputs to the device, by one copy. `num_outputs` are of the samples."""
        pinned = self._ring.turn()
        host = self._host_views(pinned)
        count, samples = step.num_singles, step.samples
        moved = size.singles - count
        total = sum(size)
        for name, values, nothing in (
            ("input_ids", tokens.input_ids, 0),
            ("positions", tokens.positions, 0),
            ("slots", tokens.slots, -1),
        ):
            column = host[name]
            column[:total] = nothing
            column[:count] = values[:count]
            column[size.singles : len(values) + moved] = values[count:]
        _lay(host["single_rows"], step.rows[:count])
        _lay(host["single_ends"], step.end[:count])
        _lay(host["many_rows"], step.rows[count:])
        _lay(host["many_ends"], step.end[count:])
        starts = step.starts[count:] - step.starts[count]
        _lay(host["many_starts"], starts, starts[-1])
        index = step.starts[samples + 1] - 1
        _lay(host["last_index"], np.where(index < count, index, index + moved))
        _lay(host["last_rows"], step.rows[samples], -1)
        _lay(host["last_ends"], step.end[samples])
        _lay(host["last_outputs"], num_outputs)
        self._packed.copy_(pinned, non_blocking=True)

    def _host_views(self, pinned: Tensor) -> dict[str, NDArray[Any]]:
        """Of a part of the ring, made once."""
        found = self._on_host.get(pinned.data_ptr())
        if found is None:
            found = {name: view.numpy() for name, view in self._views(pinned).items()}
            self._on_host[pinned.data_ptr()] = found
        return found

    def _views(self, packed: Tensor) -> dict[str, Tensor]:
        places = self._places.items()
        return {name: packed[start:end].view(dtype) for name, (start, end, dtype) in places}


class MixedStep:
    """The step, and its results: `logits` and `tokens` of the sequences that are sampled for, in
    their order.

    Args:
        model, ops, kv, sampler: what computes, the cache's layers, what samples.
        sizes: all that it will have.
        block_tables: `[max_num_seqs, max_blocks]` int32, by row.
        last_tokens: `[max_num_seqs]` int64, by row; written.
        logits: `[max_num_seqs, V]`, written; others may use it for theirs.
        block_size: of the cache.
    """

    def __init__(
        self,
        model: Decoder,
        ops: Ops,
        kv: Sequence[KVView],
        sampler: Sampler,
        sizes: Sequence[MixedSize],
        block_tables: Tensor,
        last_tokens: Tensor,
        logits: Tensor,
        block_size: int,
    ) -> None:
        self._model, self._ops, self._kv, self._sampler = model, ops, kv, sampler
        self._block_tables, self._block_size = block_tables, block_size
        self._last_tokens = last_tokens
        self.logits = logits
        self.tokens = torch.zeros_like(last_tokens)
        # where rows stand is for decode steps alone, which are told anew after this one
        self._positions = torch.zeros_like(last_tokens)
        largest = MixedSize(max(s.singles for s in sizes), max(s.tokens for s in sizes))
        self._inputs = MixedInputs(largest, self._most_last(largest), block_tables.device)

    def load(
        self, size: MixedSize, step: StepRows, tokens: StepTokens, num_outputs: Int64Array
    ) -> None:
        """Copy the inputs of the next run to the device; block tables and the rows' parameters are
        up to date there."""
        self._inputs.load(size, step, tokens, num_outputs)

    @torch.inference_mode()
    def run(self, size: MixedSize, context: int) -> None:
        """Compute a step of at most `context` tokens a sequence. Waits for nothing."""
        inputs, total = self._inputs, sum(size)
        last = self._queries("last", self._most_last(size), context)
        self._fill_in_tokens(size.singles)
        batch = ForwardBatch(
            input_ids=inputs["input_ids"][:total],
            positions=inputs["positions"][:total],
            slot_mapping=inputs["slots"][:total],
            singles=self._queries("single", size.singles, context) if size.singles else None,
            many=ManyQueries(
                self._tables(inputs["many_rows"], context),
                inputs["many_starts"],
                inputs["many_ends"],
                size.tokens,
            ),
            last=LastTokens(inputs["last_index"][: len(last.seq_lens)], last),
        )
        hidden = self._model.forward(batch, self._kv)
        count = len(hidden)
        rows, logits = inputs["last_rows"][:count], self.logits[:count]
        self._model.logits(hidden, logits)
        sampled = self._sampler.sample(logits, rows, inputs["last_outputs"][:count])
        state = (self._last_tokens, self._positions, self.tokens[:count])
        self._ops.advance_rows(rows, sampled, *state)

    def _most_last(self, size: MixedSize) -> int:
        """Sequences that a step samples for, at most."""
        return min(size.singles + MOST_PROMPTS, len(self._last_tokens))

    def _fill_in_tokens(self, count: int) -> None:
        """Those that the device alone knows."""
        if count:
            ids, rows = self._inputs["input_ids"][:count], self._inputs["single_rows"][:count]
            ids.copy_(torch.where(ids < 0, self._last_tokens.index_select(0, rows), ids))

    def _queries(self, name: str, count: int, context: int) -> SingleQueries:
        tables = self._tables(self._inputs[f"{name}_rows"][:count], context)
        return SingleQueries(tables, self._inputs[f"{name}_ends"][:count], context)

    def _tables(self, rows: Tensor, context: int) -> Tensor:
        width = -(-context // self._block_size)
        return self._block_tables[:, :width].index_select(0, rows.clamp(min=0))


def _lay(column: NDArray[Any], values: Int64Array, rest: int = 0) -> None:
    column[: len(values)] = values
    column[len(values) :] = rest
