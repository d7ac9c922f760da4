"""One object on its way between a store's node and its client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Begun:
    """A copy that goes on by itself until `wait` has returned."""

    wait: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Move:
    """`id` is that of the put or lease; `touch` writes or reads the view. It may return what is
    left of that: a call, for any thread, or the `Begun` copy; the view holds until that has ended.
    `bytes`, if they are given, are the object's own `num_bytes` on this side: a put's source, a
    get's target; who moves the object may use them instead of `touch`."""

    id: int
    offset: int
    num_bytes: int
    touch: Callable[[memoryview], object]
    bytes: memoryview | None = None


def finish(left: object) -> None:
    """Do, or wait for, what a `touch` has left."""
    if isinstance(left, Begun):
        left.wait()
    elif callable(left):
        left()


def not_again() -> bool:
    """Whether to ask again for what was not there: no."""
    return False
