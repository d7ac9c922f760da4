"""The worker half that page connectors share, on the model thread: it only queues.

A save is gathered into a staging copy before the step returns, so that the request's blocks are
free to go; a load is scattered on other threads into blocks that no step in flight and no request
that computes has. A load always ends in a report, an aborted one only once no byte of it can arrive
any more: until then its blocks stay quarantined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from diptych.clock import Clock, SystemClock
from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorker,
    KVLayout,
)
from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.page_orders import PageMetadata, PageStore, SaveOrder
from diptych.connectors.pages import PageObject, TokenRange
from diptych.connectors.stored_objects import StoredObjects
from diptych.connectors.transfer_jobs import Load, Save, TransferLimits
from diptych.connectors.transfers import Transfers
from diptych.engine.request import KVObject

if TYPE_CHECKING:
    from torch import Tensor

    from diptych.connectors.page_copy import Bytes

logger = logging.getLogger(__name__)

STAGED_BYTES_CPU, STAGED_BYTES_GPU = 512 << 20, 4 << 30


class PageConnectorWorker(KVConnectorWorker):
    """Moves canonical objects between this engine's cache and a `PageStore`."""

    def __init__(
        self,
        name: str,
        open_store: Callable[[], PageStore],
        limits: TransferLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`open_store` is called on the transfer thread, again after every failure."""
        self._name = name
        self._open_store = open_store
        self._limits = limits or TransferLimits()
        self._clock = clock or SystemClock()
        self._max_staged_bytes = 0
        self._cache: CacheCopier | None = None
        self._transfers: Transfers | None = None

    def register_kv_caches(self, kv_cache: Tensor, layout: KVLayout) -> None:
        default = STAGED_BYTES_GPU if kv_cache.is_cuda else STAGED_BYTES_CPU
        self._max_staged_bytes = self._limits.max_staged_bytes or default
        self._cache = CacheCopier(kv_cache)
        self._transfers = Transfers(
            self._name, self._open_store, self._cache, self._limits, self._clock
        )

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        if not isinstance(metadata, PageMetadata):
            return
        transfers = self._registered()[1]
        metadata.began_s = self._clock.monotonic()
        for order in metadata.loads:
            is_aborted = order.request_id in metadata.aborts
            load = Load(order, self._deadline_s(), order.start_token, is_aborted)
            load.ordered_s = metadata.began_s
            transfers.load(load)
        for request_id in metadata.aborts:
            transfers.abort(request_id)

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        if not isinstance(metadata, PageMetadata):
            return
        cache, transfers = self._registered()
        if metadata.num_tokens:
            seconds = self._clock.monotonic() - metadata.began_s
            transfers.note_computed(metadata.num_tokens, seconds)
        saves = [self._stage(order, cache, transfers) for order in metadata.saves]
        for save in saves:
            if save.order.wait:
                save.done.wait(self._limits.transfer_timeout_s)

    def get_finished(self) -> KVConnectorOutput:
        return self._registered()[1].take_output()

    def take_sent(self) -> KVConnectorOutput | None:
        return self._registered()[1].take_sent()

    @property
    def loads(self) -> Transfers:
        """What the scheduler half may ask of the loads, once the cache is registered."""
        return self._registered()[1]

    def shutdown(self) -> None:
        if self._transfers is not None:
            self._transfers.close()

    def _registered(self) -> tuple[CacheCopier, Transfers]:
        if self._cache is None or self._transfers is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._cache, self._transfers

    def _deadline_s(self) -> float:
        return self._clock.monotonic() + self._limits.transfer_timeout_s

    def _stage(self, order: SaveOrder, cache: CacheCopier, transfers: Transfers) -> Save:
        """Copy the order's objects out of the cache, unless the store had them a moment ago; those
        beyond the bound are not saved."""
        computed_s = self._clock.monotonic()
        sending = transfers.sending(order.request_id)
        sending.closed = order.last
        known = _known(order, cache, transfers.stored)
        missing = [item for item in order.objects if item.key not in known]
        pages = _gather(order, missing[: self._num_that_fit(missing, cache, transfers)], cache)
        if len(pages) < len(missing):
            transfers.note_dropped(len(missing) - len(pages))
            logger.warning(
                "request %s: %d of %d KV objects are not saved, there is no room to stage them",
                order.request_id,
                len(missing) - len(pages),
                len(order.objects),
            )
        num_bytes = sum(page.nbytes for page in pages.values())
        save = Save(order, pages, cache.mark(), self._deadline_s(), sending, num_bytes, known)
        save.computed_s = computed_s
        transfers.save(save)
        return save

    def _num_that_fit(
        self, items: list[PageObject], cache: CacheCopier, transfers: Transfers
    ) -> int:
        """Objects that may be staged now: all where nothing is, else up to the bound."""
        if transfers.num_queued_saves >= self._limits.max_queued_transfers:
            return 0
        staged = transfers.staged_bytes
        if not staged:
            return len(items)
        count = 0
        for item in items:
            staged += (item.end_token - item.start_token) * cache.token_bytes
            if staged > self._max_staged_bytes:
                break
            count += 1
        return count


def _known(order: SaveOrder, cache: CacheCopier, stored: StoredObjects) -> dict[bytes, KVObject]:
    known = {}
    for item in order.objects:
        found = stored.get(item, (item.end_token - item.start_token) * cache.token_bytes)
        if found is not None:
            known[item.key] = found
    return known


def _gather(order: SaveOrder, items: list[PageObject], cache: CacheCopier) -> dict[bytes, Bytes]:
    """The objects' bytes; fewer where memory ends: that costs the save, not the step."""
    pages: dict[bytes, Bytes] = {}
    ranges = [TokenRange(item.start_token, item.end_token) for item in items]
    try:
        for item, page in zip(items, cache.gather_all(order.block_ids, ranges), strict=True):
            pages[item.key] = page
    except (torch.OutOfMemoryError, MemoryError):
        logger.warning("request %s: memory ended while its KV was staged", order.request_id)
    return pages
