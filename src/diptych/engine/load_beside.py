"""A load of the end of a prefix that the store has, while the request computes its beginning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LoadBeside:
    """Tokens [start, end) are loaded into the request's blocks; those before it computes itself.

    Until the load has ended, nothing but the load writes the slots of [start, end), and nothing
    reads them until the request has come to `start` as well.

    Attributes:
        num_valid: so many tokens from position 0 on hold, given those before `start`; None while
            the load is under way.
    """

    start: int
    end: int
    num_valid: int | None = None

    @property
    def is_under_way(self) -> bool:
        return self.num_valid is None
