"""What the direct hand-off's thread tells the scheduler, and takes in at step boundaries."""

from __future__ import annotations

import threading

from diptych.connectors.base import HandedOver, KVConnectorOutput
from diptych.engine.request import KVCommit


class DirectReports:
    """Filled by one thread, emptied by another. Bounded by the number of requests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._output = KVConnectorOutput()
        self._announced: set[str] = set()
        self._arriving: set[str] = set()

    def announced(self, request_id: str) -> None:
        """Its KV is being computed: blocks may be reserved."""
        with self._lock:
            self._announced.add(request_id)

    def is_announced(self, request_id: str) -> bool:
        with self._lock:
            return request_id in self._announced

    def arriving(self, request_id: str, is_arriving: bool) -> None:
        """Whether all its KV is computed, and is being read or validated."""
        if is_arriving:
            self._arriving.add(request_id)
        else:
            self._arriving.discard(request_id)

    @property
    def is_expecting(self) -> bool:
        """Whether something is to be received or failed soon."""
        return bool(self._arriving)

    def received(self, request_id: str, handed_over: HandedOver) -> None:
        """All its KV is here, and valid."""
        with self._lock:
            self._output.finished_recving.add(request_id)
            self._output.handed_over[request_id] = handed_over

    def left_to_store(self, request_id: str, handed_over: HandedOver) -> None:
        """Its peer holds its KV no more, and nothing writes its blocks: it looks in the store."""
        with self._lock:
            self._announced.discard(request_id)
            self._output.finished_recving.add(request_id)
            self._output.left_to_store[request_id] = handed_over

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

    def take(self) -> KVConnectorOutput:
        """All since the last call."""
        with self._lock:
            output, self._output = self._output, KVConnectorOutput()
        return output
