"""Steps of prompts, captured: the tensors they run over, and their graphs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from diptych.engine.graphs import Capture, MixedGraphs, MixedKey, context_lengths, mixed_sizes
from diptych.engine.input_batch import InputBatch, StepRows
from diptych.engine.mixed_step import MOST_PROMPTS, MixedStep
from diptych.engine.sampler import Sampler
from diptych.kernels.dispatch import Ops
from diptych.models.layers import layer_views
from diptych.models.llama import Decoder

# longer ones are longer at work than it takes to launch them
_MOST_CONTEXTS = 2


@dataclass(frozen=True, slots=True)
class CapturedMixed:
    """`find` the graph of a step, `run` it, read `step.logits` and `step.tokens`."""

    step: MixedStep
    graphs: MixedGraphs

    def find(self, rows: StepRows) -> MixedKey | None:
        """The graph for a step; None where there is none, or none that pays."""
        count = rows.num_singles
        num_tokens, num_prompts = int(rows.starts[-1]) - count, len(rows.rows) - count
        return self.graphs.find(count, num_tokens, num_prompts, int(rows.end.max()))

    def run(self, key: MixedKey, rows: StepRows, batch: InputBatch) -> None:
        """Compute the step, sampling and all."""
        batch.sampling.flush()
        num_outputs = batch.num_outputs(rows.rows[rows.samples])
        self.step.load(key[0], rows, batch.tokens(rows), num_outputs)
        self.graphs.replay(key)


def capture_mixed(
    model: Decoder,
    ops: Ops,
    kv_cache: Tensor,
    batch: InputBatch,
    sampler: Sampler,
    logits: Tensor,
    *,
    max_num_tokens: int,
    max_model_len: int,
    capture: Capture,
) -> CapturedMixed | None:
    """Capture steps of the rows of `batch`, whose `logits` others may use too; the cache stays as
    it is. None where steps are too small for any."""
    sizes = mixed_sizes(batch.max_num_seqs, max_num_tokens)
    if not sizes:
        return None
    step = MixedStep(
        model,
        ops,
        layer_views(kv_cache),
        sampler,
        sizes,
        batch.block_tables,
        batch.last_tokens,
        logits,
        block_size=kv_cache.shape[4],
    )
    contexts = context_lengths(max_model_len)[:_MOST_CONTEXTS]
    return CapturedMixed(step, MixedGraphs(step.run, sizes, contexts, MOST_PROMPTS, capture))
