"""How much of a waiting request's prefix the store has, asked by a thread of its own.

The scheduler asks `pending` and `found`, which never block. What has not been answered in time
counts as nothing found: a slow store delays nobody for longer than that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from diptych.hashing import HASH_BYTES

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096
_CONNECT_S = 2.0


class Existence(Protocol):
    """Which objects the store has; `StoreCluster`."""

    def exists_many(self, keys: Sequence[bytes], timeout_s: float | None = None) -> list[bool]: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Question:
    keys: list[bytes]
    until_s: float
    num_found: int | None = None


class PrefixLookup:
    """Questions by request id; one call asks for all that wait.

    Args:
        open_store: called on the thread, again after a failure.
        timeout_s: from `start` on.
    """

    def __init__(
        self, open_store: Callable[[], Existence], now: Callable[[], float], timeout_s: float = 0.1
    ) -> None:
        self._open_store = open_store
        self._now = now
        self._timeout_s = timeout_s
        self._wake = threading.Condition()
        self._queue: list[_Question] = []
        self._questions: dict[str, _Question] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-lookup", daemon=True)
        self._thread.start()

    def start(self, request_id: str, keys: list[bytes]) -> None:
        """Ask which of the keys, from the first on, are there."""
        question = _Question(keys, self._now() + self._timeout_s)
        with self._wake:
            if not keys or len(self._queue) >= _MAX_QUEUED:
                question.num_found = 0
            else:
                self._queue.append(question)
                self._wake.notify()
            self._questions[request_id] = question

    def pending(self, request_id: str) -> bool:
        """Whether it is worth asking again a little later."""
        question = self._questions.get(request_id)
        return (
            question is not None and question.num_found is None and self._now() < question.until_s
        )

    def found(self, request_id: str) -> int:
        """Keys found before the first that is missing; 0 for what was not asked or answered."""
        question = self._questions.get(request_id)
        return 0 if question is None else question.num_found or 0

    def forget(self, request_id: str) -> None:
        """The request needs no answer any more."""
        self._questions.pop(request_id, None)

    def close(self) -> None:
        """Idempotent."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(5.0)

    def _run(self) -> None:
        store = self._connected()
        while True:
            with self._wake:
                while not (self._queue or self._closing):
                    self._wake.wait()
                questions, self._queue = self._queue, []
                if self._closing:
                    break
            try:
                store = store or self._open_store()
                self._answer(store, questions)
            except Exception:
                logger.exception("prefix look-up")
                for question in questions:
                    question.num_found = question.num_found or 0
        if store is not None:
            with contextlib.suppress(Exception):
                store.close()

    def _connected(self) -> Existence | None:
        """Open and ask once, so that the first request finds the way open."""
        try:
            store = self._open_store()
            store.exists_many([bytes(HASH_BYTES)], _CONNECT_S)
            return store
        except Exception as error:
            logger.warning("the KV store cannot be asked for prefixes yet: %s", error)
            return None

    def _answer(self, store: Existence, questions: list[_Question]) -> None:
        keys = [key for question in questions for key in question.keys]
        present = iter(store.exists_many(keys, self._timeout_s))
        for question in questions:
            there = [next(present) for _ in question.keys]
            question.num_found = there.index(False) if False in there else len(there)
