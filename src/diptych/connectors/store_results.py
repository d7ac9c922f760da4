"""What a store client takes and gives, whichever node it asks."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from diptych.proto import kvstore_pb2 as pb


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """Copy between views of one size; other threads run meanwhile."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Outcome(enum.Enum):
    """What became of one item."""

    OK = "ok"
    NOT_FOUND = "not_found"
    EXISTS = "exists"  # put: it is there already and nothing was written; as good as OK
    NO_SPACE = "no_space"
    EXPIRED = "expired"  # the lease or reservation lapsed before the bytes were moved
    CORRUPT = "corrupt"  # the bytes do not have the object's checksum
    INVALID = "invalid"  # bad key or size, or the key's object has another size
    UNAVAILABLE = "unavailable"  # the store does not answer


_OUTCOMES = {
    pb.ITEM_STATUS_OK: Outcome.OK,
    pb.ITEM_STATUS_NOT_FOUND: Outcome.NOT_FOUND,
    pb.ITEM_STATUS_EXISTS: Outcome.EXISTS,
    pb.ITEM_STATUS_NO_SPACE: Outcome.NO_SPACE,
    pb.ITEM_STATUS_EXPIRED: Outcome.EXPIRED,
    pb.ITEM_STATUS_INVALID: Outcome.INVALID,
}


def outcome_of(status: int) -> Outcome:
    """Our name of an `ItemStatus`; one that a newer node made up counts as INVALID."""
    return _OUTCOMES.get(status, Outcome.INVALID)  # type: ignore[call-overload, no-any-return]


@dataclass(frozen=True, slots=True)
class PutItem:
    """An object to store. `write` puts its bytes into the view it is given: writable, contiguous,
    `num_bytes` of format B, uninitialised; or it returns what is left of that (`Move.touch`). It is
    not called when the store has the object or no room, and may be called again for another node.
    With the pool mapped the view is the object's final place. `data`, if given, is what `write`
    would write, and must stay as it is until the put has ended: a stream sends it from where it
    lies. `checksum`, if it is known, is the xxh3-64 of the bytes as they were; others are CORRUPT
    and not stored."""

    key: bytes
    num_bytes: int
    write: Callable[[memoryview], object]
    data: memoryview | None = None
    checksum: int | None = None

    @classmethod
    def of(cls, key: bytes, data: memoryview, checksum: int | None = None) -> PutItem:
        """An object whose bytes lie together already: contiguous, of format B."""
        write = partial(partial, copy_bytes, data)
        return cls(key, data.nbytes, write, data, checksum)


@dataclass(frozen=True, slots=True)
class PutResult:
    """`checksum` is the xxh3-64 of what the store has now: what was written, or what was there
    before. 0 where it is not known (not stored; or EXISTS because another writer just won)."""

    outcome: Outcome
    checksum: int = 0

    @property
    def stored(self) -> bool:
        """Whether the store has the object now."""
        return self.outcome in (Outcome.OK, Outcome.EXISTS)


@dataclass(frozen=True, slots=True)
class GetResult:
    """`checksum` is the xxh3-64 that was verified; 0 unless OK. `num_copies` above 1: the node says
    that so many nodes should share the reads of this object."""

    outcome: Outcome
    num_bytes: int = 0
    checksum: int = 0
    num_copies: int = 1
