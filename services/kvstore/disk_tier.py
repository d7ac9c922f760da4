"""The disk tier at work: objects go down in the background, and come back when they are asked for.

The loop owns index and table; threads only move bytes between files and the pool. An object that
is written is held in the pool meanwhile; one that is read goes into a reservation of the table, so
that nobody sees it before its checksum is verified. A file that cannot be read whole and right is a
miss and is removed; a disk that is full is left alone for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Self, TypeVar

from diptych.fault_points import reach
from diptych.services.kvstore.disk_files import FileInfo, ObjectFiles, rounded
from diptych.services.kvstore.disk_index import DiskIndex
from diptych.services.kvstore.frequency import FrequencySketch
from diptych.services.kvstore.object_types import Place, Status
from diptych.services.kvstore.objects import ObjectTable

_log = logging.getLogger(__name__)
T = TypeVar("T")

_READERS = 4
_MAX_QUEUED_WRITES = 8192
_SCAN_BATCH = 256
_RETRY_S = 5.0


@dataclass(slots=True)
class DiskCounters:
    """Counts since the start."""

    hits_total: int = 0
    read_bytes_total: int = 0
    written_bytes_total: int = 0
    write_errors_total: int = 0
    corrupt_total: int = 0
    drops_total: int = 0


class DiskTier:
    """`async with`: files below the pool of `table`.

    Args:
        min_uses: an object goes to disk with its n-th use lately; putting it is the first.
        wait_s: how long a reader waits for objects on disk; later ones are a miss for it.
    """

    def __init__(
        self,
        files: ObjectFiles,
        index: DiskIndex,
        frequency: FrequencySketch,
        table: ObjectTable,
        pool: memoryview,
        *,
        min_uses: int = 2,
        wait_s: float = 1.0,
    ) -> None:
        self.index = index
        self.counters = DiskCounters()
        self.scanned = False
        self._files = files
        self._frequency = frequency
        self._table = table
        self._pool = pool
        self._min_uses = min_uses
        self._wait_s = wait_s
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED_WRITES)
        self._queued: set[bytes] = set()
        self._reading: dict[bytes, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._full_until = 0.0
        self._threads = ThreadPoolExecutor(_READERS + 1, thread_name_prefix="kv-disk")
        self._changed: set[bytes] = set()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._scan(), name="disk scan"),
            asyncio.create_task(self._write_queued(), name="disk writer"),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._tasks, *self._reading.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)

    # --- uses

    def note_uses(self, keys: Sequence[bytes]) -> None:
        """Objects were put or read: those used often enough go to disk."""
        for position, key in enumerate(keys):
            uses = self._frequency.add(key)
            if key in self.index:
                self.index.used(key, position)
            elif uses >= self._min_uses and key not in self._queued:
                self._enqueue(key)

    async def fetch(self, keys: Sequence[bytes]) -> None:
        """Bring what is only on disk into memory, as far as it comes in time and there is room."""
        present = self._table.exists(keys)
        wanted = [
            k for k, there in zip(keys, present, strict=True) if not there and k in self.index
        ]
        if not wanted:
            return
        # what is in memory already must not give way to what comes from disk
        self._table.touch([k for k, there in zip(keys, present, strict=True) if there])
        reads = [self._reading.get(key) or self._begin_read(key) for key in dict.fromkeys(wanted)]
        pending = [task for task in reads if task is not None]
        if pending:
            await asyncio.wait(pending, timeout=self._wait_s)

    async def check(self, key: bytes) -> bool:
        """Read an object's file again, beside the pool; False where it was damaged: it is removed.
        What is not on disk has no damage there."""
        info = self.index.get(key)
        if info is None or await self._in_thread(self._is_whole, info):
            return True
        if self.index.get(key) is not info:  # it went meanwhile, by itself
            return True
        self._drop_damaged(key)
        return False

    def forget(self, keys: Sequence[bytes]) -> list[bool]:
        """Remove objects from disk; whether each was there."""
        return [self._drop(key) for key in keys]

    def take_changes(self) -> set[bytes]:
        """Keys that came to disk or went since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    # --- down

    async def flush(self, limit_s: float) -> int:
        """Write what only memory has, what was used last first, whether or not it is used often;
        returns how many objects came to disk. What finds no room or time stays behind."""
        before = len(self.index)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                # one after another: each is admitted by the room that those before it have left
                for key in self._table.last_used_first():
                    if key not in self.index and time.monotonic() >= self._full_until:
                        await self._write(key)
        return len(self.index) - before

    def _enqueue(self, key: bytes) -> None:
        if self._queue.full() or time.monotonic() < self._full_until:
            self.counters.drops_total += 1
            return
        self._queued.add(key)
        self._queue.put_nowait(key)

    async def _write_queued(self) -> None:
        while True:
            key = await self._queue.get()
            self._queued.discard(key)
            try:
                await self._write(key)
            except Exception:
                _log.exception("disk writer")

    async def _write(self, key: bytes) -> None:
        place = self._table.hold(key)
        if place is None:
            return
        try:
            info = FileInfo(key, place.num_bytes, place.checksum, place.tenant, 0.0)
            admitted, gone = self.index.admit(info)
            self._changed.update(gone)
            for old in gone:
                await self._in_thread(self._files.remove, old)
            if not admitted:
                return
            await self._in_thread(self._write_file, info, place)
        except OSError as error:
            self.counters.write_errors_total += 1
            self._full_until = time.monotonic() + _RETRY_S
            _log.warning("the disk tier cannot write (%s); next try in %.0f s", error, _RETRY_S)
        else:
            self.index.add(info)
            self._changed.add(key)
            self.counters.written_bytes_total += info.num_bytes
        finally:
            self._table.unhold(key, place.offset)

    def _write_file(self, info: FileInfo, place: Place) -> None:
        reach("disk.write")
        end = place.offset + rounded(place.num_bytes)
        with self._pool[place.offset : end] as body:
            self._files.write(info, body)

    # --- up

    def _begin_read(self, key: bytes) -> asyncio.Task[None] | None:
        info = self.index.get(key)
        if info is None:
            return None
        # its life is the thread's: room that is still being read into must not become another's
        [reserved] = self._table.put_start([(key, info.num_bytes)], info.tenant, ttl_s=math.inf)
        if reserved.status is not Status.OK:
            return None
        task = asyncio.create_task(self._read(info, reserved.put_id, reserved.offset))
        self._reading[key] = task
        task.add_done_callback(lambda _: self._reading.pop(key, None))
        return task

    async def _read(self, info: FileInfo, put_id: int, offset: int) -> None:
        valid = False
        try:
            valid = await self._in_thread(self._read_file, info, offset)
        finally:
            if valid:
                self._table.put_end([(put_id, info.checksum)])
            else:
                self._table.put_revoke([put_id])
        if valid:
            self.counters.hits_total += 1
            self.counters.read_bytes_total += info.num_bytes
        else:
            self._drop_damaged(info.key)

    def _read_file(self, info: FileInfo, offset: int) -> bool:
        reach("disk.read")
        with self._pool[offset : offset + rounded(info.num_bytes)] as body:
            return self._files.read(info, body)

    def _is_whole(self, info: FileInfo) -> bool:
        # memory of its own, on page boundaries for direct I/O
        with mmap.mmap(-1, rounded(info.num_bytes)) as memory, memoryview(memory) as body:
            return self._files.read(info, body)

    # --- the folder

    def _drop_damaged(self, key: bytes) -> None:
        if self._drop(key):
            self.counters.corrupt_total += 1
            _log.warning("the file of an object was damaged and is removed")

    def _drop(self, key: bytes) -> bool:
        known = self.index.remove(key)
        if known:
            self._changed.add(key)
            self._threads.submit(self._files.remove, key)
        return known

    async def _scan(self) -> None:
        """Take over what an earlier incarnation left; nothing waits for it."""
        started = time.monotonic()
        found = self._files.scan()
        now = time.time()
        while batch := await self._in_thread(_take, found):
            for info in batch:
                # before all of this incarnation's uses, in their own order
                self.index.add(info, used_at=info.used_at - now - 1.0)
                self._changed.add(info.key)
        for key in self.index.overflow():
            self._changed.add(key)
            self._threads.submit(self._files.remove, key)
        self.scanned = True
        seconds = time.monotonic() - started
        _log.info("the disk tier has %d objects, read in %.2f s", len(self.index), seconds)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """A thread cannot be stopped: whoever is cancelled waits for it all the same."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await future
            raise


def _take(found: Iterator[FileInfo]) -> list[FileInfo]:
    return list(islice(found, _SCAN_BATCH))
