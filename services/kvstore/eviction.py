"""Who goes first: a heap of ranks whose entries may be stale."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar


class Ranked(Protocol):
    """What has a place in the order; the least rank goes first."""

    @property
    def rank(self) -> tuple[int, float, int]: ...


T = TypeVar("T", bound=Ranked)


class EvictionOrder(Generic[T]):
    """Candidates by rank. An entry whose item has another rank by now is passed over."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, float, int], int, T]] = []
        self._next_number = 0

    def push(self, item: T) -> None:
        """Enter an item under its present rank."""
        # the number keeps equal ranks from comparing items
        self._next_number += 1
        heapq.heappush(self._heap, (item.rank, self._next_number, item))

    def pop(self, may_go: Callable[[T], bool]) -> T | None:
        """The first that may go; the entries before it are forgotten, so that who may not go now
        is pushed anew once it may."""
        while self._heap:
            rank, _, item = heapq.heappop(self._heap)
            if item.rank == rank and may_go(item):
                return item
        return None

    def is_stale(self, num_live: int) -> bool:
        """Whether most entries are of no use any more."""
        return len(self._heap) > 4 * num_live + 64

    def rebuild(self, live: Iterable[T]) -> None:
        """Drop stale entries; `live` are all that may go."""
        self._heap = []
        for item in live:
            self._next_number += 1
            self._heap.append((item.rank, self._next_number, item))
        heapq.heapify(self._heap)
