"""Gathers one step's entries into the packed `EngineCoreOutputs`."""

from __future__ import annotations

from collections.abc import Sequence

from diptych.engine.request import (
    EngineCoreOutputs,
    FinishReason,
    KVCommit,
    SchedulerStats,
    TokenLogprobs,
)
from diptych.engine.scheduler_request import RequestStatus, SchedulerRequest

# request, first position, tokens, finish reason, stop token, cached tokens
_Entry = tuple[str, int, int, int, int, int]


class OutputsBuilder:
    """Entries since the last `build`."""

    def __init__(self) -> None:
        self._clear()

    def __len__(self) -> int:
        return len(self._entries)

    def add_tokens(
        self,
        request: SchedulerRequest,
        token_ids: Sequence[int],
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        """The last `token_ids` of the request's output, with its finish reason if it has ended."""
        first = request.num_output_tokens - len(token_ids)
        runs = request.status is RequestStatus.RUNNING
        reason = FinishReason.UNSPECIFIED if runs else request.status.finish_reason
        entry = self._add(request, first, token_ids, reason)
        if logprobs is not None and token_ids:
            self._logprobs[entry] = logprobs
        prompt_logprobs = request.take_prompt_logprobs()
        if prompt_logprobs is not None:
            self._prompt_logprobs[entry] = prompt_logprobs

    def add_end(self, request: SchedulerRequest, error: str | None = None) -> None:
        """The request has ended without a token."""
        reason = request.status.finish_reason
        entry = self._add(request, request.num_output_tokens, (), reason)
        if error is not None:
            self._errors[entry] = error

    def add_handoff_failure(self, request: SchedulerRequest, why: str) -> None:
        """The request's KV did not arrive: another attempt may follow, this one has ended."""
        self._handoff_failures[len(self._entries)] = why
        self.add_end(request)

    def add_commit(self, request: SchedulerRequest, commit: KVCommit) -> None:
        """The request's KV has been handed over: its last entry here."""
        position = request.num_output_tokens
        entry = self._add(request, position, (), FinishReason.UNSPECIFIED)
        self._commits[entry] = commit

    def build(self, stats: SchedulerStats) -> EngineCoreOutputs:
        """The entries with the state after them; starts anew."""
        names, firsts, counts, reasons, stops, cached = (
            map(list, zip(*self._entries, strict=True)) if self._entries else ([] for _ in range(6))
        )
        built = EngineCoreOutputs(
            request_ids=names,
            first_positions=firsts,
            token_counts=counts,
            token_ids=self._token_ids,
            finish_reasons=reasons,
            stop_token_ids=stops,
            num_cached_tokens=cached,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            commits=self._commits,
            errors=self._errors,
            handoff_failures=self._handoff_failures,
            stats=stats,
        )
        self._clear()
        return built

    def _add(
        self,
        request: SchedulerRequest,
        first_position: int,
        token_ids: Sequence[int],
        reason: FinishReason,
    ) -> int:
        cached = request.num_cached_tokens
        # one append for each token of a large batch, not one for each column
        self._entries.append(
            (
                request.request_id,
                first_position,
                len(token_ids),
                int(reason),
                request.stop_token_id,
                cached if cached > 0 else 0,
            )
        )
        self._token_ids += token_ids
        return len(self._entries) - 1

    def _clear(self) -> None:
        self._entries: list[_Entry] = []
        self._token_ids: list[int] = []
        self._logprobs: dict[int, TokenLogprobs] = {}
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._commits: dict[int, KVCommit] = {}
        self._errors: dict[int, str] = {}
        self._handoff_failures: dict[int, str] = {}
