"""The scheduler half of the StoreConnector: hand-offs, and the store as a tier of the prefix cache.

A request without a commit is looked up in the store when it arrives. The pages found are loaded
while others compute, or computed, whichever is predicted cheaper, or the first are computed while
the last are loaded; the pages that it computes go to the store in the background. A preempted
request is looked up again: what it had may have been stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from diptych.connectors.base import KVConnectorOutput, KVLayout, RequestView, StepStage
from diptych.connectors.direct_times import FirstSteps
from diptych.connectors.page_costs import LoadCosts
from diptych.connectors.page_lookup import PrefixLookup
from diptych.connectors.page_orders import SaveOrder
from diptych.connectors.page_scheduler import PageConnectorScheduler
from diptych.connectors.page_split import Prefix
from diptych.connectors.pages import PageObject, object_ranges
from diptych.engine.request import KVObject
from diptych.hashing import PAGE_TOKENS


class Loads(Protocol):
    """The loads of the worker half, asked from the thread that steps."""

    @property
    def is_arriving(self) -> bool:
        """Whether one is about to end."""
        ...

    @property
    def first_steps(self) -> FirstSteps: ...
    def await_arrival(self, until_s: float, *, first: bool) -> None: ...
    def hold_until_s(self, limit_s: float) -> float: ...
    def take_arrived(self) -> KVConnectorOutput | None: ...


class StoreScheduler(PageConnectorScheduler):
    """
    Args:
        lookup: None: prefixes are not read from the store.
        write_through: store the pages of prompts that are not handed over, too.
        store_decoded: store the pages of outputs, too, for the next turn of a conversation.
        loads: those of the worker half, where that is in this process.
    """

    def __init__(
        self,
        layout: KVLayout,
        lookup: PrefixLookup | None,
        costs: LoadCosts,
        *,
        write_through: bool = True,
        store_decoded: bool = False,
        loads: Loads | None = None,
    ) -> None:
        super().__init__(layout)
        self._lookup = lookup
        self._costs = costs
        self._write_through = write_through
        self._store_decoded = store_decoded
        self._loads = loads
        self._handed: set[str] = set()
        self._loading: dict[str, int] = {}

    @property
    def is_expecting(self) -> bool:
        return self._loads is not None and self._loads.is_arriving

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        if self._loads is not None:
            self._loads.await_arrival(until_s, first=first)

    def hold_until_s(self, limit_s: float) -> float:
        return 0.0 if self._loads is None else self._loads.hold_until_s(limit_s)

    def take_arrived(self) -> KVConnectorOutput | None:
        return None if self._loads is None else self._loads.take_arrived()

    def note_step(self, stage: StepStage, request_ids: Collection[str]) -> None:
        if self._loads is not None:
            self._loads.first_steps.note(stage, request_ids)

    def request_added(self, request: RequestView) -> None:
        self._track(request)
        if not _has_commit(request):
            self._start_lookup(request)

    def request_left_to_store(self, request: RequestView) -> None:
        """A peer has stored all that it computed, the tail too: all but the last token."""
        self._start_lookup(request, tail_end=request.num_tokens - 1)

    def request_preempted(self, request: RequestView) -> bool:
        if self._lookup is None:
            return False
        tracked = self._track(request)
        tracked.found, tracked.load_ordered = None, False
        self._start_lookup(request)
        return True

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, num_pending_tokens: int = 0
    ) -> tuple[int | None, bool]:
        if self._lookup is not None and self._lookup.pending(request.request_id):
            return None, False
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        tracked = self._track(request)
        tracked.num_beside = 0
        if not found or tracked.found_by_commit:
            return found, is_async
        end = num_computed_tokens + found
        prefix = Prefix(
            num_computed_tokens, end, request.num_tokens - end, num_ahead=num_pending_tokens
        )
        pages = range((num_computed_tokens // PAGE_TOKENS + 1) * PAGE_TOKENS, end, PAGE_TOKENS)
        cut = self._costs.cut(prefix, pages, sum(self._loading.values()))
        if cut == end:
            return 0, False
        tracked.num_beside = cut - num_computed_tokens
        return found, is_async

    def num_computed_beside(self, request: RequestView) -> int:
        return self._track(request).num_beside

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[int], num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_external_tokens)
        if num_external_tokens:
            self._loading[request.request_id] = num_external_tokens
            if _has_commit(request):
                self._handed.add(request.request_id)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.finished_recving:
            self._loading.pop(request_id, None)
        if self._loads is not None and (handed := self._handed & output.finished_recving):
            self._handed -= handed
            self._loads.first_steps.begin(handed)
        if output.rates is not None:
            self._costs.note(output.rates)

    def request_finished(self, request: RequestView, block_ids: list[int]) -> bool:
        self._forget(request.request_id)
        return super().request_finished(request, block_ids)

    def abort(self, request_id: str) -> None:
        self._forget(request_id)
        super().abort(request_id)

    def shutdown(self) -> None:
        if self._lookup is not None:
            self._lookup.close()

    def _start_lookup(self, request: RequestView, tail_end: int = 0) -> None:
        """Ask for its pages; with `tail_end` for those up to there, and for the tail."""
        if self._lookup is None:
            return
        self._track(request).tail_end = tail_end
        ends: Iterable[int] = range(PAGE_TOKENS, request.num_tokens + 1, PAGE_TOKENS)
        if tail_end:
            ends = [tokens.end for tokens in object_ranges(tail_end)]
        self._lookup.start(request.request_id, [request.prefix_hash(end) for end in ends])

    def _forget(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        self._handed.discard(request_id)
        if self._loads is not None:
            self._loads.first_steps.forget(request_id)
        if self._lookup is not None:
            self._lookup.forget(request_id)

    def _find(self, request: RequestView, num_computed_tokens: int) -> list[KVObject]:
        """What the commit names, or the pages that were looked up, whichever reaches further."""
        tracked = self._track(request)
        named = super()._find(request, num_computed_tokens)
        num_found = self._lookup.found(request.request_id) if self._lookup is not None else 0
        stored_end = num_found * PAGE_TOKENS
        if tracked.tail_end:
            stored_end = min(stored_end, tracked.tail_end)
        tracked.num_stored_tokens = max(tracked.num_stored_tokens, stored_end)
        named_end = named[-1].end_token if named else num_computed_tokens
        tracked.found_by_commit = bool(named) and named_end >= stored_end
        if tracked.found_by_commit or stored_end <= num_computed_tokens:
            return named
        first = num_computed_tokens // PAGE_TOKENS
        return [self._object(request, tokens) for tokens in object_ranges(stored_end)[first:]]

    def _save_order(
        self, request: RequestView, block_ids: list[int], num_computed_tokens: int
    ) -> SaveOrder | None:
        if self._wants_save(request):
            return super()._save_order(request, block_ids, num_computed_tokens)
        if not (self._write_through or self._store_decoded):
            return None
        return self._write_through_order(request, block_ids, num_computed_tokens)

    def _write_through_order(
        self, request: RequestView, block_ids: list[int], num_computed_tokens: int
    ) -> SaveOrder | None:
        """The pages that this step completes and the store has not got; nobody waits for them."""
        tracked = self._track(request)
        num_prompt = len(request.prompt_token_ids)
        first, end = 0, min(num_computed_tokens, request.num_tokens)
        if not self._store_decoded:
            end = min(end, num_prompt)
        if _has_commit(request) or not self._write_through:
            first = num_prompt // PAGE_TOKENS  # the pages before were stored by prefill
        first = max(first, tracked.num_stored_tokens // PAGE_TOKENS)
        pages = range(first, end // PAGE_TOKENS)
        if not pages:
            return None
        tracked.num_stored_tokens = pages.stop * PAGE_TOKENS
        ends = [(number + 1) * PAGE_TOKENS for number in pages]
        return SaveOrder(
            request_id=request.request_id,
            epoch=0,
            kv_namespace="",
            num_cached_tokens=0,
            objects=[PageObject(request.prefix_hash(e), e - PAGE_TOKENS, e) for e in ends],
            block_ids=list(block_ids),
            last=True,
            hand_off=False,
            tenant=request.tenant,
        )


def _has_commit(request: RequestView) -> bool:
    params = request.kv_transfer_params
    return params is not None and params.commit is not None
