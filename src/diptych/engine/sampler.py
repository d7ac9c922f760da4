"""From logits to tokens, for the rows of a batch.

Order: constraints (allowed ids, banned ids, bias), penalties, temperature, min_p, top_k and top_p,
Gumbel-max. Each row depends on its own logits, parameters, seed and position alone, never on the
batch: what a neighbour asks for changes nothing here. All of it happens on the device, where a
captured step can hold it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from diptych.engine.sampling_rows import SamplingRows
from diptych.kernels.sampling_tables import SamplingTables


class SamplingOps(Protocol):
    """The op of `kernels.dispatch.Ops` that samples."""

    def sample_rows(
        self,
        logits: Tensor,
        rows: Tensor,
        positions: Tensor,
        state: SamplingTables,
        limits: bool = True,
    ) -> Tensor: ...


class Sampler:
    """Samples by the parameters of the rows."""

    def __init__(self, ops: SamplingOps, rows: SamplingRows) -> None:
        self._ops = ops
        self._rows = rows

    def sample(
        self, logits: Tensor, rows: Tensor, num_outputs: Tensor, limits: bool = True
    ) -> Tensor:
        """The token of each row, `[R]` int64; rows of parameters are flushed before.

        Args:
            logits: `[R, V]` float32 or bfloat16; stay as they are.
            rows: `[R]` int64, -1 for padding; num_outputs: `[R]` int64, output tokens so far.
            limits: False where `SamplingRows.have_limits` says so: fewer launches.
        """
        return self._ops.sample_rows(logits, rows, num_outputs, self._rows.tables, limits)
