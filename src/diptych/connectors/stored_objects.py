"""Which objects the store had a moment ago, with their checksums: those need not be sent again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from diptych.connectors.pages import PageObject
from diptych.connectors.transfer_jobs import stored_object
from diptych.engine.request import KVObject

_MAX_OBJECTS = 1 << 16


class StoredObjects:
    """Noted by the transfer thread, asked by the model thread.

    Args:
        trusted_s: what was there longer ago may have been evicted since, and a commit that names it
            would be worth less. 0 trusts nothing.
    """

    def __init__(self, now: Callable[[], float], trusted_s: float) -> None:
        self._now = now
        self._trusted_s = trusted_s
        self._lock = threading.Lock()
        self._objects: OrderedDict[bytes, tuple[int, int, float]] = OrderedDict()

    def note(self, key: bytes, checksum: int, num_bytes: int) -> None:
        """The store has the object now."""
        if not self._trusted_s:
            return
        with self._lock:
            now = self._now()
            self._objects[key] = (checksum, num_bytes, now)
            self._objects.move_to_end(key)
            self._drop_old(now)

    def __len__(self) -> int:
        return len(self._objects)

    def forget(self, key: bytes) -> None:
        """The store does not have the object."""
        with self._lock:
            self._objects.pop(key, None)

    def get(self, item: PageObject, num_bytes: int) -> KVObject | None:
        """The object as the store had it lately, if it did."""
        with self._lock:
            checksum, known_bytes, at = self._objects.get(item.key, (0, 0, 0.0))
        if known_bytes != num_bytes or self._now() - at > self._trusted_s:
            return None
        return stored_object(item, num_bytes, checksum)

    def _drop_old(self, now: float) -> None:
        """Under the lock: what nobody may be told any more, and what is one too many."""
        while True:
            key, (_, _, at) = next(iter(self._objects.items()))
            if now - at <= self._trusted_s and len(self._objects) <= _MAX_OBJECTS:
                return
            del self._objects[key]
