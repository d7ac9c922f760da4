"""The worker half that page connectors share: one transfer thread between KV cache and store.

The model thread only queues. A save is gathered into a staging copy before the step returns, so
that the request's blocks are free to go; a load is scattered on the transfer thread into blocks
that nobody reads yet. A load always ends in a report, an aborted one only once no byte of it can
arrive any more: until then its blocks stay quarantined.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch
import xxhash

from diptych.clock import Clock, SystemClock
from diptych.connectors.base import (
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorker,
    KVLayout,
)
from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.page_orders import LoadOrder, PageMetadata, PageStore, SaveOrder
from diptych.connectors.pages import PageObject, TokenRange
from diptych.engine.request import KVCommit, KVObject
from diptych.errors import ConfigError, DiptychError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

    from diptych.connectors.page_copy import Bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Tokens = TypeVar("Tokens", KVObject, PageObject)

BATCH_OBJECTS = 64
BATCH_BYTES = 64 << 20
STAGED_BYTES_CPU, STAGED_BYTES_GPU = 512 << 20, 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferLimits:
    """Bounds of one engine's transfers.

    `max_staged_bytes` bounds what waits to be stored, in the cache's own memory: beyond it only a
    save that finds nothing waiting is staged whole. None takes 512 MiB, 4 GiB on a GPU.
    """

    transfer_timeout_s: float = 10.0
    retry_s: float = 1.0
    max_queued_transfers: int = 1024
    max_staged_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("transfer_timeout_s", "retry_s", "max_queued_transfers", "max_staged_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be positive, not {value}")


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    mark: Event | None
    deadline_s: float
    valid: int
    aborted: bool = False


@dataclass(slots=True)
class _Sending:
    """What is stored of one request's prompt, in token order; None stands for what is not."""

    objects: list[KVObject | None] = field(default_factory=list)
    closed: bool = False
    aborted: bool = False


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    pages: deque[Bytes]
    mark: Event | None
    deadline_s: float
    sending: _Sending
    num_bytes: int
    stored: list[KVObject | None] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


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
        self._copier: CacheCopier | None = None
        self._wake = threading.Condition()
        self._loads: deque[_Load] = deque()
        self._saves: deque[_Save] = deque()
        self._live_loads: dict[str, _Load] = {}
        self._live_sendings: dict[str, _Sending] = {}
        self._staged_bytes = 0
        self._max_staged_bytes = 0
        self._output = KVConnectorOutput()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._store: PageStore | None = None
        self._down_until_s = 0.0

    def register_kv_caches(self, kv_cache: Tensor, layout: KVLayout) -> None:
        self._copier = CacheCopier(kv_cache)
        default = STAGED_BYTES_GPU if kv_cache.is_cuda else STAGED_BYTES_CPU
        self._max_staged_bytes = self._limits.max_staged_bytes or default
        self._thread.start()

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        if not isinstance(metadata, PageMetadata):
            return
        mark = self._cache.mark() if metadata.loads else None
        deadline_s = self._clock.monotonic() + self._limits.transfer_timeout_s
        with self._wake:
            for order in metadata.loads:
                self._queue_load(_Load(order, mark, deadline_s, order.start_token))
            for request_id in metadata.aborts:
                self._abort(request_id)
            self._wake.notify()

    def wait_for_save(self, metadata: KVConnectorMetadata) -> None:
        if not isinstance(metadata, PageMetadata):
            return
        saves = [self._stage(order) for order in metadata.saves]
        with self._wake:
            self._saves.extend(saves)
            self._wake.notify()
        for save in saves:
            if not save.order.hand_off:
                save.done.wait(self._limits.transfer_timeout_s)

    def get_finished(self) -> KVConnectorOutput:
        with self._wake:
            output, self._output = self._output, KVConnectorOutput()
        return output

    def shutdown(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(self._limits.transfer_timeout_s)

    @property
    def _cache(self) -> CacheCopier:
        if self._copier is None:
            raise RuntimeError("register_kv_caches has not been called")
        return self._copier

    def _queue_load(self, load: _Load) -> None:
        self._live_loads[load.order.request_id] = load
        if len(self._loads) < self._limits.max_queued_transfers:
            self._loads.append(load)
        else:
            self._finish_load(load)

    def _abort(self, request_id: str) -> None:
        if load := self._live_loads.get(request_id):
            load.aborted = True
        if sending := self._live_sendings.get(request_id):
            sending.aborted = True
            if not sending.closed:
                del self._live_sendings[request_id]

    def _stage(self, order: SaveOrder) -> _Save:
        """Copy the order's objects out of the cache; those beyond the bound are not saved."""
        sending = self._live_sendings.setdefault(order.request_id, _Sending())
        sending.closed = order.last
        pages = self._gather(order, self._num_that_fit(order))
        if len(pages) < len(order.objects):
            logger.warning(
                "request %s: %d of %d KV objects are not saved, there is no room to stage them",
                order.request_id,
                len(order.objects) - len(pages),
                len(order.objects),
            )
        num_bytes = sum(page.nbytes for page in pages)
        with self._wake:
            self._staged_bytes += num_bytes
        deadline_s = self._clock.monotonic() + self._limits.transfer_timeout_s
        return _Save(order, pages, self._cache.mark(), deadline_s, sending, num_bytes)

    def _num_that_fit(self, order: SaveOrder) -> int:
        """Objects that may be staged now: all where nothing is, else up to the bound."""
        with self._wake:
            staged, num_queued = self._staged_bytes, len(self._saves)
        if num_queued >= self._limits.max_queued_transfers:
            return 0
        if not staged:
            return len(order.objects)
        room = self._max_staged_bytes - staged
        first = order.objects[0].start_token
        sizes = ((o.end_token - first) * self._cache.token_bytes for o in order.objects)
        return sum(size <= room for size in sizes)

    def _gather(self, order: SaveOrder, count: int) -> deque[Bytes]:
        """The order's first objects; fewer where memory ends: that costs the save, not the step."""
        pages: deque[Bytes] = deque()
        try:
            for item in order.objects[:count]:
                tokens = TokenRange(item.start_token, item.end_token)
                pages.append(self._cache.gather(order.block_ids, tokens))
        except (torch.OutOfMemoryError, MemoryError):
            logger.warning("request %s: memory ended while its KV was staged", order.request_id)
        return pages

    # From here on: the transfer thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._loads or self._saves or self._closing):
                    self._wake.wait()
                load = self._loads.popleft() if self._loads else None
                save = self._saves.popleft() if load is None and self._saves else None
            if load is not None:
                self._guarded(self._load, load)
                with self._wake:
                    self._finish_load(load)
            elif save is not None:
                self._guarded(self._save, save)
                self._finish_save(save)
            else:
                break
        if self._store is not None:
            self._store.close()

    def _guarded(self, move: Callable[[T, PageStore], None], job: T) -> None:
        """Run a transfer; a store that failed is left alone for a while, then opened again."""
        if self._clock.monotonic() < self._down_until_s:
            return
        try:
            if self._store is None:
                self._store = self._open_store()
            move(job, self._store)
            return
        except DiptychError as error:
            logger.warning("%s: transfer failed: %s", self._name, error)
        except Exception:
            logger.exception("%s: transfer failed", self._name)
        self._down_until_s = self._clock.monotonic() + self._limits.retry_s
        if self._store is not None:
            self._store.close()
            self._store = None

    def _load(self, load: _Load, store: PageStore) -> None:
        order = load.order
        for batch in _batches(order.objects, self._cache.token_bytes):
            if load.aborted or self._late(load.deadline_s):
                return
            buffers = self._cache.host_buffers([o.num_bytes for o in batch])
            read = store.get_many([(o.key, b.data) for o, b in zip(batch, buffers, strict=True)])
            for item, buffer, arrived in zip(batch, buffers, read, strict=True):
                if load.aborted or not arrived:
                    return
                if xxhash.xxh3_64_intdigest(buffer.data) != item.checksum:
                    logger.warning(
                        "request %s: checksum of tokens %d..%d differs",
                        order.request_id,
                        item.start_token,
                        item.end_token,
                    )
                    return
                wanted = TokenRange(
                    max(item.start_token, order.start_token), min(item.end_token, order.end_token)
                )
                self._cache.scatter(buffer, item.start_token, order.block_ids, wanted, load.mark)
                load.valid = wanted.end

    def _finish_load(self, load: _Load) -> None:
        """Report a load, under the lock: no byte of it can arrive any more."""
        request_id = load.order.request_id
        if self._live_loads.get(request_id) is load:
            del self._live_loads[request_id]
        self._output.finished_recving.add(request_id)
        if load.valid < load.order.end_token:
            self._output.failed_recving[request_id] = load.valid

    def _save(self, save: _Save, store: PageStore) -> None:
        for batch in _batches(save.order.objects[: len(save.pages)], self._cache.token_bytes):
            if save.sending.aborted or self._late(save.deadline_s):
                return
            data = self._cache.to_host([save.pages.popleft() for _ in batch], save.mark)
            stored = store.put_many([(o.key, b) for o, b in zip(batch, data, strict=True)])
            for item, bytes_, checksum in zip(batch, data, stored, strict=True):
                save.stored.append(_stored_object(item, bytes_.nbytes, checksum))
            self._unstage(save, sum(bytes_.nbytes for bytes_ in data))

    def _unstage(self, save: _Save, num_bytes: int) -> None:
        with self._wake:
            self._staged_bytes -= num_bytes
            save.num_bytes -= num_bytes

    def _finish_save(self, save: _Save) -> None:
        order, sending = save.order, save.sending
        missing = len(order.objects) - len(save.stored)
        sending.objects += [*save.stored, *[None] * missing]
        save.pages.clear()
        self._unstage(save, save.num_bytes)
        with self._wake:
            if order.last:
                if self._live_sendings.get(order.request_id) is sending:
                    del self._live_sendings[order.request_id]
                if order.hand_off:
                    self._output.finished_sending.add(order.request_id)
                    if not sending.aborted:
                        self._output.commits[order.request_id] = self._commit(order, sending)
        save.done.set()

    def _commit(self, order: SaveOrder, sending: _Sending) -> KVCommit:
        """What is stored without a gap from position 0; it may be nothing."""
        objects = list(_until_none(sending.objects))
        return KVCommit(
            epoch=order.epoch,
            kv_namespace=order.kv_namespace,
            num_tokens=objects[-1].end_token if objects else 0,
            objects=objects,
            connector=self._name,
            num_cached_tokens=order.num_cached_tokens,
        )

    def _late(self, deadline_s: float) -> bool:
        if self._clock.monotonic() <= deadline_s:
            return False
        logger.warning("%s: a transfer passed its deadline", self._name)
        return True


def _stored_object(item: PageObject, num_bytes: int, checksum: int | None) -> KVObject | None:
    if checksum is None:
        return None
    return KVObject(
        key=item.key,
        start_token=item.start_token,
        end_token=item.end_token,
        checksum=checksum,
        num_bytes=num_bytes,
    )


def _batches(objects: Sequence[Tokens], token_bytes: int) -> Iterator[list[Tokens]]:
    """Cut by number and by bytes; every batch has at least one object."""
    batch: list[Tokens] = []
    num_bytes = 0
    for item in objects:
        size = (item.end_token - item.start_token) * token_bytes
        if batch and (len(batch) == BATCH_OBJECTS or num_bytes + size > BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(item)
        num_bytes += size
    if batch:
        yield batch


def _until_none(objects: Sequence[KVObject | None]) -> Iterator[KVObject]:
    for item in objects:
        if item is None:
            return
        yield item
