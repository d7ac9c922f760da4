"""Gathers one step's entries into the packed `EngineCoreOutputs`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from diptych.engine.request import (
    EngineCoreOutputs,
    FinishReason,
    KVCommit,
    SchedulerStats,
    TokenLogprobs,
)
from diptych.engine.scheduler_request import SchedulerRequest


class OutputsBuilder:
    """Entries since the last `build`."""

    def __init__(self) -> None:
        self._outputs = EngineCoreOutputs()

    def __len__(self) -> int:
        return len(self._outputs.request_ids)

    def add_tokens(
        self,
        request: SchedulerRequest,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """The last `token_ids` of the request's output, with its finish reason if it has ended."""
        first = request.num_output_tokens - len(token_ids)
        entry = self._add(request, first, token_ids, request.status.finish_reason)
        if logprobs is not None and token_ids:
            self._outputs.logprobs[entry] = logprobs
        prompt_logprobs = request.take_prompt_logprobs()
        if prompt_logprobs is not None:
            self._outputs.prompt_logprobs[entry] = prompt_logprobs

    def add_end(self, request: SchedulerRequest, error: str | None = None) -> None:
        """The request has ended without a token."""
        reason = request.status.finish_reason
        entry = self._add(request, request.num_output_tokens, (), reason)
        if error is not None:
            self._outputs.errors[entry] = error

    def add_commit(self, request: SchedulerRequest, commit: KVCommit) -> None:
        """The request's KV has been handed over: its last entry here."""
        position = request.num_output_tokens
        entry = self._add(request, position, (), FinishReason.UNSPECIFIED)
        self._outputs.commits[entry] = commit

    def build(self, stats: SchedulerStats) -> EngineCoreOutputs:
        """The entries with the state after them; starts anew."""
        built, self._outputs = self._outputs, EngineCoreOutputs()
        return msgspec.structs.replace(built, stats=stats)

    def _add(
        self,
        request: SchedulerRequest,
        first_position: int,
        token_ids: Sequence[int],
        reason: FinishReason,
    ) -> int:
        out = self._outputs
        out.request_ids.append(request.request_id)
        out.first_positions.append(first_position)
        out.token_counts.append(len(token_ids))
        out.token_ids.extend(token_ids)
        out.finish_reasons.append(int(reason))
        out.stop_token_ids.append(request.stop_token_id)
        out.num_cached_tokens.append(max(0, request.num_cached_tokens))
        return len(out.request_ids) - 1
