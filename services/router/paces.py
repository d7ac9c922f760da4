"""How fast workers have been lately, as a router sees it: sums of what it measured. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

# what is kept of older measurements at each new one: about the last ten count
_KEPT = 0.9
# workers come and go: those that were measured last are known
_MAX_WORKERS = 1024
# a worker that was slow once is asked again when others have more to do: it counts as so many times
# as slow, or fast, as all of them together at most
_MOST_UNLIKE = 2.0
# until anything was measured
FIRST_S_PER_TOKEN = 1e-4


@dataclass(slots=True)
class _Pace:
    """Units of work, and the seconds they took; both fade. Large pieces count for more."""

    units: float = 0.0
    seconds: float = 0.0

    def took(self, units: float, seconds: float) -> None:
        self.units = _KEPT * self.units + units
        self.seconds = _KEPT * self.seconds + seconds

    @property
    def s_per_unit(self) -> float | None:
        return self.seconds / self.units if self.units else None


class Paces:
    """Seconds of waiting for token 1 per prompt token that stood before it, by worker; seconds of
    hand-offs through the store per byte."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, _Pace] = OrderedDict()
        self._all = _Pace()
        self._store = _Pace()

    def s_per_token(self, worker_key: str) -> float:
        """Of one worker; that of all together for one that was not measured yet."""
        common = self._all.s_per_unit
        if common is None:
            return FIRST_S_PER_TOKEN
        pace = self._workers.get(worker_key)
        own = pace.s_per_unit if pace is not None else None
        if own is None:
            return common
        return min(max(own, common / _MOST_UNLIKE), common * _MOST_UNLIKE)

    def token_1(self, worker_key: str, num_tokens: int, seconds: float) -> None:
        """It came after `seconds`, behind `num_tokens` prompt tokens, its own among them."""
        self._all.took(num_tokens, seconds)
        self._workers.setdefault(worker_key, _Pace()).took(num_tokens, seconds)
        self._workers.move_to_end(worker_key)
        if len(self._workers) > _MAX_WORKERS:
            self._workers.popitem(last=False)

    def stored(self, num_bytes: int, seconds: float) -> None:
        """A hand-off of so many bytes through the store took `seconds` from token 1 to token 2."""
        self._store.took(num_bytes, seconds)

    def store_s(self, num_bytes: int) -> float | None:
        """A hand-off of so many bytes through the store; None where none was measured."""
        pace = self._store.s_per_unit
        return None if pace is None else pace * num_bytes
