"""One request as the scheduler keeps it."""

from __future__ import annotations

import enum

from diptych.engine.load_beside import LoadBeside
from diptych.engine.request import (
    EngineCoreRequest,
    FinishReason,
    KVTransferParams,
    TokenLogprobs,
)
from diptych.hashing import HashChain, root_hash
from diptych.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request stands; what comes after PREEMPTED has ended."""

    WAITING = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_HANDED_OFF = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_ERROR = enum.auto()

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason:
        """What the client is told; a handed-off request goes on elsewhere."""
        return _FINISH_REASONS.get(self, FinishReason.UNSPECIFIED)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class SchedulerRequest:
    """Tokens, progress and status of one request; a `connectors.base.RequestView`."""

    def __init__(
        self, request: EngineCoreRequest, *, arrival: int, namespace: bytes, max_model_len: int
    ) -> None:
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.sampling_params = request.sampling_params
        self.eos_token_ids = request.eos_token_ids
        self.priority = request.priority
        self._tenant = request.tenant
        self.arrival = arrival
        self.all_token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.status = RequestStatus.WAITING
        self.stop_token_id = -1
        self.num_computed_tokens = 0
        # of steps in flight: tokens they compute, output tokens they sample
        self.num_in_flight_tokens = 0
        self.num_placeholders = 0
        self.last_step = 0
        self.num_local_tokens = 0
        self.num_external_tokens = 0
        self.num_cached_tokens = -1
        self.remote_kv_tried = False
        self.beside: LoadBeside | None = None
        self.in_batch = False
        self._transfer = request.kv_transfer_params
        self._least_tokens, self._most_tokens = _length_limits(request, max_model_len)
        # none where it ends with token 1 and goes on elsewhere
        limit = self._most_tokens - self.num_prompt_tokens
        self.max_output_tokens = 1 if self.is_handoff else limit
        self._chain = HashChain(root_hash(namespace, request.cache_salt))
        self._is_handoff = self.is_handoff
        self._prompt_logprobs: list[TokenLogprobs] = []
        # the hand-off's other side, or the attempt before this one, sends them or has sent them
        elsewhere = self._transfer is not None and self._transfer.reads_peer
        wanted = request.sampling_params.prompt_logprobs is not None
        self._prompt_logprobs_due = wanted and not request.output_token_ids and not elsewhere

    @property
    def tenant(self) -> str:
        return self._tenant

    @property
    def kv_transfer_params(self) -> KVTransferParams | None:
        return self._transfer

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens that will be computed once the steps in flight have ended."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_expected_tokens(self) -> int:
        """Tokens there will be once the steps in flight have ended."""
        return len(self.all_token_ids) + self.num_placeholders

    @property
    def needs_results(self) -> bool:
        """Whether its next step cannot be planned before those in flight have ended.

        Its KV goes elsewhere, a load that the step in flight relies on may have failed, or it comes
        to what is loaded beside and may go on behind.
        """
        if self._is_handoff and self.num_placeholders:
            return True
        if self.beside is not None and self.num_planned_tokens == self.beside.start:
            return True
        return bool(self.num_external_tokens and self.num_in_flight_tokens)

    @property
    def can_go_ahead(self) -> bool:
        """Whether it has a next step, as far as is known before those in flight have ended."""
        if self.beside is not None and self.num_planned_tokens >= self.beside.start:
            return False
        if self.num_in_flight_tokens == 0:
            return True
        expected = len(self.all_token_ids) + self.num_placeholders
        return expected < self._most_tokens and not self.needs_results

    @property
    def num_computable_tokens(self) -> int:
        """Of the expected tokens, those that may be computed before more KV has come."""
        return self.num_expected_tokens if self.beside is None else self.beside.start

    @property
    def num_pending_prompt_tokens(self) -> int:
        """Prompt tokens that are still to be computed here, as far as is known."""
        loading = self.beside.end - self.beside.start if self.beside is not None else 0
        return max(0, self.num_prompt_tokens - self.num_computed_tokens - loading)

    @property
    def is_loading_beside(self) -> bool:
        """Whether a load may be writing its blocks while it computes."""
        return self.beside is not None and self.beside.is_under_way

    @property
    def is_handoff(self) -> bool:
        """Whether the request ends here with token 1 and goes on elsewhere."""
        return self._transfer is not None and self._transfer.do_remote_decode

    @property
    def is_handed_off(self) -> bool:
        """Whether the request has ended here and goes on elsewhere."""
        return self.status is RequestStatus.FINISHED_HANDED_OFF

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Log probabilities of the prompt are due: its logits are needed, so its KV is computed."""
        return self._prompt_logprobs_due

    @property
    def runner_sampling_params(self) -> SamplingParams:
        """The parameters, less prompt logprobs that are not (or no longer) due."""
        if self.sampling_params.prompt_logprobs is None or self._prompt_logprobs_due:
            return self.sampling_params
        return self.sampling_params.replace(prompt_logprobs=None)

    def prefix_hash(self, num_tokens: int) -> bytes:
        """Name of the first `num_tokens` tokens, partial unit included."""
        return self._chain.prefix_hash(self.all_token_ids, num_tokens)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Names of the full blocks of prompt and output."""
        self._chain.extend(self.all_token_ids)
        return self._chain.block_hashes(block_size)

    def plan(self, count: int, step: int) -> bool:
        """A step computes the next `count` tokens; True if it samples one more."""
        self.num_in_flight_tokens += count
        self.last_step = step
        planned = self.num_computed_tokens + self.num_in_flight_tokens
        if planned < len(self.all_token_ids) + self.num_placeholders:
            return False
        self.num_placeholders += 1
        return True

    def settle(self, count: int, samples: bool) -> None:
        """A step that computed `count` tokens, and sampled one more or not, has ended."""
        self.num_in_flight_tokens -= count
        self.num_placeholders -= samples

    def append_output(self, token_id: int) -> bool:
        """Add a sampled token. True if it ends the request, whose status then says how."""
        self.all_token_ids.append(token_id)
        return self.check_stop()

    def check_stop(self) -> bool:
        """Whether the last output token ends the request; sets the status."""
        count, last = len(self.all_token_ids), self.all_token_ids[-1]
        if count < self._least_tokens:
            return False
        params = self.sampling_params
        if last in self.eos_token_ids and not params.ignore_eos:
            self.status = RequestStatus.FINISHED_STOPPED
        elif params.stop_token_ids and last in params.stop_token_ids:
            self.status, self.stop_token_id = RequestStatus.FINISHED_STOPPED, last
        elif count >= self._most_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            return False
        return True

    def note_cached_tokens(self, num_own_tokens: int = 0) -> None:
        """Settle, as soon as it is known, how much of the prompt needed no computing.

        A handed-over prompt was computed for this request: what counts is what the other side
        found cached.

        Args:
            num_own_tokens: of the tokens computed so far, those that this request computed.
        """
        if self.num_cached_tokens >= 0:
            return
        if self._transfer is not None and self._transfer.commit is not None:
            self.num_cached_tokens = self._transfer.commit.num_cached_tokens
        else:
            cached = self.num_computed_tokens - num_own_tokens
            self.num_cached_tokens = min(cached, self.num_prompt_tokens)

    def take_over(self, token_id: int | None, num_cached_tokens: int) -> bool:
        """A peer has computed the prompt's KV and sampled a token after it; True if that ends the
        request."""
        self.num_cached_tokens = num_cached_tokens
        return token_id is not None and self.append_output(token_id)

    def rewind(self) -> None:
        """Forget all progress in computing, as preemption does; output tokens stay."""
        self.num_computed_tokens = 0
        self.in_batch = False
        self.beside = None
        self._prompt_logprobs.clear()

    def keep_prompt_logprobs(self, part: TokenLogprobs) -> None:
        """Take one step's share of the prompt's log probabilities."""
        if self._prompt_logprobs_due:
            self._prompt_logprobs.append(part)

    def take_prompt_logprobs(self) -> TokenLogprobs | None:
        """All of the prompt's log probabilities, once: with the first output token."""
        if not self._prompt_logprobs_due:
            return None
        parts, self._prompt_logprobs = self._prompt_logprobs, []
        self._prompt_logprobs_due = False
        return TokenLogprobs.joined(parts) if parts else None


def _length_limits(request: EngineCoreRequest, max_model_len: int) -> tuple[int, int]:
    """Tokens under which nothing ends the request, and those that do."""
    prompt, params = len(request.prompt_token_ids), request.sampling_params
    least = prompt + max(1, params.min_tokens)
    if params.max_tokens is None:
        return least, max_model_len
    return least, min(prompt + params.max_tokens, max_model_len)
