"""What the scheduler half of a page connector orders and the worker half carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from diptych.connectors.base import KVConnectorMetadata
from diptych.connectors.pages import PageObject
from diptych.connectors.store_move import not_again
from diptych.engine.request import KVObject


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Bring tokens [start_token, end_token) of a request from `objects` into its blocks.

    Without `checksums_known` an object is what the store has under its key: found there, not named
    by a commit. With `follows` the objects are being stored, and each is awaited. `told_s` is when
    the request arrived, on the monotonic clock.
    """

    request_id: str
    start_token: int
    end_token: int
    objects: list[KVObject]
    block_ids: list[int]
    checksums_known: bool = True
    follows: bool = False
    told_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store `objects`, whose KV is in the request's blocks once the step ends.

    A prompt's objects come in one or several orders, in token order; `last` closes it. With
    `hand_off` the end is reported, with a commit. With `wait` the step waits for the save; else
    what finds no room to be staged is dropped. With `told` the end of the last order is reported as
    one in `saved`.
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
    told: bool = False


@dataclass(slots=True)
class PageMetadata(KVConnectorMetadata):
    """One step's orders; `aborts` are requests to give up, `num_tokens` the prompt tokens that the
    step computes."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    began_s: float = 0.0


class Outgoing(NamedTuple):
    """An object to be stored. `write` fills a view of its size, on any thread, perhaps twice, or
    returns what is left of that (`store_move.Move.touch`)."""

    key: bytes
    num_bytes: int
    write: Callable[[memoryview], object]


class PageStore(Protocol):
    """Where objects are kept. Used by one thread; every call has a deadline of its own."""

    def put_many(self, items: Sequence[Outgoing], tenant: str) -> list[int | None]:
        """Store each object, on the tenant's account.

        Returns:
            xxh3-64 of the object as it is stored (an earlier writer's where the key was there),
            None where it could not be stored.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def get_many(
        self,
        items: Sequence[tuple[bytes, int]],
        sink: Callable[[int, memoryview], object],
        wait_s: float = 0.0,
        goes_on: Callable[[], bool] = not_again,
    ) -> list[int | None]:
        """Read objects by (key, bytes). `sink(i, view)` takes the bytes of object i out of a view
        that ends with the call, or returns what is left of that (`store_move.Move.touch`); any
        thread may call it, and again for one that is read anew.
        With `wait_s` the objects are being stored: where none is there, it waits so long for one;
        as long as one comes and it `goes_on`, it may ask for the others again.

        Returns:
            xxh3-64 of the bytes that the sink was shown last, None unless those were the whole
            object, as it was stored, while it was safe to read.

        Raises:
            TransferError: the store does not answer.
        """
        ...

    def pools(self) -> list[memoryview]:
        """Memory that objects are read from and written to in place, whole pools, writable."""
        ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...
