"""What the scheduler half of a page connector orders and the worker half carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diptych.connectors.base import KVConnectorMetadata
from diptych.connectors.pages import PageObject
from diptych.engine.request import KVObject


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring tokens [start_token, end_token) of a request from `objects` into its blocks."""

    request_id: str
    start_token: int
    end_token: int
    objects: list[KVObject]
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store `objects`, whose KV is in the request's blocks once the step ends.

    A prompt's objects come in one or several orders, in token order; `last` closes it. With
    `hand_off` the end is reported, with a commit; without, the step waits for the save.
    """

    request_id: str
    epoch: int
    kv_namespace: str
    num_cached_tokens: int
    objects: list[PageObject]
    block_ids: list[int]
    last: bool
    hand_off: bool


@dataclass(slots=True)
class PageMetadata(KVConnectorMetadata):
    """One step's orders; `aborts` are requests to give up."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)


class PageStore(Protocol):
    """Where objects are kept. Used by one thread; every call has a deadline of its own."""

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """Store each (key, bytes).

        Returns:
            xxh3-64 of the object as it is stored (an earlier writer's where the key was there),
            None where it could not be stored.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Read each key's object into its buffer, which has the object's exact size.

        Returns:
            Whether the whole object was read while it was safe to read. The caller compares
            checksums.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...
