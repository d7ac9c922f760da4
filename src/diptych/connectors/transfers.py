"""The transfer thread of a page connector: one at a time, loads before saves. A load of what is
being stored takes what is there, and its turn again.

It owns the store's client. A store that failed is left alone for a while and then opened anew;
until then transfers end at once, as failures. Whatever happens, every load and every hand-off is
reported once.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from diptych.clock import Clock
from diptych.connectors.base import KVConnectorOutput, TransferRates
from diptych.connectors.direct_times import FirstSteps
from diptych.connectors.page_copy import CacheCopier
from diptych.connectors.page_orders import LoadOrder, Outgoing, PageStore, SaveOrder
from diptych.connectors.page_times import PageTimes
from diptych.connectors.pages import PageObject, TokenRange
from diptych.connectors.store_move import Begun, finish
from diptych.connectors.stored_objects import StoredObjects
from diptych.connectors.transfer_jobs import (
    LOAD_BYTES,
    SAVE_BYTES,
    Load,
    Save,
    Sending,
    TransferLimits,
    batches,
    stored_object,
)
from diptych.engine.request import KVObject
from diptych.errors import DiptychError, TransferError
from diptych.fault_points import reach

logger = logging.getLogger(__name__)

T = TypeVar("T")

# how soon it is noticed without a transfer that a node is gone
_LOOK_S = 1.0
# so long one load that has nothing to take keeps others from the thread
_FOLLOW_S = 0.004


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
        lock = threading.RLock()
        self._wake = threading.Condition(lock)
        self._news = threading.Condition(lock)
        self._loads: deque[Load] = deque()
        self._saves: deque[Save] = deque()
        self._followers: deque[Load] = deque()
        self._saves_turn = False
        self._live_loads: dict[str, Load] = {}
        self._sendings: dict[str, Sending] = {}
        self._staged_bytes = 0
        self._output = KVConnectorOutput()
        self._come: set[str] = set()
        self.stored = StoredObjects(clock.monotonic, limits.trust_stored_s)
        self._times = PageTimes(clock.monotonic)
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

    @property
    def is_arriving(self) -> bool:
        """Whether a load is about to end."""
        if not self._live_loads:
            return False
        with self._wake:
            now = self._clock.monotonic()
            return any(load.is_arriving(now) for load in self._live_loads.values())

    @property
    def first_steps(self) -> FirstSteps:
        """Times of requests that were loaded, for the model thread."""
        return self._times.first_steps

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        """Return once no load is about to end, or, to wait for the `first`, once one has, or when
        it is too late."""
        with self._wake:
            while self.is_arriving and not (first and self._come):
                if (left_s := until_s - self._clock.monotonic()) <= 0:
                    return
                self._news.wait(left_s)

    def sending(self, request_id: str) -> Sending:
        """What is known of the request's prompt, new at its first save."""
        with self._wake:
            return self._sendings.setdefault(request_id, Sending())

    def load(self, load: Load) -> None:
        """Queue a load; where the queue is full it has failed."""
        with self._wake:
            self._live_loads[load.order.request_id] = load
            if len(self._loads) + len(self._followers) < self._limits.max_queued_transfers:
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

    def note_dropped(self, num_objects: int) -> None:
        """Objects were not saved: there was no room to stage them."""
        with self._wake:
            self._output.num_dropped_saves += num_objects

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many prompt tokens in so long."""
        with self._wake:
            self._rates().computed(num_tokens, seconds)

    def take_output(self) -> KVConnectorOutput:
        """What was reported since the last call."""
        with self._wake:
            output, self._output = self._output, KVConnectorOutput()
            self._come.clear()
            if not output.empty:
                now = self._clock.monotonic()
                self._times.told(output.finished_sending, now)
                self._times.taken_in(output.finished_recving, now)
        return output

    def hold_until_s(self, limit_s: float) -> float:
        """Until when it is worth to wait for loads of which all is on the way, and which are to
        have ended by `limit_s`, going by others; 0: for none, or one has come and must not wait."""
        if not self._live_loads:
            return 0.0
        with self._wake:
            if self._come:
                return 0.0
            now, last_s = self._clock.monotonic(), self._times.last_pace.expected_s(1)
            ends = [load.read_s + last_s for load in self._live_loads.values() if load.is_all_taken]
            holds = [end + last_s / 2 for end in ends if end <= limit_s]
            return max((hold for hold in holds if now < hold), default=0.0)

    def take_arrived(self) -> KVConnectorOutput | None:
        """Hand-offs whose KV has come, whole and valid, and nothing else."""
        if not self._come:
            return None
        with self._wake:
            arrived, self._come = self._come, set()
            self._output.finished_recving -= arrived
            self._times.taken_in(arrived, self._clock.monotonic())
        return KVConnectorOutput(finished_recving=arrived)

    def take_sent(self) -> KVConnectorOutput | None:
        """Hand-offs whose saves have ended, and nothing else."""
        with self._wake:
            sent = self._output.split_sent()
            if sent is not None:
                self._times.told(sent.finished_sending, self._clock.monotonic())
        return sent

    def close(self) -> None:
        """Finish what is queued, for as long as a transfer may take. Idempotent."""
        with self._wake:
            is_first, self._closing = not self._closing, True
            self._wake.notify()
        self._thread.join(self._limits.transfer_timeout_s)
        if is_first:
            with self._wake:
                lines = self._times.lines()
            for line in lines:
                logger.info("%s: %s", self._name, line)

    def _rates(self) -> TransferRates:
        """Under the lock."""
        if self._output.rates is None:
            self._output.rates = TransferRates()
        return self._output.rates

    # --- the transfer thread

    def _run(self) -> None:
        while True:
            with self._wake:
                if not (self._loads or self._saves or self._followers or self._closing):
                    self._wake.wait(_LOOK_S)
                job = self._next()
                is_over = self._closing
            if isinstance(job, Load):
                job.again = False
                self._guarded(self._follow if job.order.follows else self._load, job)
                with self._wake:
                    if job.again and not self._closing:
                        self._followers.append(job)
                    else:
                        self._report_load(job)
            elif job is not None:
                self._guarded(self._save, job)
                self._finish_save(job)
            elif is_over:
                break
            else:
                self._let_go()
        self._close_store()

    def _next(self) -> Load | Save | None:
        """Under the lock. New loads first; then saves, and loads that wait for more, in turns."""
        if self._loads:
            return self._loads.popleft()
        self._saves_turn = not self._saves_turn
        if self._saves and (self._saves_turn or not self._followers):
            return self._saves.popleft()
        return self._followers.popleft() if self._followers else None

    def _let_go(self) -> None:
        """Nothing moves: what is registered of the pool of a node that is gone keeps its memory."""
        try:
            self._copier.reach([] if self._store is None else self._store.pools())
        except Exception:
            logger.exception("%s: pools cannot be let go", self._name)

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
        load.begun_s = self._clock.monotonic()
        for batch in batches(load.order.objects, self._copier.token_bytes, LOAD_BYTES):
            if load.aborted or self._is_late(load.deadline_s):
                return
            began = self._clock.monotonic()
            reach("load.begin")
            self._copier.reach(store.pools())
            wanted = [_wanted(load.order, item) for item in batch]
            take = partial(self._take, load, batch, wanted)
            read = store.get_many([(o.key, o.num_bytes) for o in batch], take)
            reach("load.end")
            self._check_copied(load)
            for item, tokens, checksum in zip(batch, wanted, read, strict=True):
                if load.aborted or not self._arrived(load.order, item, checksum):
                    return
                load.valid = tokens.end
            with self._wake:
                num_bytes = sum(item.num_bytes for item in batch)
                self._rates().loaded(num_bytes, self._clock.monotonic() - began)

    def _follow(self, load: Load, store: PageStore) -> None:
        """Take what is there of what is being stored. The rest is awaited, unless nothing has come
        for long: the request computes it then."""
        now = self._clock.monotonic()
        if not load.moved_s:
            load.awaited, load.begun_s, load.moved_s = list(load.order.objects), now, now
        if load.aborted or self._is_late(load.deadline_s):
            return
        batch = next(batches(load.awaited, self._copier.token_bytes, SAVE_BYTES))
        with self._wake:
            others = self._loads or self._saves or self._followers
            wait_s = 1e-3 if others else _FOLLOW_S
        reach("load.begin")
        self._copier.reach(store.pools())
        take = partial(self._take, load, batch, [_wanted(load.order, item) for item in batch])
        goes_on = partial(self._has_turn, load)
        read = store.get_many([(o.key, o.num_bytes) for o in batch], take, wait_s, goes_on)
        reach("load.end")
        self._check_copied(load)
        come = {
            item.key
            for item, checksum in zip(batch, read, strict=True)
            if checksum is not None and self._arrived(load.order, item, checksum)
        }
        left = load.awaited = [item for item in load.awaited if item.key not in come]
        load.valid = max(load.valid, left[0].start_token if left else load.order.end_token)
        now = self._clock.monotonic()
        load.moved_s = now if come else load.moved_s
        is_stuck = now - load.moved_s > self._limits.transfer_timeout_s / 2
        load.again = bool(left) and not (load.aborted or is_stuck)

    def _has_turn(self, load: Load) -> bool:
        """Whether a load that is awaited may keep the thread."""
        with self._wake:
            others = self._loads or self._saves or self._followers
            return not (others or load.aborted or self._closing)

    def _take(
        self,
        load: Load,
        batch: Sequence[KVObject],
        wanted: Sequence[TokenRange],
        index: int,
        view: memoryview,
    ) -> object:
        """Copy an object into its blocks, which nobody reads before it is verified."""
        reach("load.read")
        if not load.aborted:
            start = batch[index].start_token
            left = self._copier.scatter(view, start, load.order.block_ids, wanted[index])
            with self._wake:
                load.read_s = self._clock.monotonic()
                load.num_taken += 1
                load.num_open += 1
            end = partial(self._end_copy, load, left)
            return Begun(end) if isinstance(left, Begun) else end
        return None

    def _end_copy(self, load: Load, left: object) -> None:
        finish(left)
        with self._wake:
            load.num_open -= 1

    @staticmethod
    def _check_copied(load: Load) -> None:
        """A store that says it has read must have called for the end of every copy."""
        if load.num_open:
            raise TransferError(f"{load.num_open} objects were read and not copied")

    def _arrived(self, order: LoadOrder, item: KVObject, checksum: int | None) -> bool:
        """Whether the object came whole and is the one that was meant."""
        if checksum is None:
            self.stored.forget(item.key)
            return False
        if order.checksums_known and checksum != item.checksum:
            tokens = (item.start_token, item.end_token)
            logger.warning(
                "request %s: the checksum of tokens %d..%d differs", order.request_id, *tokens
            )
            return False
        self.stored.note(item.key, checksum, item.num_bytes)
        return True

    def _report_load(self, load: Load) -> None:
        """Under the lock: no byte of the load can arrive any more."""
        request_id = load.order.request_id
        if self._live_loads.get(request_id) is load:
            del self._live_loads[request_id]
        self._output.finished_recving.add(request_id)
        if load.valid < load.order.end_token:
            self._output.failed_recving[request_id] = load.valid
            if load.begun_s and not (load.aborted or load.order.follows):
                wanted = sum(item.num_bytes for item in load.order.objects)
                self._rates().failed(wanted, self._clock.monotonic() - load.begun_s)
        elif load.order.checksums_known or load.order.follows:
            self._come.add(request_id)
            self._times.valid(load, self._clock.monotonic())
        self._news.notify_all()

    def _save(self, save: Save, store: PageStore) -> None:
        staged = [item for item in save.order.objects if item.key in save.pages]
        for batch in batches(staged, self._copier.token_bytes, SAVE_BYTES):
            if save.sending.aborted or self._is_late(save.deadline_s):
                return
            reach("save.begin")
            self._copier.reach(store.pools())
            items = [self._outgoing(save, item) for item in batch]
            stored = store.put_many(items, save.order.tenant)
            reach("save.end")
            for item, sent, checksum in zip(batch, items, stored, strict=True):
                del save.pages[item.key]
                if checksum is not None:
                    save.stored[item.key] = stored_object(item, sent.num_bytes, checksum)
                    self.stored.note(item.key, checksum, sent.num_bytes)
            self._unstage(save, sum(sent.num_bytes for sent in items))

    def _outgoing(self, save: Save, item: PageObject) -> Outgoing:
        page = save.pages[item.key]

        def write(view: memoryview) -> object:
            reach("save.write")
            save.begun_s = save.begun_s or self._clock.monotonic()
            return self._copier.fetch(page, save.mark, view)

        return Outgoing(item.key, page.nbytes, write)

    def _unstage(self, save: Save, num_bytes: int) -> None:
        with self._wake:
            self._staged_bytes -= num_bytes
            save.num_bytes -= num_bytes

    def _finish_save(self, save: Save) -> None:
        order, sending = save.order, save.sending
        sending.objects += save.objects()
        save.pages.clear()
        self._unstage(save, save.num_bytes)
        if order.last:
            with self._wake:
                self._report_save(order, sending)
                if order.hand_off:
                    self._times.stored(save, self._clock.monotonic())
        save.done.set()

    def _report_save(self, order: SaveOrder, sending: Sending) -> None:
        """Under the lock: all of the prompt's saves have ended."""
        if self._sendings.get(order.request_id) is sending:
            del self._sendings[order.request_id]
        if order.told:
            self._output.saved.add(order.request_id)
        if order.hand_off:
            self._output.finished_sending.add(order.request_id)
            if not sending.aborted:
                self._output.commits[order.request_id] = sending.commit(order, self._name)

    def _is_late(self, deadline_s: float) -> bool:
        if self._clock.monotonic() <= deadline_s:
            return False
        logger.warning("%s: a transfer passed its deadline", self._name)
        return True


def _wanted(order: LoadOrder, item: KVObject) -> TokenRange:
    """What of an object the order asks for."""
    return TokenRange(
        max(item.start_token, order.start_token), min(item.end_token, order.end_token)
    )
