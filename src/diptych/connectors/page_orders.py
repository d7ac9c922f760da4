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
    """Bring tokens [start_token, end_token) of a request from `objects` into its blocks.

    Without `checksums_known` an object is what the store has under its key: found there, not named
    by a commit.
    """

    request_id: str
    start_token: int
    end_token: int
    objects: list[KVObject]
    block_ids: list[int]
    checksums_known: bool = True


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store `objects`, whose KV is in the request's blocks once the step ends.

    A prompt's objects come in one or several orders, in token order; `last` closes it. With
    `hand_off` the end is reported, with a commit. With `wait` the step waits for the save; else
    what finds no room to be staged is dropped.
    """

    request_id: str
    epoch: int
    kv_namespace: str
    num_cached_tokens: int
    objects: list[PageObject]
    block_ids: list[int]
    last: bool
    hand_off: bool
    wait: bool = False
    tenant: str = ""


@dataclass(slots=True)
class PageMetadata(KVConnectorMetadata):
    """One step's orders; `aborts` are requests to give up, `num_tokens` the prompt tokens that the
    step computes."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    began_s: float = 0.0


class PageStore(Protocol):
    """Where objects are kept. Used by one thread; every call has a deadline of its own."""

    def put_many(self, items: Sequence[tuple[bytes, memoryview]], tenant: str) -> list[int | None]:
        """Store each (key, bytes), on the tenant's account.

        Returns:
            xxh3-64 of the object as it is stored (an earlier writer's where the key was there),
            None where it could not be stored.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[int | None]:
        """Read each key's object into its buffer, which has the object's exact size.

        Returns:
            The checksum that the object was stored with, None unless it was read whole while it was
            safe to read. The caller verifies what is in the buffer.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...
