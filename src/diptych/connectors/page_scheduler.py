"""The scheduler half that page connectors share: what to load and what to save, by tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from diptych.connectors.base import KVConnectorScheduler, KVLayout, RequestView
from diptych.connectors.page_orders import LoadOrder, PageMetadata, SaveOrder
from diptych.connectors.pages import (
    PageObject,
    TokenRange,
    object_ranges,
    overlapping,
    plan_objects,
    token_bytes,
)
from diptych.engine.request import KVObject


@dataclass(slots=True)
class Tracked:
    """What is known of one live request."""

    told_s: float = 0.0
    num_local_tokens: int = 0
    found: list[KVObject] | None = None
    found_by_commit: bool = True
    tail_end: int = 0  # of what may be found; 0: only whole pages are looked for
    follows: bool = False
    num_beside: int = 0  # of what was found, computed while the rest is loaded
    num_cached_tokens: int | None = None
    load_ordered: bool = False
    unsaved: list[PageObject] | None = None
    some_saved: bool = False
    sending: bool = False
    num_stored_tokens: int = 0  # from position 0 on, known to be in the store or on their way


@dataclass(slots=True)
class _Pending:
    """Gathered for the next step."""

    loads: list[LoadOrder] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class PageConnectorScheduler(KVConnectorScheduler):
    """Loads by a hand-off's commit and saves for one.

    A load is tried once per request: what failed is computed, so that no request can loop. What
    was saved in one step is copied by the worker half before the next, so that a preempted
    request's blocks may be freed at any time.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._token_bytes = token_bytes(layout)
        self._requests: dict[str, Tracked] = {}
        self._pending = _Pending()

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, num_pending_tokens: int = 0
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        if tracked.num_cached_tokens is None:
            tracked.num_cached_tokens = num_computed_tokens
        if tracked.load_ordered:
            return 0, False
        if tracked.found is None or tracked.num_local_tokens != num_computed_tokens:
            tracked.num_local_tokens = num_computed_tokens
            tracked.found = self._find(request, num_computed_tokens)
        end = self._usable_end(request, tracked.found)
        found = max(0, end - num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(
        self, request: RequestView, block_ids: list[int], num_external_tokens: int
    ) -> None:
        tracked = self._requests.get(request.request_id)
        if not num_external_tokens or tracked is None or not tracked.found:
            return
        end = self._usable_end(request, tracked.found)
        wanted = TokenRange(end - num_external_tokens, end)
        tracked.load_ordered = True
        self._pending.loads.append(
            LoadOrder(
                request_id=request.request_id,
                start_token=wanted.start,
                end_token=wanted.end,
                objects=overlapping(tracked.found, wanted),
                block_ids=list(block_ids),
                checksums_known=tracked.found_by_commit and not tracked.follows,
                follows=tracked.follows,
                told_s=tracked.told_s,
            )
        )
        tracked.found = []

    def build_connector_meta(
        self, scheduled: dict[str, tuple[RequestView, list[int], int]]
    ) -> PageMetadata:
        pending, self._pending = self._pending, _Pending()
        saves = []
        num_tokens = 0
        for request, block_ids, num_computed in scheduled.values():
            count = num_computed - request.num_computed_tokens
            num_tokens += count if count > 1 else 0
            order = self._save_order(request, block_ids, num_computed)
            if order is not None:
                saves.append(order)
        return PageMetadata(
            loads=pending.loads, saves=saves, aborts=pending.aborts, num_tokens=num_tokens
        )

    def request_finished(self, request: RequestView, block_ids: list[int]) -> bool:
        tracked = self._requests.pop(request.request_id, None)
        if tracked is None:
            return False
        if tracked.some_saved and not tracked.sending:
            self._pending.aborts.append(request.request_id)
        return tracked.sending

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._pending.aborts.append(request_id)

    def _track(self, request: RequestView) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = self._requests[request.request_id] = Tracked(told_s=time.monotonic())
        return tracked

    def _find(self, request: RequestView, num_computed_tokens: int) -> list[KVObject]:
        """Objects to load from, from the one that holds `num_computed_tokens` on, without gaps."""
        params = request.kv_transfer_params
        if params is None or params.commit is None:
            return []
        commit = params.commit
        if commit.pending:
            return self._named(request, num_computed_tokens, commit.num_tokens)
        if commit.kv_namespace != request.prefix_hash(0).hex():
            return []
        objects = []
        for item in overlapping(commit.objects, TokenRange(num_computed_tokens, commit.num_tokens)):
            if not self._names_our_tokens(request, item):
                break
            objects.append(item)
        return objects

    def _named(self, request: RequestView, start: int, end: int) -> list[KVObject]:
        """The objects of a prompt that is being stored, named by its own tokens."""
        self._track(request).follows = True
        objects = [self._object(request, tokens) for tokens in object_ranges(end)]
        return overlapping(objects, TokenRange(start, end))

    def _object(self, request: RequestView, tokens: TokenRange) -> KVObject:
        """Named by the request's own tokens; its checksum is the store's to tell."""
        return KVObject(
            key=request.prefix_hash(tokens.end),
            start_token=tokens.start,
            end_token=tokens.end,
            checksum=0,
            num_bytes=(tokens.end - tokens.start) * self._token_bytes,
        )

    def _names_our_tokens(self, request: RequestView, item: KVObject) -> bool:
        """Whether the object's name and size are those of the request's own tokens."""
        size = (item.end_token - item.start_token) * self._token_bytes
        return (
            item.end_token <= request.num_tokens
            and item.num_bytes == size
            and item.key == request.prefix_hash(item.end_token)
        )

    def _usable_end(self, request: RequestView, found: list[KVObject]) -> int:
        """At least one token is left to compute: its logits are not stored."""
        return min(found[-1].end_token, request.num_tokens - 1) if found else 0

    def _wants_save(self, request: RequestView) -> bool:
        params = request.kv_transfer_params
        return params is not None and params.do_remote_decode

    def _save_order(
        self, request: RequestView, block_ids: list[int], num_computed_tokens: int
    ) -> SaveOrder | None:
        """The objects that this step completes."""
        if not self._wants_save(request):
            return None
        tracked = self._track(request)
        params = request.kv_transfer_params
        hand_off = params is not None and params.do_remote_decode
        num_prompt = len(request.prompt_token_ids)
        if tracked.unsaved is None:
            tracked.unsaved = plan_objects(num_prompt, request.prefix_hash)
        ready = [o for o in tracked.unsaved if o.end_token <= num_computed_tokens]
        if not ready:
            return None
        tracked.unsaved = tracked.unsaved[len(ready) :]
        tracked.some_saved = True
        last = not tracked.unsaved
        tracked.sending = last and hand_off
        return SaveOrder(
            request_id=request.request_id,
            epoch=params.epoch if params is not None else 1,
            kv_namespace=request.prefix_hash(0).hex(),
            num_cached_tokens=tracked.num_cached_tokens or 0,
            objects=ready,
            block_ids=list(block_ids),
            last=last,
            hand_off=hand_off,
            wait=not hand_off,
            tenant=request.tenant,
        )
