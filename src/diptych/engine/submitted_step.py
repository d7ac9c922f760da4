"""A step that the device has been given."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from diptych.connectors.base import KVConnectorMetadata, KVConnectorOutput, KVConnectorWorker
from diptych.engine.input_batch import Appended, InputBatch
from diptych.engine.pinned import TokenRead
from diptych.engine.request import TokenLogprobs
from diptych.engine.step import ModelRunnerOutput

_SENT_LOOK_S = 0.5e-3


class SubmittedStep:
    """`engine.step.StepHandle` of a runner; `output` has what is known already."""

    def __init__(
        self,
        batch: InputBatch,
        connector: KVConnectorWorker | None,
        metadata: KVConnectorMetadata | None,
    ) -> None:
        self._batch = batch
        self._connector = connector
        self._metadata = metadata
        self._read: TokenRead | None = None
        self._appended: Appended | None = None
        self._logprobs: dict[str, Callable[[], TokenLogprobs]] = {}
        self._prompt_logprobs: dict[str, Callable[[], TokenLogprobs]] = {}
        self.output = ModelRunnerOutput()

    def expect(self, read: TokenRead, appended: Appended | None = None) -> None:
        """What comes once the step has ended: the tokens sampled, and where they belong.

        A step that samples none reads none, and so is waited for all the same.
        """
        self._read, self._appended = read, appended

    def expect_logprobs(self, request_id: str, read: Callable[[], TokenLogprobs]) -> None:
        """Log probabilities of the token sampled come as well."""
        self._logprobs[request_id] = read

    def expect_prompt_logprobs(self, request_id: str, read: Callable[[], TokenLogprobs]) -> None:
        """Log probabilities of prompt tokens come as well."""
        self._prompt_logprobs[request_id] = read

    def wait(self, saving: bool) -> KVConnectorOutput | None:
        while saving and self._connector is not None and not self._over:
            sent = self._connector.take_sent()
            if sent is not None:
                return sent
            time.sleep(_SENT_LOOK_S)
        if self._read is not None:
            self._read.wait()
        return None

    @property
    def _over(self) -> bool:
        return self._read is None or self._read.is_over

    @torch.inference_mode()
    def result(self) -> ModelRunnerOutput:
        """Wait for the step; its saves begin, its tokens are on the host."""
        if self._read is not None:
            tokens = self._read.wait()
            if self._appended is not None:
                self._batch.fill(self._appended, tokens)
                chosen: list[list[int]] = tokens[:, None].tolist()
                self.output.sampled_token_ids = dict(
                    zip(self._appended.request_ids, chosen, strict=True)
                )
        self.output.logprobs = {name: read() for name, read in self._logprobs.items()}
        self.output.prompt_logprobs = {name: read() for name, read in self._prompt_logprobs.items()}
        if self._connector is not None:
            self._finish_transfers(self._connector)
        return self.output

    def _finish_transfers(self, connector: KVConnectorWorker) -> None:
        """The step's device work is complete."""
        if self._metadata is not None:
            connector.wait_for_save(self._metadata)
        finished = connector.get_finished()
        if not finished.empty:
            self.output.kv_connector_output = finished
