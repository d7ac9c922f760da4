"""Lines that others can cause: a bounded number of them."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 1.0


class LogLimit:
    """At most one warning a second, with the number of those before it that were not said.

    Threads may share it.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._next_at_s = 0.0
        self._unsaid = 0

    def warning(self, message: str, *args: object) -> None:
        """As `Logger.warning`, unless one was said a moment ago."""
        now = time.monotonic()
        with self._lock:
            if now < self._next_at_s:
                self._unsaid += 1
                return
            self._next_at_s = now + _EVERY_S
            unsaid, self._unsaid = self._unsaid, 0
        if unsaid:
            self._log.warning(message + " (%d like it were not logged)", *args, unsaid)
        else:
            self._log.warning(message, *args)
