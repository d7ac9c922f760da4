"""The rows of requests that a captured decode step reads and moves on by itself.

The host writes a row when its request enters the step or another kind of step has moved it; from
then on the device keeps it. `RowMirror` is what the host knows of the device's side, and decides
what a step uploads: nothing, for the same rows one token on.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diptych.engine.pinned import Uploads
from diptych.kernels.dispatch import Ops

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The R rows of a decode step as the host sees them.

    Attributes:
        rows: `[R]`, where they are among the rows of requests.
        entries: `[R]`, which entry into its row each request is.
        input_ids, positions: `[R]`, the last token of each (-1 for the one that the device sampled
            last for the row) and where it stands.
        prompt_lens: `[R]`, tokens of the prompt.
    """

    rows: Int64Array
    entries: Int64Array
    input_ids: Int64Array
    positions: Int64Array
    prompt_lens: Int64Array

    def __getitem__(self, index: Int64Array) -> DecodeRows:
        return DecodeRows(*[getattr(self, field.name)[index] for field in fields(self)])


@dataclass(frozen=True, slots=True)
class RowUpload:
    """What a step has to upload.

    Attributes:
        order: `[max_rows]`, the step's rows, -1 behind them; None where it is that of the last.
        stale: `[S]`, indices into the step's rows, of those that the device does not have so.
    """

    order: Int64Array | None
    stale: Int64Array


class RowMirror:
    """What the device holds: which entry of each row, at which position, and the last order."""

    def __init__(self, max_rows: int) -> None:
        self._entries: Int64Array = np.full(max_rows, -1, np.int64)
        self._positions: Int64Array = np.full(max_rows, -1, np.int64)
        self._order: Int64Array = np.full(max_rows, -1, np.int64)
        self._count = 0

    def advance(self, step: DecodeRows) -> RowUpload:
        """A step of these rows comes next: what it uploads. After it they stand one token on."""
        rows, count = step.rows, len(step.rows)
        stale = np.flatnonzero(
            (self._positions[rows] != step.positions) | (self._entries[rows] != step.entries)
        )
        self._entries[rows] = step.entries
        self._positions[rows] = step.positions + 1
        if count == self._count and np.array_equal(self._order[:count], rows):
            return RowUpload(None, stale)
        self._order[:count], self._order[count:], self._count = rows, -1, count
        return RowUpload(self._order, stale)


class ResidentRows:
    """The rows on the device.

    Args:
        last_tokens: `[max_num_seqs]` int64 on the device, by row.
        ops: what writes them.
        uploads: how arrays get there.

    Attributes:
        order: `[max_num_seqs]` int64, the rows of the step, then -1.
        last_tokens, positions, prompt_lens: `[max_num_seqs]` int64, by row: the last token, where
            it stands, and tokens of the prompt.
    """

    def __init__(self, last_tokens: Tensor, ops: Ops, uploads: Uploads) -> None:
        self._ops, self._uploads = ops, uploads
        self._mirror = RowMirror(len(last_tokens))
        self.last_tokens = last_tokens
        self.order = torch.full_like(last_tokens, -1)
        self.positions = torch.zeros_like(last_tokens)
        self.prompt_lens = torch.zeros_like(last_tokens)
        none = np.zeros(len(last_tokens), np.int64)
        # nothing is left to compile when the first row comes
        self._write(DecodeRows(np.arange(len(last_tokens)), none, none - 1, none, none))

    def load(self, step: DecodeRows) -> None:
        """Bring the device to the start of a step, which is to run next."""
        upload = self._mirror.advance(step)
        if upload.order is not None:
            self.order.copy_(self._uploads.put(upload.order))
        if len(upload.stale):
            self._write(step[upload.stale])

    def _write(self, step: DecodeRows) -> None:
        rows, tokens, positions, prompts = self._uploads.put_all(
            step.rows, step.input_ids, step.positions, step.prompt_lens
        )
        state = (self.last_tokens, self.positions, self.prompt_lens)
        self._ops.write_rows(rows, tokens, positions, prompts, *state)
