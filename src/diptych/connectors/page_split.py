"""Where a prefix that the store has is cut: computed up to there, loaded from there on.

Pure code. Both go on at once, so that the prefix is there when the slower of the two has ended,
which is soonest where they end together. All else that the device has to compute is taken to come
first: time in which it would have something else to do is not gained. The idea is that of Jin et
al., "Compute Or Load KV Cache? Why Not Both?", 2024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# A cut is worth its trouble where it saves a tenth of the better pure choice.
_WORTH = 0.9


@dataclass(frozen=True, slots=True)
class Prefix:
    """Tokens [start, end) of a request, which the store has.

    Attributes:
        num_after: tokens behind them that are computed in any case.
        num_ahead: prompt tokens of others that are to be computed.
    """

    start: int
    end: int
    num_after: int = 0
    num_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured: seconds to compute a token, to load one, and until a load's first one.

    A load that takes longer than `load_most_s` is given up, so that none is begun.
    """

    compute_s: float
    load_s: float
    load_begin_s: float
    load_most_s: float = math.inf


def predicted_s(prefix: Prefix, cut: int, speeds: Speeds) -> float:
    """Seconds until prefix and tokens after it are there, if [start, cut) is computed and
    [cut, end) loaded; infinite where that may not be loaded."""
    computed_s = (prefix.num_ahead + cut - prefix.start) * speeds.compute_s
    after_s = prefix.num_after * speeds.compute_s
    if cut == prefix.end:
        return computed_s + after_s
    loaded_s = _load_s(prefix, cut, speeds)
    return math.inf if loaded_s > speeds.load_most_s else max(computed_s, loaded_s) + after_s


def best_cut(prefix: Prefix, between: Sequence[int], speeds: Speeds) -> int:
    """The cut that is predicted soonest: `prefix.start` loads all, `prefix.end` computes all.

    Args:
        between: other places where it may be cut, ascending, in (start, end).
    """
    pure = min((prefix.start, prefix.end), key=lambda cut: (predicted_s(prefix, cut, speeds), -cut))
    if not between:
        return pure
    # until there loading is what takes longer, from there on computing
    at = _first(between, lambda cut: _computes_longer(prefix, cut, speeds))
    near = between[max(0, at - 1) : at + 1]
    cut = min(near, key=lambda cut: predicted_s(prefix, cut, speeds))
    gains = predicted_s(prefix, cut, speeds) < _WORTH * predicted_s(prefix, pure, speeds)
    return cut if gains else pure


def _computes_longer(prefix: Prefix, cut: int, speeds: Speeds) -> bool:
    """Whether computing up to the cut takes at least as long as loading from there on may."""
    computed_s = (prefix.num_ahead + cut - prefix.start) * speeds.compute_s
    return min(computed_s, speeds.load_most_s) >= _load_s(prefix, cut, speeds)


def _load_s(prefix: Prefix, cut: int, speeds: Speeds) -> float:
    return speeds.load_begin_s + (prefix.end - cut) * speeds.load_s


def _first(cuts: Sequence[int], holds: Callable[[int], bool]) -> int:
    """Index of the first for which it holds, as it does for all behind; their number if none."""
    low, high = 0, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if holds(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return low
