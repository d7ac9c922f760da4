"""When links that failed their test, or were lost, are tested again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_FIRST_S, _MOST_S = 1.0, 30.0


@dataclass(slots=True)
class _Retry:
    backoff_s: float
    at_s: float | None


class LinkRetries:
    """One time for each peer whose link is down: later after each failure, up to 30 s."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._retries: dict[str, _Retry] = {}

    def failed(self, peer: str) -> None:
        """Its link is down: another test is due in a while."""
        known = self._retries.get(peer)
        backoff_s = _FIRST_S if known is None else min(2 * known.backoff_s, _MOST_S)
        self._retries[peer] = _Retry(backoff_s, self._monotonic() + backoff_s)

    def forget(self, peer: str) -> None:
        """Its link works, or it is gone."""
        self._retries.pop(peer, None)

    def take_due(self) -> list[str]:
        """Peers to test now; each once after each failure."""
        now = self._monotonic()
        due = [
            p for p, retry in self._retries.items() if retry.at_s is not None and retry.at_s <= now
        ]
        for peer in due:
            self._retries[peer].at_s = None
        return due

    def next_at_s(self) -> float | None:
        """When `take_due` has something; None: never."""
        times = [retry.at_s for retry in self._retries.values() if retry.at_s is not None]
        return min(times, default=None)
