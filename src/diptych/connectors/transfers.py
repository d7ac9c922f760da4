"""The transfer thread of a page connector: one at a time, loads before saves.

It owns the store's client. A store that failed is left alone for a while and then opened anew;
until then transfers end at once, as failures. Whatever happens, every load and every hand-off is
reported once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import xxhash

from diptych.clock import Clock
from diptych.connectors.base import KVConnectorOutput
from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.page_orders import LoadOrder, PageStore, SaveOrder
from diptych.connectors.pages import PageObject, TokenRange
from diptych.engine.request import KVCommit, KVObject
from diptych.errors import ConfigError, DiptychError

if TYPE_CHECKING:
    from torch.cuda import Event

    from diptych.connectors.page_copy import Bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")
Tokens = TypeVar("Tokens", KVObject, PageObject)

BATCH_OBJECTS = 64
BATCH_BYTES = 64 << 20


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
class Load:
    """A load under way: `valid` tokens from position 0 hold so far."""

    order: LoadOrder
    mark: Event | None
    deadline_s: float
    valid: int
    aborted: bool = False


@dataclass(slots=True)
class Sending:
    """What is stored of one request's prompt, in token order; None stands for what is not."""

    objects: list[KVObject | None] = field(default_factory=list)
    closed: bool = False
    aborted: bool = False

    def commit(self, order: SaveOrder, connector: str) -> KVCommit:
        """What is stored without a gap from position 0; it may be nothing."""
        objects = list(_until_none(self.objects))
        return KVCommit(
            epoch=order.epoch,
            kv_namespace=order.kv_namespace,
            num_tokens=objects[-1].end_token if objects else 0,
            objects=objects,
            connector=connector,
            num_cached_tokens=order.num_cached_tokens,
        )


@dataclass(slots=True)
class Save:
    """One order's staged copies on their way; `num_bytes` are still staged."""

    order: SaveOrder
    pages: deque[Bytes]
    mark: Event | None
    deadline_s: float
    sending: Sending
    num_bytes: int
    stored: list[KVObject | None] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class Transfers:
    """The queue and the thread. All public methods are for the model thread and never block."""

    def __init__(
        self,
        name: str,
        open_store: Callable[[], PageStore],
        copier: CacheCopier,
        limits: TransferLimits,
        clock: Clock,
    ) -> None:
        self._name = name
        self._open_store = open_store
        self._copier = copier
        self._limits = limits
        self._clock = clock
        self._wake = threading.Condition()
        self._loads: deque[Load] = deque()
        self._saves: deque[Save] = deque()
        self._live_loads: dict[str, Load] = {}
        self._sendings: dict[str, Sending] = {}
        self._staged_bytes = 0
        self._output = KVConnectorOutput()
        self._closing = False
        self._store: PageStore | None = None
        self._down_until_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)
        self._thread.start()

    @property
    def num_queued_saves(self) -> int:
        return len(self._saves)

    @property
    def staged_bytes(self) -> int:
        """Bytes of staged copies that are not stored yet."""
        return self._staged_bytes

    def sending(self, request_id: str) -> Sending:
        """What is known of the request's prompt, new at its first save."""
        with self._wake:
            return self._sendings.setdefault(request_id, Sending())

    def load(self, load: Load) -> None:
        """Queue a load; where the queue is full it has failed."""
        with self._wake:
            self._live_loads[load.order.request_id] = load
            if len(self._loads) < self._limits.max_queued_transfers:
                self._loads.append(load)
                self._wake.notify()
            else:
                self._report_load(load)

    def save(self, save: Save) -> None:
        """Queue staged copies."""
        with self._wake:
            self._staged_bytes += save.num_bytes
            self._saves.append(save)
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Give a request's transfers up; they are reported once nothing of them can move."""
        with self._wake:
            if load := self._live_loads.get(request_id):
                load.aborted = True
            if sending := self._sendings.get(request_id):
                sending.aborted = True
                if not sending.closed:
                    del self._sendings[request_id]

    def take_output(self) -> KVConnectorOutput:
        """What was reported since the last call."""
        with self._wake:
            output, self._output = self._output, KVConnectorOutput()
        return output

    def close(self) -> None:
        """Finish what is queued, for as long as a transfer may take. Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(self._limits.transfer_timeout_s)

    # --- the transfer thread

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
                    self._report_load(load)
            elif save is not None:
                self._guarded(self._save, save)
                self._finish_save(save)
            else:
                break
        self._close_store()

    def _guarded(self, move: Callable[[T, PageStore], None], job: T) -> None:
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
        self._close_store()

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with contextlib.suppress(Exception):
                store.close()

    def _load(self, load: Load, store: PageStore) -> None:
        for batch in _batches(load.order.objects, self._copier.token_bytes):
            if load.aborted or self._is_late(load.deadline_s):
                return
            buffers = self._copier.host_buffers([o.num_bytes for o in batch])
            read = store.get_many([(o.key, b.data) for o, b in zip(batch, buffers, strict=True)])
            for item, buffer, arrived in zip(batch, buffers, read, strict=True):
                if load.aborted or not arrived or not _verified(load.order, item, buffer.data):
                    return
                wanted = TokenRange(
                    max(item.start_token, load.order.start_token),
                    min(item.end_token, load.order.end_token),
                )
                block_ids = load.order.block_ids
                self._copier.scatter(buffer, item.start_token, block_ids, wanted, load.mark)
                load.valid = wanted.end

    def _report_load(self, load: Load) -> None:
        """Under the lock: no byte of the load can arrive any more."""
        request_id = load.order.request_id
        if self._live_loads.get(request_id) is load:
            del self._live_loads[request_id]
        self._output.finished_recving.add(request_id)
        if load.valid < load.order.end_token:
            self._output.failed_recving[request_id] = load.valid

    def _save(self, save: Save, store: PageStore) -> None:
        for batch in _batches(save.order.objects[: len(save.pages)], self._copier.token_bytes):
            if save.sending.aborted or self._is_late(save.deadline_s):
                return
            data = self._copier.to_host([save.pages.popleft() for _ in batch], save.mark)
            stored = store.put_many([(o.key, b) for o, b in zip(batch, data, strict=True)])
            for item, bytes_, checksum in zip(batch, data, stored, strict=True):
                save.stored.append(_stored_object(item, bytes_.nbytes, checksum))
            self._unstage(save, sum(bytes_.nbytes for bytes_ in data))

    def _unstage(self, save: Save, num_bytes: int) -> None:
        with self._wake:
            self._staged_bytes -= num_bytes
            save.num_bytes -= num_bytes

    def _finish_save(self, save: Save) -> None:
        order, sending = save.order, save.sending
        missing = len(order.objects) - len(save.stored)
        sending.objects += [*save.stored, *[None] * missing]
        save.pages.clear()
        self._unstage(save, save.num_bytes)
        if order.last:
            with self._wake:
                self._report_save(order, sending)
        save.done.set()

    def _report_save(self, order: SaveOrder, sending: Sending) -> None:
        """Under the lock: all of the prompt's saves have ended."""
        if self._sendings.get(order.request_id) is sending:
            del self._sendings[order.request_id]
        if order.hand_off:
            self._output.finished_sending.add(order.request_id)
            if not sending.aborted:
                self._output.commits[order.request_id] = sending.commit(order, self._name)

    def _is_late(self, deadline_s: float) -> bool:
        if self._clock.monotonic() <= deadline_s:
            return False
        logger.warning("%s: a transfer passed its deadline", self._name)
        return True


def _verified(order: LoadOrder, item: KVObject, data: memoryview) -> bool:
    if xxhash.xxh3_64_intdigest(data) == item.checksum:
        return True
    tokens = (item.start_token, item.end_token)
    logger.warning("request %s: the checksum of tokens %d..%d differs", order.request_id, *tokens)
    return False


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
