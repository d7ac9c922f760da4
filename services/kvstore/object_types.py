"""The values that the object table takes and gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

KEY_BYTES = 32


class Status(enum.IntEnum):
    """Outcome of one item; the numbers of `ItemStatus`."""

    OK = 1
    NOT_FOUND = 2
    EXISTS = 3
    NO_SPACE = 4
    EXPIRED = 5
    INVALID = 6


class Pin(enum.IntEnum):
    """How an object resists eviction; the numbers of `PinLevel`, less one."""

    NONE = 0
    SOFT = 1  # goes after all that is not pinned
    HARD = 2  # never goes


class Reservation(NamedTuple):
    """Answer to one item of `put_start`."""

    status: Status
    put_id: int = 0
    offset: int = 0
    num_bytes: int = 0
    checksum: int = 0  # EXISTS: of the object that is there


class Found(NamedTuple):
    """Answer to one key of `get`."""

    status: Status
    lease_id: int = 0
    lease_s: float = 0.0
    offset: int = 0
    num_bytes: int = 0
    checksum: int = 0


class Place(NamedTuple):
    """A complete object and where it lies."""

    key: bytes
    offset: int
    num_bytes: int
    checksum: int
    tenant: str


class Changes(NamedTuple):
    """What appeared (with sizes) and disappeared since the last call of `take_changes`."""

    added: dict[bytes, int]
    removed: set[bytes]


@dataclass(slots=True)
class Counters:
    """Counts since the start."""

    puts_total: int = 0
    hits_total: int = 0
    misses_total: int = 0
    evictions_total: int = 0
    stale_puts_total: int = 0
    quota_refusals_total: int = 0


@dataclass(slots=True, eq=False)
class TableObject:
    """One object of the table, reserved or complete."""

    key: bytes
    offset: int
    num_bytes: int
    tenant: str = ""
    checksum: int = 0
    leases: set[int] = field(default_factory=set)
    holds: int = 0  # of the node itself, while it copies the object
    pin: Pin = Pin.NONE
    gone: bool = False  # dropped under a lease: freed with the last one
    # (pin, last use, -position in its batch): what eviction goes by
    rank: tuple[int, float, int] = (0, 0.0, 0)

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.holds > 0

    @property
    def evictable(self) -> bool:
        return not self.in_use and self.pin is not Pin.HARD
