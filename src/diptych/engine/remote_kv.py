"""The scheduler's side of KV that comes from or goes to other places.

Which requests load, which save, and whose blocks must outlive them: a block that a transfer may
still touch is quarantined until the connector reports the transfer's end.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorScheduler,
    RequestView,
)
from diptych.engine.kv_cache_manager import KVCacheManager
from diptych.engine.load_beside import LoadBeside
from diptych.engine.outputs_builder import OutputsBuilder
from diptych.engine.request import KVCommit
from diptych.engine.scheduler_counters import SchedulerCounters
from diptych.engine.scheduler_request import RequestStatus, SchedulerRequest
from diptych.engine.step import SchedulerOutput

logger = logging.getLogger(__name__)


class Match(NamedTuple):
    """KV beyond the local hit that the connector can bring.

    Attributes:
        num_tokens: None: not known yet.
        is_async: whether it takes time.
        num_beside: the first so many of them the request computes itself meanwhile.
    """

    num_tokens: int | None = 0
    is_async: bool = False
    num_beside: int = 0


class RemoteKV:
    """Loads, saves and quarantine. Without a connector nothing loads and commits are empty."""

    def __init__(
        self,
        connector: KVConnectorScheduler | None,
        kv: KVCacheManager,
        outputs: OutputsBuilder,
        counters: SchedulerCounters,
        namespace: bytes,
    ) -> None:
        self._connector = connector
        self._kv = kv
        self._outputs = outputs
        self._counters = counters
        self._namespace = namespace
        self.loading: dict[str, SchedulerRequest] = {}
        self._beside: dict[str, SchedulerRequest] = {}
        self._saving: dict[str, SchedulerRequest] = {}

    @property
    def active(self) -> bool:
        """Whether a transfer is under way."""
        return bool(self.loading or self._saving or self._kv.quarantined)

    def knows(self, request_id: str) -> bool:
        """Whether a transfer of an ended request of this id is under way."""
        return request_id in self._kv.quarantined

    # --- loads

    def note_added(self, request: SchedulerRequest) -> None:
        """The request waits from now on."""
        if self._connector is not None and not request.skip_reading_prefix_cache:
            self._connector.request_added(request)

    def note_preempted(self, request: SchedulerRequest) -> None:
        """The request has lost its blocks: what it loads next is another load."""
        if self._connector is not None and self._connector.request_preempted(request):
            request.remote_kv_tried = False

    def is_read(self, request: SchedulerRequest) -> bool:
        """Whether a peer may be reading what the request has computed so far."""
        return self._connector is not None and self._connector.is_read(request.request_id)

    def match(
        self, request: SchedulerRequest, num_computed_tokens: int, num_pending_tokens: int
    ) -> Match:
        """What the connector can bring beyond the local hit. `num_pending_tokens` of other requests
        are to be computed."""
        if self._connector is None or request.remote_kv_tried or request.skip_reading_prefix_cache:
            return Match()
        tokens, is_async = self._connector.get_num_new_matched_tokens(
            request, num_computed_tokens, num_pending_tokens
        )
        if tokens is None:
            return Match(None)
        tokens = min(tokens, request.num_tokens - num_computed_tokens)
        if tokens <= 0:
            return Match()
        beside = self._connector.num_computed_beside(request) if is_async else 0
        # a load of nothing would be none
        return Match(tokens, is_async, min(beside, tokens - 1))

    def start_load(self, request: SchedulerRequest, match: Match) -> None:
        """The request has its blocks: order the load of all but what it computes meanwhile."""
        assert match.num_tokens is not None
        if not match.num_beside:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading[request.request_id] = request
            self.note_allocated(request, match.num_tokens)
            return
        local = request.num_computed_tokens
        request.beside = LoadBeside(local + match.num_beside, local + match.num_tokens)
        self._beside[request.request_id] = request
        self._order_load(request, match.num_tokens - match.num_beside)

    def note_allocated(self, request: SchedulerRequest, num_external_tokens: int) -> None:
        """The request has its blocks; its computed tokens are those of the local hit.

        A load is tried once, and once more after each preemption where the connector can.
        """
        request.num_external_tokens = num_external_tokens
        self._order_load(request, num_external_tokens)

    def _order_load(self, request: SchedulerRequest, num_external_tokens: int) -> None:
        request.num_local_tokens = request.num_computed_tokens
        request.remote_kv_tried = True
        if self._connector is not None:
            block_ids = self._kv.get_block_ids(request.request_id)[0]
            self._connector.update_state_after_alloc(request, block_ids, num_external_tokens)

    def note_loaded_in_step(self, request: SchedulerRequest) -> None:
        """The step that relied on a synchronous load has succeeded."""
        self._take_loaded(request, request.num_local_tokens + request.num_external_tokens)

    def note_failed_in_step(self, request: SchedulerRequest, num_valid_tokens: int) -> int:
        """The step that relied on a synchronous load has failed; returns the tokens that hold."""
        self._counters.num_kv_load_failures += 1
        return self._take_loaded(request, num_valid_tokens)

    def _take_loaded(self, request: SchedulerRequest, num_valid_tokens: int) -> int:
        """Count what came, at most what was asked for; at least the last token is computed."""
        local = request.num_local_tokens
        asked = local + request.num_external_tokens
        valid = min(max(local, num_valid_tokens), asked, request.num_tokens - 1)
        self._counters.count_loaded(request, local, valid)
        request.num_external_tokens = 0
        return valid

    # --- a step

    def build_meta(
        self, step: SchedulerOutput, requests: dict[str, SchedulerRequest]
    ) -> KVConnectorMetadata | None:
        """The step's orders for the worker half."""
        if self._connector is None:
            return None
        scheduled: dict[str, tuple[RequestView, list[int], int]] = {}
        for request_id in step.num_scheduled_tokens:
            request = requests[request_id]
            block_ids = self._kv.get_block_ids(request_id)[0]
            scheduled[request_id] = (request, block_ids, request.num_planned_tokens)
        return self._connector.build_connector_meta(scheduled)

    def update(self, output: KVConnectorOutput) -> list[SchedulerRequest]:
        """Take what the worker half finished; returns requests whose load has ended."""
        if self._connector is not None:
            self._connector.update_connector_output(output)
        self._counters.num_kv_save_drops += output.num_dropped_saves
        self._counters.num_kv_corrupt += output.num_corrupt
        loaded = []
        for request_id in sorted(output.finished_recving):
            if (beside := self._beside.pop(request_id, None)) is not None:
                self._finish_beside(beside, output.failed_recving.get(request_id))
                loaded.append(beside)
                continue
            request = self.loading.pop(request_id, None)
            if request is not None and request_id in output.left_to_store:
                self._unload(request)
            elif request is not None:
                if (handed := output.handed_over.get(request_id)) is not None:
                    request.take_over(handed.token_id, handed.num_cached_tokens)
                self._finish_load(request, output.failed_recving.get(request_id))
                loaded.append(request)
            elif request_id in self._kv.quarantined and request_id not in self._saving:
                self._kv.release_quarantine(request_id)
        self._finish_saves(output)
        return loaded

    @property
    def is_saving(self) -> bool:
        """Whether a hand-off's KV is being saved."""
        return bool(self._saving)

    def finish_saves(self, sent: KVConnectorOutput) -> None:
        """Saves that have ended, and nothing else."""
        if self._connector is not None:
            self._connector.update_connector_output(sent)
        self._finish_saves(sent)

    def _finish_saves(self, output: KVConnectorOutput) -> None:
        for request_id in sorted(output.finished_sending):
            self._finish_save(request_id, output.commits.get(request_id))

    def _unload(self, request: SchedulerRequest) -> None:
        """Nothing has come, nothing will: the request waits again, without blocks."""
        self._kv.free(request.request_id, request.last_step)
        request.rewind()
        request.status = RequestStatus.WAITING
        request.num_external_tokens = 0
        request.remote_kv_tried = False

    def note_left_to_store(self, request: SchedulerRequest) -> None:
        """Its peer computed it and holds it no more: it waits as any other."""
        if self._connector is not None:
            self._connector.request_left_to_store(request)

    def _finish_load(self, request: SchedulerRequest, num_valid_tokens: int | None) -> None:
        if num_valid_tokens is None:
            num_valid_tokens = request.num_tokens
        else:
            asked = request.num_local_tokens + request.num_external_tokens
            self._note_failure(request, num_valid_tokens, asked)
        request.num_computed_tokens = self._take_loaded(request, num_valid_tokens)
        self._kv.cache_blocks(request, request.num_computed_tokens)

    def _finish_beside(self, request: SchedulerRequest, num_valid_tokens: int | None) -> None:
        beside = request.beside
        assert beside is not None, "whoever loads beside has a load until it ends"
        if num_valid_tokens is None:
            num_valid_tokens = beside.end
        else:
            self._note_failure(request, num_valid_tokens, beside.end)
        beside.num_valid = min(max(beside.start, num_valid_tokens), beside.end)

    def join(self, request: SchedulerRequest) -> None:
        """Go on behind what was loaded beside, once that has ended and what comes before it is
        computed: only now do the loaded tokens count, and have their blocks names."""
        beside = request.beside
        if beside is None or beside.num_valid is None:
            return
        if request.num_computed_tokens < beside.start:
            return
        request.beside = None
        valid = min(beside.num_valid, request.num_tokens - 1)
        self._counters.count_loaded(request, beside.start, valid)
        request.num_computed_tokens = valid
        request.note_cached_tokens(beside.start - request.num_local_tokens)
        self._kv.cache_blocks(request, valid)

    def _note_failure(self, request: SchedulerRequest, num_valid: int, num_asked: int) -> None:
        self._counters.num_kv_load_failures += 1
        logger.warning(
            "KV load of request %s failed: %d of %d tokens hold, the rest is computed",
            request.request_id,
            num_valid,
            num_asked,
        )

    def _finish_save(self, request_id: str, commit: KVCommit | None) -> None:
        request = self._saving.pop(request_id, None)
        if request is not None:
            self._report_commit(request, commit)
        if request_id in self._kv.quarantined:
            self._kv.release_quarantine(request_id)

    # --- ends

    def end(self, request: SchedulerRequest) -> None:
        """The request has ended: free its blocks, or quarantine what a transfer may touch."""
        handed_off = request.status == RequestStatus.FINISHED_HANDED_OFF
        if self._is_in_transfer(request):
            self._kv.quarantine(request.request_id, request.last_step)
            if handed_off:
                self._saving[request.request_id] = request
            elif self._connector is not None:
                self._connector.abort(request.request_id)
            return
        self._kv.free(request.request_id, request.last_step)
        if handed_off:
            self._report_commit(request, None)

    def _is_in_transfer(self, request: SchedulerRequest) -> bool:
        for loads in (self.loading, self._beside):
            if loads.pop(request.request_id, None) is not None:
                return True
        if self._connector is None:
            return False
        has_blocks = request.request_id in self._kv.req_to_blocks
        block_ids = self._kv.get_block_ids(request.request_id)[0] if has_blocks else []
        return self._connector.request_finished(request, block_ids)

    def abort_save(self, request_id: str) -> None:
        """The client left while its KV was being handed over; unknown ids are ignored."""
        request = self._saving.pop(request_id, None)
        if request is not None and self._connector is not None:
            self._connector.abort(request_id)
            request.status = RequestStatus.FINISHED_ABORTED
            self._outputs.add_end(request)

    def fail_saves(self, error: str) -> None:
        """The engine has failed: no commit will come."""
        for request in self._saving.values():
            request.status = RequestStatus.FINISHED_ERROR
            self._outputs.add_end(request, error)
        self._saving.clear()

    def _report_commit(self, request: SchedulerRequest, commit: KVCommit | None) -> None:
        """Tell where the prompt's KV lies; where it does not, the receiver computes it."""
        if commit is None or commit.num_tokens < request.num_prompt_tokens:
            self._counters.num_kv_save_failures += 1
        if commit is None:
            namespace = self._namespace.hex()
            commit = KVCommit(
                epoch=0, kv_namespace=namespace, num_tokens=0, objects=[], connector=""
            )
        params = request.kv_transfer_params
        commit = msgspec.structs.replace(
            commit,
            epoch=params.epoch if params is not None else commit.epoch,
            num_cached_tokens=max(0, request.num_cached_tokens),
        )
        self._outputs.add_commit(request, commit)
