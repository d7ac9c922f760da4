"""One object on its way between a store's node and its client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """`id` is that of the put or lease; `touch` writes or reads the view. `bytes`, if they are
    given, are the object's own `num_bytes` on this side: a put's source, a get's target; who moves
    the object may use them instead of `touch`."""

    id: int
    offset: int
    num_bytes: int
    touch: Callable[[memoryview], object]
    bytes: memoryview | None = None
