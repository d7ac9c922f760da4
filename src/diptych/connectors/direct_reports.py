"""What the direct hand-off's thread tells the scheduler, and takes in at step boundaries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from diptych.connectors.base import HandedOver, KVConnectorOutput
from diptych.connectors.direct_times import FirstSteps, HandoffTimes
from diptych.engine.request import KVCommit


class Arrival(NamedTuple):
    """When a request's KV may be there, on the monotonic clock: in [start_s, end_s); after COMMIT
    also at `ready_s`, going by others, and it is worth a wait until `hold_s`."""

    start_s: float
    end_s: float
    ready_s: float = 0.0
    hold_s: float = 0.0


class DirectReports:
    """Filled by one thread, emptied by another. Bounded by the number of requests."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._output = KVConnectorOutput()
        self._announced: set[str] = set()
        self._arrivals: dict[str, Arrival] = {}
        self._received_s: list[float] = []
        self._leaving: set[str] = set()
        self._left: set[str] = set()
        self.times = HandoffTimes()
        # of the thread that steps
        self.first_steps = FirstSteps(monotonic, self.times)

    def announced(self, request_id: str) -> None:
        """Its KV is being computed: blocks may be reserved."""
        with self._lock:
            self._announced.add(request_id)

    def is_announced(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._announced

    def expect(self, request_id: str, arrival: Arrival | None) -> None:
        """When its KV will be there, as far as is known; None: never, or it is."""
        with self._lock:
            if arrival is not None:
                self._arrivals[request_id] = arrival
            elif self._arrivals.pop(request_id, None) is not None:
                self._news.notify_all()

    @property
    def num_expected(self) -> int:
        """Requests of which it is known when their KV will be there."""
        with self._lock:
            return len(self._arrivals)

    @property
    def is_expecting(self) -> bool:
        """Whether something is to be received or failed soon."""
        with self._lock:
            return bool(self._expected(self._monotonic()))

    def _expected(self, now: float) -> list[Arrival]:
        """Under the lock."""
        return [a for a in self._arrivals.values() if a.start_s <= now < a.end_s]

    def await_arrival(self, until_s: float, *, first: bool) -> None:
        """Return once no KV is expected any more, or, to wait for the `first`, once some is there,
        or when it is too late."""
        with self._lock:
            now = self._monotonic()
            while self._expected(now) and not (first and self._output.handed_over):
                if now >= until_s:
                    return
                self._news.wait(until_s - now)
                now = self._monotonic()

    def hold_until_s(self, limit_s: float) -> float:
        """Until when it is worth to wait for KV that is to be there by `limit_s`; 0: for none, or
        some is there already and must not wait."""
        with self._lock:
            if self._output.handed_over:
                return 0.0
            now = self._monotonic()
            expected = self._expected(now)
            holds = [a.hold_s for a in expected if 0 < a.ready_s <= limit_s and now < a.hold_s]
            return max(holds, default=0.0)

    def received(self, request_id: str, handed_over: HandedOver) -> None:
        """All its KV is here, and valid."""
        with self._lock:
            self._output.finished_recving.add(request_id)
            self._output.handed_over[request_id] = handed_over
            self._received_s.append(self._monotonic())
            self._news.notify_all()

    def left_to_store(self, request_id: str, handed_over: HandedOver) -> None:
        """Its peer holds its KV no more, and nothing writes its blocks: it looks in the store."""
        with self._lock:
            self._announced.discard(request_id)
            self._output.finished_recving.add(request_id)
            self._output.left_to_store[request_id] = handed_over

    def leave(self, request_id: str) -> None:
        """No reader has room for a prompt that is held here: what the store has not got of it shall
        go there; `left` follows."""
        with self._lock:
            self._leaving.add(request_id)

    def take_leaving(self) -> set[str]:
        """Those since the last call."""
        with self._lock:
            leaving, self._leaving = self._leaving, set()
        return leaving

    def left(self, request_id: str) -> None:
        """(From the scheduler.) Nothing more of it goes to the store, and nothing of that reads its
        blocks."""
        with self._lock:
            self._left.add(request_id)

    def take_left(self) -> set[str]:
        """Those since the last call."""
        with self._lock:
            left, self._left = self._left, set()
        return left

    def failed(self, request_id: str, why: str) -> None:
        """Its KV will not come. Reads may still write: `read_ended` follows its release."""
        with self._lock:
            self._output.failed_handoffs[request_id] = why

    def corrupt(self) -> None:
        """KV of one request came with a wrong checksum."""
        with self._lock:
            self._output.num_corrupt += 1

    def read_ended(self, request_id: str) -> None:
        """Nothing writes its blocks any more."""
        with self._lock:
            self._announced.discard(request_id)
            self._output.finished_recving.add(request_id)

    def forget(self, request_id: str) -> None:
        """It announces nothing any more."""
        with self._lock:
            self._announced.discard(request_id)

    def sent(self, request_id: str, commit: KVCommit | None) -> None:
        """Its blocks are no longer held; `commit` where a reader has all."""
        with self._lock:
            self._output.finished_sending.add(request_id)
            if commit is not None:
                self._output.commits[request_id] = commit

    def take_sent(self) -> KVConnectorOutput | None:
        """Hand-offs that are over, and nothing else."""
        with self._lock:
            return self._output.split_sent()

    def take_arrived(self) -> KVConnectorOutput | None:
        """Requests whose KV is here and valid, and nothing else."""
        with self._lock:
            arrived = self._output.split_arrived()
            if arrived is not None:
                self._note_taken()
        return arrived

    def take(self) -> KVConnectorOutput:
        """All since the last call."""
        with self._lock:
            output, self._output = self._output, KVConnectorOutput()
            self._note_taken()
        return output

    def _note_taken(self) -> None:
        for received_s in self._received_s:
            self.times.add("valid to taken in", self._monotonic() - received_s)
        self._received_s.clear()
