"""What a decode step is computed from, once its rows have been read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RowInputs(NamedTuple):
    """Of S rows; a padding row is of no sequence: slot -1, no keys.

    Attributes:
        input_ids, positions, slots: `[S]` int64, the last token, its position, its KV slot.
        num_outputs: `[S]` int64, output tokens so far, which key the noise.
        seq_lens: `[S]` int32.
        block_tables: `[S, width]` int32; entries past a sequence's blocks mean nothing.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    num_outputs: Tensor
    seq_lens: Tensor
    block_tables: Tensor
