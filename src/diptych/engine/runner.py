"""Runs steps: rows to a flattened batch, through the model, to sampled tokens."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from diptych.connectors.base import KVConnectorMetadata, KVConnectorWorker, KVLayout
from diptych.engine.input_batch import InputBatch, StepRows
from diptych.engine.logprobs import TopLogprobs, concatenate
from diptych.engine.request import TokenLogprobs
from diptych.engine.sampler import sample
from diptych.engine.sampling_rows import NO_LOGPROBS, RowTokens
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from diptych.engine.to_device import to_device
from diptych.models.layers import KVView
from diptych.models.llama import Decoder

# positions whose logits exist at one time while prompt log probabilities are worked out
_LOGITS_CHUNK = 128


class ModelRunner:
    """Holds the model, its KV cache and the rows of the requests in the batch."""

    def __init__(
        self,
        model: Decoder,
        kv_cache: Tensor,
        layout: KVLayout,
        batch: InputBatch,
        connector: KVConnectorWorker | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._kv_views = [
            KVView(kv_cache[:, :, layer, 0], kv_cache[:, :, layer, 1])
            for layer in range(layout.num_layers)
        ]
        self._batch = batch
        self._connector = connector
        self._device = kv_cache.device
        self._put = partial(to_device, device=kv_cache.device)
        if connector is not None:
            connector.register_kv_caches(kv_cache, layout)

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; without tokens it only serves the connector."""
        self._batch.apply(step)
        self._start_loads(step.kv_connector_metadata)
        output = self._run(step) if step.num_scheduled_tokens else ModelRunnerOutput()
        self._finish_transfers(step.kv_connector_metadata, output)
        return output

    def _run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        rows = self._batch.step_rows(step.num_scheduled_tokens)
        hidden = self._model.forward(
            self._batch.forward_batch(rows), self._kv_views, self._connector
        )
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(rows, hidden))
        if len(rows.samples):
            self._sample(rows, hidden, output)
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # saves begin when the KV is in the cache
        return output

    def _sample(self, rows: StepRows, hidden: Tensor, output: ModelRunnerOutput) -> None:
        """Sample a token for each of `rows.samples`, into the rows and into `output`."""
        samples, batch = rows.samples, self._batch
        logits = self._model.logits(hidden[self._put(rows.starts[samples + 1] - 1)])
        members = rows.rows[samples]
        wanted = np.flatnonzero(batch.sampling.logprobs[members] != NO_LOGPROBS)
        raw = logits[self._put(wanted)] if len(wanted) else None
        tokens = RowTokens(
            members, batch.token_ids, batch.num_prompt_tokens[members], batch.num_tokens[members]
        )
        sampled = sample(logits, batch.sampling.batch(tokens))
        chosen: list[int] = sampled.tolist()
        batch.append(rows, np.array(chosen, np.int64))
        names = [rows.request_ids[i] for i in samples.tolist()]
        output.sampled_token_ids = {
            name: [token] for name, token in zip(names, chosen, strict=True)
        }
        if raw is not None:
            counts: list[int] = batch.sampling.logprobs[members[wanted]].tolist()
            top = TopLogprobs(raw, sampled[self._put(wanted)], max(counts))
            for i, (index, count) in enumerate(zip(wanted.tolist(), counts, strict=True)):
                output.logprobs[names[index]] = top.pack([i], count)

    def _prompt_logprobs(self, rows: StepRows, hidden: Tensor) -> dict[str, TokenLogprobs]:
        """Of the prompt tokens that follow the positions computed, for those who asked."""
        found: dict[str, TokenLogprobs] = {}
        counts = self._batch.sampling.prompt_logprobs[rows.rows]
        for i in np.flatnonzero(counts != NO_LOGPROBS).tolist():
            row, first = rows.rows[i], int(rows.first[i])
            end = min(int(rows.end[i]), int(self._batch.num_prompt_tokens[row]) - 1)
            if end <= first:
                continue
            start = int(rows.starts[i])
            targets = self._batch.token_ids[row, first + 1 : end + 1].astype(np.int64)
            found[rows.request_ids[i]] = self._logprobs_of(
                hidden[start : start + end - first], self._put(targets), int(counts[i])
            )
        return found

    def _logprobs_of(self, hidden: Tensor, targets: Tensor, most: int) -> TokenLogprobs:
        parts = []
        for at in range(0, len(targets), _LOGITS_CHUNK):
            chunk = targets[at : at + _LOGITS_CHUNK]
            logits = self._model.logits(hidden[at : at + _LOGITS_CHUNK])
            parts.append(TopLogprobs(logits, chunk, most).pack(range(len(chunk)), most))
        return concatenate(parts)

    def _start_loads(self, metadata: KVConnectorMetadata | None) -> None:
        if self._connector is not None and metadata is not None:
            self._connector.start_load_kv(metadata)

    def _finish_transfers(
        self, metadata: KVConnectorMetadata | None, output: ModelRunnerOutput
    ) -> None:
        """The step's device work is complete: its tokens are on the host."""
        if self._connector is None:
            return
        if metadata is not None:
            self._connector.wait_for_save(metadata)
        finished = self._connector.get_finished()
        if not finished.empty:
            output.kv_connector_output = finished
