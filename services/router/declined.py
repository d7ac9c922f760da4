"""Hand-offs that do not go from memory to memory though they should: counted, and said once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from prometheus_client import Counter

from diptych.services.router.routable import RoutableWorker
from diptych.services.router.ways import Obstacle

logger = logging.getLogger(__name__)

# incarnations come and go: beyond this many pairs all are said again
_MAX_SAID = 4096


class Declined:
    """What stood in the way, by reason; the log has each pair of workers once."""

    def __init__(self, counter: Counter) -> None:
        """`counter` has the label `reason`."""
        self._counter = counter
        self._said: set[tuple[str, str, Obstacle]] = set()

    def note(self, obstacles: Iterable[tuple[RoutableWorker, RoutableWorker, Obstacle]]) -> None:
        """One request went another way; counted under the first of its `obstacles`."""
        first = None
        for prefill, decode, found in obstacles:
            if found is Obstacle.NOT_WANTED:
                # by the router's own setting: so are all pairs, of which there may be thousands
                return
            first = first or found
            self._say(prefill, decode, found)
        if first is not None:
            self._counter.labels(reason=first.value).inc()

    def _say(self, prefill: RoutableWorker, decode: RoutableWorker, found: Obstacle) -> None:
        seen = prefill.key, decode.key, found
        if seen in self._said:
            return
        if len(self._said) >= _MAX_SAID:
            self._said.clear()
        self._said.add(seen)
        logger.warning(
            "KV does not go directly from %s to %s (%s): it goes through the store, or decode "
            "computes the prompt",
            prefill.key,
            decode.key,
            found.value,
        )
