"""Runs steps: rows to a flattened batch, through the model, to sampled tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from diptych.connectors.base import KVConnectorMetadata, KVConnectorWorker, KVLayout
from diptych.engine.captured_decode import CapturedDecode
from diptych.engine.input_batch import InputBatch, StepRows
from diptych.engine.logprobs import TopLogprobs, concatenate
from diptych.engine.pinned import TokenReader
from diptych.engine.request import TokenLogprobs
from diptych.engine.sampler import sample
from diptych.engine.sampling_rows import NO_LOGPROBS
from diptych.engine.step import ModelRunnerOutput, SchedulerOutput
from diptych.models.layers import layer_views
from diptych.models.llama import Decoder

# positions whose logits exist at one time while prompt log probabilities are worked out
_LOGITS_CHUNK = 128


class ModelRunner:
    """Holds the model, its KV cache and the rows of the requests in the batch.

    Args:
        model, kv_cache, layout, batch, connector: what it runs on.
        decode: decode steps, captured; None runs them as the others, one kernel after another.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: Tensor,
        layout: KVLayout,
        batch: InputBatch,
        connector: KVConnectorWorker | None = None,
        decode: CapturedDecode | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._kv_views = layer_views(kv_cache)
        self._batch = batch
        self._connector = connector
        self._decode = decode
        self._device = kv_cache.device
        self._put = batch.uploads.put
        self._reader = TokenReader(batch.max_num_seqs, kv_cache.device)
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
        if self._decode is not None and self._batch.decodes(rows):
            return self._run_captured(rows, self._decode)
        hidden = self._model.forward(
            self._batch.forward_batch(rows), self._kv_views, self._connector
        )
        output = ModelRunnerOutput(prompt_logprobs=self._prompt_logprobs(rows, hidden))
        if len(rows.samples):
            ends = self._put(rows.starts[rows.samples + 1] - 1)
            self._sample(rows, self._model.logits(hidden[ends]), output)
        elif self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # saves begin when the KV is in the cache
        return output

    def _run_captured(self, rows: StepRows, decode: CapturedDecode) -> ModelRunnerOutput:
        """A decode step; what its graph cannot sample is sampled from the graph's logits."""
        if self._connector is not None:
            for layer in range(len(self._kv_views)):
                self._connector.wait_for_layer_load(layer)
        count = len(rows.rows)
        decode.step.load(self._batch.decode_rows(rows))
        decode.graphs.replay(count, int(rows.end.max()))
        plain = self._batch.sampling.is_plain[rows.rows].all()
        output = ModelRunnerOutput()
        tokens = decode.step.tokens[:count] if plain else None
        self._sample(rows, decode.step.logits[:count], output, tokens)
        return output

    def _sample(
        self,
        rows: StepRows,
        logits: Tensor,
        output: ModelRunnerOutput,
        sampled: Tensor | None = None,
    ) -> None:
        """Sample a token for each of `rows.samples`, into the rows and into `output`.

        Args:
            logits: `[R, V]` float32; overwritten where `sampled` is not given.
            sampled: `[R]`, the tokens if they are known.
        """
        samples, batch = rows.samples, self._batch
        members = rows.rows[samples]
        wanted = np.flatnonzero(batch.sampling.logprobs[members] != NO_LOGPROBS)
        raw = logits[self._put(wanted)] if len(wanted) else None
        if sampled is None:
            sampled = sample(logits, batch.sampling.batch(batch.row_tokens(members)))
        tokens = self._reader.read(sampled)
        batch.append(rows, tokens)
        chosen: list[int] = tokens.tolist()
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
