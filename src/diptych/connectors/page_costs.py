"""Whether stored KV is loaded or computed again: by predicted seconds, from what was measured.

Pure code. Loading takes its bytes over the measured bandwidth, behind what is being loaded already;
computing takes its tokens over the measured rate. Attention makes late tokens dearer than the rate
says, so that it errs, if at all, towards computing what is cheap to compute. What has not been
measured yet, or not lately, is tried: a load costs little and measures itself.
"""

from __future__ import annotations

from collections.abc import Callable

from diptych.connectors.base import TransferRates

# Weight of the newest measurement.
_NEWEST = 0.3
# A rate this old is tried anew: what was slow then may be fast by now.
_FORGET_S = 30.0
# What any load costs: look-up, orders, a step in which the request waits.
_LOAD_OVERHEAD_S = 0.004
# Shorter steps tell more of their overhead than of their tokens.
_MIN_TOKENS = 16


class _Rate:
    """Units per second, smoothed."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.at_s = 0.0

    def note(self, units: float, seconds: float, now: float) -> None:
        rate = units / max(seconds, 1e-6)
        self.value = rate if self.value is None else _NEWEST * rate + (1 - _NEWEST) * self.value
        self.at_s = now


class LoadCosts:
    """Fed with rates, asked for decisions.

    Args:
        token_bytes: of one token's KV.
    """

    def __init__(self, token_bytes: int, now: Callable[[], float]) -> None:
        self._token_bytes = token_bytes
        self._now = now
        self._load = _Rate()
        self._compute = _Rate()

    def note(self, rates: TransferRates) -> None:
        """Take measurements."""
        now = self._now()
        if rates.loaded_bytes:
            self._load.note(rates.loaded_bytes, rates.load_s, now)
        if rates.computed_tokens >= _MIN_TOKENS:
            self._compute.note(rates.computed_tokens, rates.compute_s, now)

    def load_s(self, num_tokens: int, num_queued: int = 0) -> float | None:
        """Seconds to load so many tokens behind `num_queued` others; None: not known (any more)."""
        if self._load.value is None or self._now() - self._load.at_s > _FORGET_S:
            return None
        num_bytes = (num_tokens + num_queued) * self._token_bytes
        return _LOAD_OVERHEAD_S + num_bytes / self._load.value

    def compute_s(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens of a prompt; None: not known."""
        return None if self._compute.value is None else num_tokens / self._compute.value

    def should_load(self, num_tokens: int, num_queued: int = 0) -> bool:
        """Whether loading is predicted to be the cheaper way."""
        load_s, compute_s = self.load_s(num_tokens, num_queued), self.compute_s(num_tokens)
        return load_s is None or compute_s is None or load_s < compute_s
