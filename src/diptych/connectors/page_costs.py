"""Whether stored KV is loaded or computed again, or both: by predicted seconds, from what was
measured.

Pure code. Loading takes its bytes over the measured bandwidth, behind what is being loaded already;
computing takes its tokens over the measured rate. Attention makes late tokens dearer than the rate
says, so that it errs, if at all, towards computing what is cheap to compute. What has not been
measured yet, or not lately, is tried: a load costs little and measures itself. Where it did cost,
as it was slow or failed after all, the next try comes so much later that tries take a small part
of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from diptych.connectors.base import TransferRates
from diptych.connectors.page_split import Prefix, Speeds, best_cut

# Weight of the newest measurement, in the logarithm: a store may be a thousand times as slow as it
# was, and two loads in a row show it.
_NEWEST = 0.5
# A rate this old is tried anew: what was slow then may be fast by now.
_FORGET_S, _FORGET_CAP_S = 30.0, 600.0
# Time that a load lost against computing is so small a part of that until the next try.
_LOST_PART = 0.05
# What any load costs: look-up, orders, a step in which the request waits.
_LOAD_OVERHEAD_S = 0.004
# So much of the time after which a transfer is given up may be planned with: a load may be slower
# than it was, and what its request computes meanwhile is saved behind it, by the same time.
_OF_TIMEOUT = 0.5
# Shorter steps tell more of their overhead than of their tokens.
_MIN_TOKENS = 16


class _Rate:
    """Units per second, smoothed; known until `known_until_s`."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.known_until_s = math.inf

    def note(self, units: float, seconds: float, now: float) -> None:
        rate = max(units, 1.0) / max(seconds, 1e-6)
        if self.value is not None and now <= self.known_until_s:
            rate = rate**_NEWEST * self.value ** (1 - _NEWEST)
        self.value = rate


class LoadCosts:
    """Fed with rates, asked for decisions.

    Args:
        token_bytes: of one token's KV.
        timeout_s: after which a load is given up.
    """

    def __init__(
        self, token_bytes: int, now: Callable[[], float], timeout_s: float = math.inf
    ) -> None:
        self._token_bytes = token_bytes
        self._most_s = _OF_TIMEOUT * timeout_s
        self._now = now
        self._load = _Rate()
        self._compute = _Rate()

    def note(self, rates: TransferRates) -> None:
        """Take measurements."""
        now = self._now()
        if rates.computed_tokens >= _MIN_TOKENS:
            self._compute.note(rates.computed_tokens, rates.compute_s, now)
        if rates.loaded_bytes:
            self._load.note(rates.loaded_bytes, rates.load_s, now)
            self._keep(rates.loaded_bytes, rates.load_s, now)
        if rates.failed_s and self._shows(rates.failed_bytes, rates.failed_s):
            # all that is known of a load that failed: it was no faster
            most = rates.failed_s * (self._load.value or math.inf)
            self._load.note(min(rates.failed_bytes, most), rates.failed_s, now)
            self._keep(0, rates.failed_s, now)

    def cut(self, prefix: Prefix, between: Sequence[int], num_queued: int = 0) -> int:
        """Where a prefix is cut: what is before is computed, what is after loaded
        (`page_split.best_cut`).

        Args:
            between: where it may be cut, but for its ends.
            num_queued: tokens that are being loaded already.
        """
        speeds = self._speeds(num_queued)
        return prefix.start if speeds is None else best_cut(prefix, between, speeds)

    def _shows(self, num_bytes: int, seconds: float) -> bool:
        """Whether a load that failed took too long; one that found nothing did not."""
        expected = math.inf if self._load.value is None else self._load.value * seconds
        return seconds > _LOST_PART * _FORGET_S or num_bytes < expected

    def _keep(self, num_bytes: int, seconds: float, now: float) -> None:
        """Until when the rate is believed: longer, the more time the last load has cost."""
        lost_s = seconds
        if self._compute.value is not None:
            lost_s -= num_bytes / self._token_bytes / self._compute.value
        keep_s = min(max(_FORGET_S, lost_s / _LOST_PART), _FORGET_CAP_S)
        self._load.known_until_s = now + keep_s

    def _speeds(self, num_queued: int) -> Speeds | None:
        """None: not known (any more)."""
        if self._load.value is None or self._now() > self._load.known_until_s:
            return None
        if self._compute.value is None:
            return None
        load_s = self._token_bytes / self._load.value
        begin_s = _LOAD_OVERHEAD_S + num_queued * load_s
        return Speeds(1.0 / self._compute.value, load_s, begin_s, self._most_s)
