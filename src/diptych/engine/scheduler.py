"""What each step computes: tokens under a budget, not a prefill phase and a decode phase.

A request's tokens are its prompt and its output so far. A step computes, for each request in it,
the next of those that have no KV yet; where it reaches the last, the runner samples one more.
Running requests come first, in order (arrival, or priority), then waiting ones as far as tokens,
places and blocks reach.

A step may be planned while the one before is in flight. A token that it samples then stands as a
placeholder: counted, not known. What turns out to have ended has its share of the later step
dropped, and its blocks are free once that step has completed.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from diptych.config import EngineConfig
from diptych.connectors.base import (
    HandedOver,
    KVConnectorOutput,
    KVConnectorScheduler,
    KVLayout,
)
from diptych.engine.expected_output import ExpectedOutput
from diptych.engine.kv_cache_manager import ComputedBlocks, KVCacheManager
from diptych.engine.limits import check_request
from diptych.engine.outputs_builder import OutputsBuilder
from diptych.engine.remote_kv import Match, RemoteKV
from diptych.engine.request import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from diptych.engine.request_queue import OrderKey, RequestQueue, order_key
from diptych.engine.scheduler_counters import SchedulerCounters
from diptych.engine.scheduler_request import RequestStatus, SchedulerRequest
from diptych.engine.step import (
    ModelRunnerOutput,
    NewRequest,
    RunningRequest,
    SchedulerOutput,
)
from diptych.engine.steps_in_flight import StepsInFlight
from diptych.errors import CapacityError, InvalidRequestError

DEFAULT_MAX_NUM_BATCHED_TOKENS = 2048
DEFAULT_MAX_NUM_SEQS = 64


class Scheduler:
    """Owns all requests and all KV blocks of one engine. Not thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        kv_layout: KVLayout,
        namespace: bytes,
        connector: KVConnectorScheduler | None = None,
    ) -> None:
        self._config = config
        self._namespace = namespace
        self._max_tokens = config.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
        self.max_num_seqs = config.max_num_seqs or DEFAULT_MAX_NUM_SEQS
        self._kv = KVCacheManager(
            num_blocks=kv_layout.num_blocks,
            block_size=kv_layout.block_size,
            enable_caching=config.enable_prefix_caching,
        )
        capacity = self._kv.capacity_tokens
        self.max_model_len = min(config.max_model_len or capacity, capacity)
        self._expected = ExpectedOutput(kv_layout.block_size)
        self._counters = SchedulerCounters()
        self._outputs = OutputsBuilder()
        self._remote = RemoteKV(connector, self._kv, self._outputs, self._counters, namespace)
        self._requests: dict[str, SchedulerRequest] = {}
        self._waiting = RequestQueue(config.scheduling_policy)
        self._running: list[SchedulerRequest] = []
        self._left_batch: list[str] = []
        self._num_arrived = 0
        self._in_flight = StepsInFlight()
        self._short_of_blocks = False
        # since the last step was chosen: a request whose KV has come
        self.has_loaded = False
        # and one whose prompt was handed over: others wait for what is to be said of it
        self.has_handed_off = False

    # --- what comes in

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequestError: it can never run, or its id is in use.
            CapacityError: the queue is full.
        """
        check_request(request, self.max_model_len)
        if request.request_id in self._requests or self._remote.knows(request.request_id):
            raise InvalidRequestError(f"request id {request.request_id} is in use")
        if len(self._waiting) >= self._config.max_num_queued_reqs:
            raise CapacityError(f"{len(self._waiting)} requests wait already")
        self._num_arrived += 1
        added = SchedulerRequest(
            request,
            arrival=self._num_arrived,
            namespace=self._namespace,
            max_model_len=self.max_model_len,
        )
        if request.output_token_ids and added.check_stop():
            self._outputs.add_end(added)  # it had ended before it was sent here
            return
        self._requests[added.request_id] = added
        self._waiting.push(added)
        self._remote.note_added(added)

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests wherever they stand; ids that are not known are ignored."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                self._outputs.add_end(request)
            else:
                self._remote.abort_save(request_id)

    def fail_requests(self, error: str) -> EngineCoreOutputs:
        """End all requests with an error: the step that held them has failed."""
        for request in list(self._requests.values()):
            self._finish(request, RequestStatus.FINISHED_ERROR)
            self._outputs.add_end(request, error)
        self._remote.fail_saves(error)
        return self.take_outputs()

    # --- state

    @property
    def has_requests(self) -> bool:
        """Whether a step would do anything: work, transfers to wait for, or ends to report."""
        return bool(self._requests or self._remote.active or len(self._outputs))

    @property
    def stats(self) -> SchedulerStats:
        """State now, counters since the start."""
        return self._counters.stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._remote.loading),
            num_pending_tokens=self._num_pending_tokens,
            num_kv_blocks=self._kv.pool.num_blocks,
            num_free_kv_blocks=self._kv.pool.num_free,
        )

    @property
    def can_plan_ahead(self) -> bool:
        """Whether a step may be planned before those in flight have ended."""
        return not (self._short_of_blocks or self._in_flight.must_settle())

    # --- a step

    def schedule(self) -> SchedulerOutput:
        """Choose the next step. Without anything to compute it only serves the connector."""
        step = self._in_flight.begin()
        preemptions = self._counters.num_preemptions
        self._short_of_blocks = self.has_loaded = self.has_handed_off = False
        budget = self._schedule_running(step, self._max_tokens)
        if self._counters.num_preemptions == preemptions and not self._short_of_blocks:
            self._schedule_waiting(step, budget)
        step.finished_request_ids, self._left_batch = self._left_batch, []
        step.kv_connector_metadata = self._remote.build_meta(step, self._requests)
        return step

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Take a step's results, in the order of the steps; its device work has completed."""
        transfers = output.kv_connector_output
        failed_loads = transfers.failed_recving if transfers is not None else {}
        self._counters.num_steps += 1 if step.num_scheduled_tokens else 0
        for request, num_tokens, _ in self._in_flight.settle(step):
            if request.status is not RequestStatus.RUNNING:
                continue  # it ended while the step ran
            if request.num_external_tokens and request.request_id in failed_loads:
                self._discard_step(request, failed_loads[request.request_id])
            else:
                self._advance(request, num_tokens, output)
        self._kv.fence.complete(step.number)
        if transfers is not None:
            self.take_transfers(transfers)

    def take_transfers(self, transfers: KVConnectorOutput) -> None:
        """Take what was moved, for requests that are in no step: others may be in flight."""
        for loaded in self._remote.update(transfers):
            self.has_loaded = True
            if loaded.beside is not None:
                self._remote.join(loaded)
            else:
                self._admit_loaded(loaded)
        for request_id, handed in transfers.left_to_store.items():
            self._leave_to_store(request_id, handed)
        for request_id, why in transfers.failed_handoffs.items():
            self._fail_handoff(request_id, why)

    @property
    def is_saving(self) -> bool:
        """Whether a hand-off's KV is being saved."""
        return self._remote.is_saving

    def finish_saves(self, sent: KVConnectorOutput) -> None:
        """Take saves of hand-offs that have ended, while a step runs."""
        self._remote.finish_saves(sent)

    def take_outputs(self) -> EngineCoreOutputs:
        """What is to be reported since the last call."""
        return self._outputs.build(self.stats)

    # --- choosing

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Running requests in order; the last ones give way where blocks run out."""
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            if not request.can_go_ahead:
                index += 1
                continue
            start = request.num_planned_tokens
            count = request.num_computable_tokens - start
            if count > 1:
                # one token stays for each behind, so that a long prompt stalls nobody's output
                behind = len(self._running) - index - 1
                count = self._limited(count, max(1, budget - behind))
            while (new := self._kv.allocate_slots(request, start + count)) is None:
                if self._in_flight.before(step):
                    # who gives way is settled once no step writes the blocks
                    self._short_of_blocks = True
                    return budget
                if self._preempt_one(index) is request:
                    break
            if new is None:
                continue  # it gave way itself; those behind, whom peers read, have more room now
            self._put_in_step(step, request, count, new)
            budget -= count
            index += 1
        return budget

    def _preempt_one(self, first: int) -> SchedulerRequest:
        """Free the blocks of a request; it computes anew later.

        It is the latest (or least important) of those from place `first` on, which are not in this
        step yet; where a peer reads that one's KV, the latest that is as important and not read.
        Whose blocks a load may be writing gives none; the one at `first` wants more, so it is not
        such a one.
        """
        able = [r for r in self._running[first:] if not r.is_loading_beside]
        request = able[-1]
        if self._remote.is_read(request):
            by_priority = self._config.scheduling_policy == "priority"
            for other in reversed(able):
                if by_priority and other.priority != request.priority:
                    break
                if not self._remote.is_read(other):
                    request = other
                    break
        self._running.remove(request)
        self._leave_batch(request)
        self._kv.free(request.request_id, request.last_step)
        request.rewind()
        request.status = RequestStatus.PREEMPTED
        self._counters.num_preemptions += 1
        self._waiting.push(request)
        self._remote.note_preempted(request)
        return request

    def _schedule_waiting(self, step: SchedulerOutput, budget: int) -> None:
        """Waiting requests in order, until one does not fit. Those of whom it is not known yet what
        can be loaded are passed over."""
        unsettled: list[SchedulerRequest] = []
        self._admit_waiting(step, budget, unsettled)
        for request in unsettled:
            self._waiting.push(request)

    def _admit_waiting(
        self, step: SchedulerOutput, budget: int, unsettled: list[SchedulerRequest]
    ) -> None:
        growth: int | None = None
        pending = self._num_pending_tokens
        while len(self._waiting) and self._num_placed < self.max_num_seqs:
            request = self._waiting.peek()
            computed = self._kv.get_computed_blocks(request)
            others = pending - request.num_pending_prompt_tokens
            match = self._remote.match(request, computed.num_tokens, others)
            external, is_async = match.num_tokens, match.is_async
            if external is None:
                unsettled.append(self._waiting.pop())
                continue
            known = computed.num_tokens + external
            if not is_async and budget <= 0:
                return
            # room for all it knows now, not only for its first chunk: else it is preempted soon
            num_tokens = max(request.num_tokens, known + is_async)
            if not self._kv.can_fit(computed, num_tokens):
                return
            # and for what all together will need; one alone may try
            if self._num_placed and self._config.reserve_output:
                if growth is None:
                    growth = self._expected.blocks(self._running, self._remote.loading.values())
                num_tokens += self._expected.tokens(request)
                if not self._kv.can_fit(computed, num_tokens, growth):
                    return
            self._waiting.pop()
            self._counters.count_admission(request, computed.num_tokens)
            if is_async:
                budget -= self._admit_to_load(step, request, computed, match, budget)
            else:
                budget -= self._admit_to_compute(step, request, computed, external, budget)
            if growth is not None:
                running, loading = ((), [request]) if is_async else ([request], ())
                growth += self._expected.blocks(running, loading)

    @property
    def _num_pending_tokens(self) -> int:
        """Prompt tokens that are to be computed, of running and waiting requests."""
        running = sum(request.num_pending_prompt_tokens for request in self._running)
        return running + self._waiting.num_pending_tokens

    @property
    def _num_placed(self) -> int:
        """Places taken: a request that loads has its place, so that nothing delays it after."""
        return len(self._running) + len(self._remote.loading)

    def _admit_to_load(
        self,
        step: SchedulerOutput,
        request: SchedulerRequest,
        computed: ComputedBlocks,
        match: Match,
        budget: int,
    ) -> int:
        """Give the request all its blocks and its next slot, and order the load: it is parked until
        its KV has arrived, or computes the beginning of it; returns what that takes of the budget.
        """
        assert match.num_tokens is not None
        slots = max(request.num_tokens, computed.num_tokens + match.num_tokens + 1)
        blocks = self._kv.allocate_slots(request, slots, computed)
        assert blocks is not None, "can_fit has promised the blocks"
        request.num_computed_tokens = computed.num_tokens
        self._remote.start_load(request, match)
        if request.beside is None:
            return 0
        self._enter_batch(request)
        count = self._limited(match.num_beside, budget)
        if count > 0:
            self._put_in_step(step, request, count, blocks)
        return max(0, count)

    def _admit_to_compute(
        self,
        step: SchedulerOutput,
        request: SchedulerRequest,
        computed: ComputedBlocks,
        external: int,
        budget: int,
    ) -> int:
        """Put the request into this step; returns the tokens it takes of the budget."""
        known = computed.num_tokens + external
        start = min(known, request.num_tokens - 1)
        count = self._limited(request.num_expected_tokens - start, budget)
        blocks = self._kv.allocate_slots(request, max(known, start + count), computed)
        assert blocks is not None, "can_fit has promised the blocks"
        request.num_computed_tokens = computed.num_tokens
        self._remote.note_allocated(request, external)
        request.num_computed_tokens = start
        self._enter_batch(request)
        self._put_in_step(step, request, count, blocks)
        return count

    def _limited(self, count: int, limit: int) -> int:
        """So many tokens of one request, or as many as a step takes."""
        threshold = self._config.long_prefill_token_threshold
        return min(count, limit, threshold) if threshold > 0 else min(count, limit)

    def _put_in_step(
        self,
        step: SchedulerOutput,
        request: SchedulerRequest,
        count: int,
        new_block_ids: tuple[list[int], ...],
    ) -> None:
        start = request.num_computed_tokens + request.num_in_flight_tokens
        self._in_flight.add(step, request, count)
        if request.in_batch:
            step.running_requests.append(RunningRequest(request.request_id, new_block_ids, start))
            if count == 1:
                return  # its block is named, where it fills one, with the results
        if not request.num_external_tokens:  # what a load in this step brings may yet fail
            self._cache_known(request, start + count)
        if request.in_batch:
            return
        request.in_batch = True
        step.new_requests.append(
            NewRequest(
                request_id=request.request_id,
                token_ids=list(request.all_token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.runner_sampling_params,
                eos_token_ids=request.eos_token_ids,
                block_ids=self._kv.get_block_ids(request.request_id),
                num_computed_tokens=start,
            )
        )

    def _cache_known(self, request: SchedulerRequest, num_tokens: int) -> None:
        """Name the blocks that the first `num_tokens` fill: a placeholder has no name yet."""
        self._kv.cache_blocks(request, min(num_tokens, request.num_tokens))

    # --- results

    def _advance(self, request: SchedulerRequest, count: int, output: ModelRunnerOutput) -> None:
        """Take one request's share of a step."""
        if request.num_computed_tokens < request.num_prompt_tokens:
            self._counters.count_computed(request, count)
        request.num_computed_tokens += count
        if request.num_external_tokens:
            self._remote.note_loaded_in_step(request)
            self._cache_known(request, request.num_computed_tokens)
        elif request.num_computed_tokens % self._kv.block_size < count:
            self._cache_known(request, request.num_computed_tokens)
        if request.beside is not None:
            self._remote.join(request)
        request_id = request.request_id
        if output.prompt_logprobs and (part := output.prompt_logprobs.get(request_id)) is not None:
            request.keep_prompt_logprobs(part)
        sampled = output.sampled_token_ids.get(request_id)
        if not sampled:
            return
        for accepted, token_id in enumerate(sampled, 1):
            if request.append_output(token_id):
                sampled = sampled[:accepted]
                break
        self._counters.generation_tokens += len(sampled)
        self._report(request, sampled, output)

    def _report(
        self, request: SchedulerRequest, tokens: list[int], output: ModelRunnerOutput
    ) -> None:
        logprobs = output.logprobs.get(request.request_id) if output.logprobs else None
        self._outputs.add_tokens(request, tokens, logprobs)
        if request.status is not RequestStatus.RUNNING:
            self._expected.learn(request)
            self._finish(request, request.status)
        elif request.is_handoff:
            self._finish(request, RequestStatus.FINISHED_HANDED_OFF)
            self.has_handed_off = True

    def _discard_step(self, request: SchedulerRequest, num_valid_tokens: int) -> None:
        """A load that this step relied on has failed: compute from what is valid."""
        self._leave_batch(request)
        request.num_computed_tokens = self._remote.note_failed_in_step(request, num_valid_tokens)

    def _enter_batch(self, request: SchedulerRequest) -> None:
        request.status = RequestStatus.RUNNING
        if request.beside is None:
            request.note_cached_tokens()
        bisect.insort(self._running, request, key=self._order_key)

    def _admit_loaded(self, request: SchedulerRequest) -> None:
        """Its KV has come, and perhaps a token with it that ends it."""
        status = request.status
        self._enter_batch(request)
        if status.is_finished:
            self._finish(request, status)
            self._outputs.add_end(request)

    def _leave_to_store(self, request_id: str, handed: HandedOver) -> None:
        """Its KV may be in the store: it waits like one that was never a peer's, with the token
        that the peer has sampled."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request_id not in self._waiting:
            self._waiting.push(request)
        if request.take_over(handed.token_id, handed.num_cached_tokens):
            self._finish(request, request.status)
            self._outputs.add_end(request)
        else:
            self._remote.note_left_to_store(request)

    def _fail_handoff(self, request_id: str, why: str) -> None:
        """Its KV will not come from its peer: whoever sent it decides how it goes on."""
        request = self._requests.get(request_id)
        if request is not None:
            self._counters.num_kv_load_failures += 1
            self._finish(request, RequestStatus.FINISHED_ERROR)
            self._outputs.add_handoff_failure(request, why)

    def _order_key(self, request: SchedulerRequest) -> OrderKey:
        return order_key(self._config.scheduling_policy, request)

    def _leave_batch(self, request: SchedulerRequest) -> None:
        """Have the runner drop the request's row, if it has one."""
        if request.in_batch:
            self._left_batch.append(request.request_id)
            request.in_batch = False

    def _finish(self, request: SchedulerRequest, status: RequestStatus) -> None:
        """Take the request out of wherever it stands; its blocks are free once nobody reads."""
        if request.request_id in self._waiting:
            self._waiting.remove(request.request_id)
        elif request.request_id not in self._remote.loading:
            self._running.remove(request)
        request.status = status
        self._leave_batch(request)
        del self._requests[request.request_id]
        self._remote.end(request)
