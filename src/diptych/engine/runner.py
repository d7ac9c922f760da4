"""Runs steps: rows to a flattened batch, through the model, to sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from diptych.connectors.base import KVConnectorMetadata, KVConnectorWorker, KVLayout
from diptych.engine.captured_decode import CapturedDecode
from diptych.engine.captured_mixed import CapturedMixed
from diptych.engine.graphs import MixedKey
from diptych.engine.input_batch import InputBatch, StepRows
from diptych.engine.logprobs import LOGITS_CHUNK, TopLogprobs
from diptych.engine.pinned import TokenReader
from diptych.engine.request import TokenLogprobs
from diptych.engine.sampler import Sampler
from diptych.engine.sampling_rows import NO_LOGPROBS
from diptych.engine.step import SchedulerOutput
from diptych.engine.submitted_step import SubmittedStep
from diptych.models.layers import layer_views
from diptych.models.llama import Decoder


class ModelRunner:
    """Holds the model, its KV cache and the rows of the requests in the batch.

    Args:
        model, sampler, kv_cache, layout, batch, connector: what it runs on.
        decode: decode steps, captured; None runs them as the others, one kernel after another.
        mixed: steps of short prompts, captured; None as well.
    """

    def __init__(
        self,
        model: Decoder,
        sampler: Sampler,
        kv_cache: Tensor,
        layout: KVLayout,
        batch: InputBatch,
        connector: KVConnectorWorker | None = None,
        decode: CapturedDecode | None = None,
        mixed: CapturedMixed | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._kv_views = layer_views(kv_cache)
        self._batch = batch
        self._connector = connector
        self._decode = decode
        self._mixed = mixed
        self._put = batch.uploads.put
        self._reader = TokenReader(batch.max_num_seqs, kv_cache.device)
        if connector is not None:
            connector.register_kv_caches(kv_cache, layout)

    @torch.inference_mode()
    def submit_step(self, step: SchedulerOutput) -> SubmittedStep:
        """Enqueue one step; without tokens it only serves the connector.

        On a GPU nothing is waited for.
        """
        submitted = SubmittedStep(self._batch, self._connector, step.kv_connector_metadata)
        self._batch.apply(step)
        self._start_loads(step.kv_connector_metadata)
        if step.num_scheduled_tokens:
            self._run(step, submitted)
        return submitted

    def _run(self, step: SchedulerOutput, submitted: SubmittedStep) -> None:
        rows = self._batch.step_rows(step.num_scheduled_tokens)
        if self._decode is not None and self._batch.decodes(rows):
            self._run_captured(rows, self._decode, submitted)
            return
        whole = self._batch.wants_prompt_logprobs(rows)
        if self._mixed is not None and not whole and self._batch.knows_prompts(rows):
            key = self._mixed.find(rows)
            if key is not None:
                self._run_prompts(rows, self._mixed, key, submitted)
                return
        self._run_eagerly(rows, whole, submitted)

    def _run_eagerly(self, rows: StepRows, whole: bool, submitted: SubmittedStep) -> None:
        """Launch a step kernel by kernel; `whole` where log probabilities of prompts are wanted."""
        batch = self._batch
        hidden = self._model.forward(
            batch.forward_batch(rows, whole=whole), self._kv_views, self._connector
        )
        if whole:
            self._prompt_logprobs(rows, hidden, submitted)
            hidden = hidden[self._put(rows.starts[rows.samples + 1] - 1)]
        if not len(rows.samples):
            submitted.expect(self._reader.begin(batch.last_tokens[:0]))
            return
        members = rows.rows[rows.samples]
        batch.sampling.flush()
        where, num_outputs = batch.uploads.put_all(members, batch.num_outputs(members))
        logits = self._model.logits(hidden)
        limits = batch.sampling.have_limits(members)
        sampled = self._sampler.sample(logits, where, num_outputs, limits)
        batch.last_tokens.index_copy_(0, where, sampled)
        self._take(rows, logits, sampled, submitted)

    def _run_captured(
        self, rows: StepRows, decode: CapturedDecode, submitted: SubmittedStep
    ) -> None:
        """A decode step, sampling and all."""
        self._wait_for_loads()
        count = len(rows.rows)
        decode.step.rows.load(self._batch.decode_rows(rows))
        decode.graphs.replay(count, int(rows.end.max()))
        self._take(rows, decode.step.logits[:count], decode.step.tokens[:count], submitted)

    def _run_prompts(
        self, rows: StepRows, mixed: CapturedMixed, key: MixedKey, submitted: SubmittedStep
    ) -> None:
        """A step of prompts, sampling and all."""
        self._wait_for_loads()
        mixed.run(key, rows, self._batch)
        self._save_layers()
        count = len(rows.samples)
        if count:
            self._take(rows, mixed.step.logits[:count], mixed.step.tokens[:count], submitted)
        else:
            submitted.expect(self._reader.begin(self._batch.last_tokens[:0]))

    def _take(
        self, rows: StepRows, logits: Tensor, sampled: Tensor, submitted: SubmittedStep
    ) -> None:
        """Begin to read a step's tokens, and the log probabilities that are wanted.

        Args:
            logits: `[R, V]`, as the model gave them.
            sampled: `[R]`, tokens of `rows.samples`, in their rows already.
        """
        batch = self._batch
        appended = batch.append(rows)
        submitted.expect(self._reader.begin(sampled), appended)
        widths = batch.sampling.logprobs[appended.rows]
        wanted = np.flatnonzero(widths != NO_LOGPROBS)
        for at in range(0, len(wanted), LOGITS_CHUNK):
            places = wanted[at : at + LOGITS_CHUNK]
            index, counts = self._put(places), widths[places].tolist()
            top = TopLogprobs(logits[index], sampled[index], max(counts))
            for i, (place, count) in enumerate(zip(places.tolist(), counts, strict=True)):
                name = appended.request_ids[place]
                submitted.expect_logprobs(name, partial(top.pack, [i], count))

    def _prompt_logprobs(self, rows: StepRows, hidden: Tensor, submitted: SubmittedStep) -> None:
        """Of the prompt tokens that follow the positions computed, for those who asked."""
        counts = self._batch.sampling.prompt_logprobs[rows.rows]
        for i in np.flatnonzero(counts != NO_LOGPROBS).tolist():
            row, first = rows.rows[i], int(rows.first[i])
            end = min(int(rows.end[i]), int(self._batch.num_prompt_tokens[row]) - 1)
            if end <= first:
                continue
            start = int(rows.starts[i])
            targets = self._batch.token_ids[row, first + 1 : end + 1].astype(np.int64)
            of_prompt = self._logprobs_of(
                hidden[start : start + end - first], self._put(targets), int(counts[i])
            )
            submitted.expect_prompt_logprobs(rows.request_ids[i], of_prompt)

    def _logprobs_of(
        self, hidden: Tensor, targets: Tensor, most: int
    ) -> Callable[[], TokenLogprobs]:
        parts = []
        for at in range(0, len(targets), LOGITS_CHUNK):
            chunk = targets[at : at + LOGITS_CHUNK]
            logits = self._model.logits(hidden[at : at + LOGITS_CHUNK])
            top = TopLogprobs(logits, chunk, most)
            parts.append(partial(top.pack, range(len(chunk)), most))
        return lambda: TokenLogprobs.joined([pack() for pack in parts])

    def _wait_for_loads(self) -> None:
        """Before a graph, whose layers wait for nothing."""
        if self._connector is not None:
            for layer in range(len(self._kv_views)):
                self._connector.wait_for_layer_load(layer)

    def _save_layers(self) -> None:
        """After a graph."""
        if self._connector is not None:
            for layer in range(len(self._kv_views)):
                self._connector.save_kv_layer(layer)

    def _start_loads(self, metadata: KVConnectorMetadata | None) -> None:
        if self._connector is not None and metadata is not None:
            self._connector.start_load_kv(metadata)
