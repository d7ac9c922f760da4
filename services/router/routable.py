"""A worker as routing sees it."""

from __future__ import annotations

import enum
from typing import Protocol


class Role(enum.IntEnum):
    """What a worker is for; the numbers are those of `diptych.v1.Role`."""

    UNSPECIFIED = 0
    PREFILL = 1
    DECODE = 2
    AGGREGATED = 3

    @classmethod
    def _missing_(cls, value: object) -> Role:
        """A role of a later version: such a worker gets no requests."""
        return cls.UNSPECIFIED


class RoutableWorker(Protocol):
    """What routing needs to know of a worker. `key` is new with every incarnation."""

    @property
    def key(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def kv_namespace(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def direct(self) -> bool:
        """Whether its memory can be read, or it can read another's."""
        ...

    @property
    def stores(self) -> bool:
        """Whether its KV can go through a store, or come from one."""
        ...

    @property
    def follows(self) -> bool:
        """Whether it can load KV from the store while that is being stored."""
        ...

    def reads(self, incarnation: str) -> float | None:
        """GB/s of its link to that worker; None until the link has passed its test."""
        ...
